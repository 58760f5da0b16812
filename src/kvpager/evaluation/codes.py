"""Codes planted early in a long text, asked for at its end: what ``kvpager demo`` shows.

All sentences stand in one text, so that it is read once; then each question is asked and taken back again.
A small model completes a sentence that it has read; it is not asked to chat.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, PreTrainedModel

from kvpager.core.attention import TileEvent
from kvpager.errors import InputError
from kvpager.evaluation.forward import attention, forward, full_cache_bytes
from kvpager.evaluation.text import paragraphs
from kvpager.hf import PagerCache
from kvpager.stats import PagerStats, peak_rss_bytes

__all__ = ["PLANTED", "CodesTask", "Column", "Question", "RecallMap"]

# Sentences that differ in more than the place: the model mixes up eight safes even with all of the text before it.
# They were chosen with the full cache alone, so that in float32 it prefers every digit by a logit of 0.9 or more.
PLANTED = (
    ("The code of the safe in Baker Street is", "7421"),
    ("The number of the cab in Fleet Street is", "4898"),
    ("The price of the stone in Covent Garden is", "9916"),
    ("The mark on the trunk at Paddington is", "3136"),
    ("The wage of the servant from Brixton is", "7061"),
    ("The height of the tower in Windsor is", "8766"),
    ("The room of the doctor in Harley Street is", "2073"),
    ("The ticket of the train to Reading is", "1215"),
)
FIRST_PARAGRAPH = 42  # of the bundled text: filler with which the full cache knows all eight
FIRST_DEPTH, DEPTH_STEP = 0.04, 0.07  # where the sentences stand, as shares of the text
ANSWER_TOKENS = 6  # a blank, four digits, a full stop


@dataclass(frozen=True)
class Question:
    """One planted sentence: its beginning, the code that completes it, and the token at which it stands."""

    beginning: str
    code: str
    token: int


@dataclass(frozen=True)
class CodesTask:
    """A text of `token_ids` with planted sentences, and the questions in the order in which they stand."""

    token_ids: list[int]
    questions: list[Question]
    prompts: list[list[int]]  # token ids of each question's beginning

    @classmethod
    def make(
        cls, tokenizer: Any, text: str, *, tokens: int = 4000, codes: int = 8, seed: int | None = None
    ) -> CodesTask:
        """Fill about `tokens` tokens with the text's paragraphs and plant `codes` sentences in the first 60 %.

        `seed` None plants the codes of PLANTED, a number draws others. Raises InputError when that is not possible.
        """
        if not 1 <= codes <= len(PLANTED):
            raise InputError(f"codes: {codes} is not in 1..{len(PLANTED)}")
        planted = list(PLANTED[:codes])
        if seed is not None:
            rng = np.random.default_rng(seed)
            planted = [(beginning, str(rng.integers(1000, 10000))) for beginning, _ in planted]
        sentences = [f"{beginning} {code}.\n\n" for beginning, code in planted]
        room = tokens - sum(len(_encode(tokenizer, sentence)) for sentence in sentences)
        filler = _filler(tokenizer, text, room)
        ids: list[int] = []
        questions: list[Question] = []
        plain = 0
        for part in filler:
            ids += part
            plain += len(part)
            while len(questions) < codes and plain >= (FIRST_DEPTH + DEPTH_STEP * len(questions)) * room:
                beginning, code = planted[len(questions)]
                sentence = sentences[len(questions)]
                questions.append(Question(beginning, code, len(ids)))
                ids += _encode(tokenizer, sentence)
        if len(questions) < codes:
            raise InputError(f"tokens: {tokens} leave no room to plant {codes} codes")
        return cls(ids, questions, [_encode(tokenizer, question.beginning) for question in questions])


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _filler(tokenizer: Any, text: str, room: int) -> list[list[int]]:
    """Token ids of paragraphs, one after the other, that fill at most `room` tokens."""
    found = paragraphs(text)
    parts: list[list[int]] = []
    for paragraph in found[FIRST_PARAGRAPH if len(found) > FIRST_PARAGRAPH else 0 :]:
        ids = _encode(tokenizer, paragraph + "\n\n")
        if len(ids) > room:
            return parts
        room -= len(ids)
        parts.append(ids)
    if room > 0.1 * sum(map(len, parts)):
        raise InputError(f"text: it is too short; {room} more tokens are needed")
    return parts


class RecallMap:
    """Observer of a pager: which pages came back, by layer and block, and what attention went to them.

    recalls  int, pages recalled since `clear`
    mass     float64 [layers, blocks], softmax mass that recalled pages got since `clear`, summed over heads and tiles
    total    the same, since `restart`
    heat     float32 [layers, blocks], 0..1: the mass of the latest recalls, fading with `fade`: what lights up
    """

    def __init__(self, layers: int, blocks: int) -> None:
        self.recalls = 0
        self.mass: npt.NDArray[np.float64] = np.zeros((layers, blocks))
        self.total = np.zeros_like(self.mass)
        self.heat: npt.NDArray[np.float32] = np.zeros((layers, blocks), np.float32)

    def __call__(self, event: TileEvent) -> None:
        """Take in one tile of one layer."""
        heads, blocks = event.recalled[:, 0], event.recalled[:, 1]
        came = np.zeros(self.mass.shape[1])
        np.add.at(came, blocks, event.page_mass[heads, blocks])
        self.recalls += len(blocks)
        self.mass[event.layer] += came
        self.total[event.layer] += came
        lit = np.minimum(1, np.sqrt(20 * came)).astype(np.float32)  # a twentieth of one head's attention is full light
        self.heat[event.layer] = np.maximum(self.heat[event.layer], lit)

    def fade(self, factor: float) -> None:
        """Let what has lit up grow darker."""
        self.heat *= np.float32(factor)

    def clear(self) -> None:
        """Begin a new count; `total` goes on."""
        self.recalls = 0
        self.mass[:] = 0

    def restart(self) -> None:
        """Forget everything."""
        self.clear()
        self.total[:] = 0

    @property
    def brightest(self) -> int | None:
        """The block whose recalled pages were attended to most since `clear`, the first block apart.

        Every text's first block draws attention, whatever it says.
        """
        weight = self.mass[:, 1:].sum(axis=0)
        return 1 + int(weight.argmax()) if weight.any() else None


class Column:
    """One way of holding the text: a model, the attention that it runs with, and a cache."""

    def __init__(self, name: str, model: PreTrainedModel, cache: DynamicCache | PagerCache) -> None:
        self.name, self.model, self.cache = name, model, cache
        self.attention = "kvpager" if isinstance(cache, PagerCache) else "sdpa"

    def read(self, token_ids: Sequence[int]) -> None:
        """Read part of the text."""
        with torch.inference_mode(), attention(self.model, self.attention):
            forward(self.model, self.cache, token_ids, last=True)

    def answer(self, prompt: Sequence[int], count: int = ANSWER_TOKENS) -> Iterator[int]:
        """Read a question and yield `count` tokens, each the likeliest; then take all of it back.

        In mode discard, pages that the question pushed out stay gone: at most those of its own few blocks.
        """
        before = self.cache.get_seq_length()
        new: Sequence[int] = prompt
        try:
            for _ in range(count):
                with torch.inference_mode(), attention(self.model, self.attention):
                    token = int(forward(self.model, self.cache, new, last=True)[-1].argmax())
                new = [token]
                yield token
        finally:
            self.cache.crop(before - self.cache.get_seq_length())

    @property
    def stats(self) -> PagerStats | None:
        """The pager's figures; None for the full cache."""
        return self.cache.stats() if isinstance(self.cache, PagerCache) else None

    def memory(self) -> dict[str, int]:
        """Bytes, told whole (promise 7): frames, digests, tables, their sum, swap, and the process's peak."""
        stats = self.stats
        if stats is None:
            assert isinstance(self.cache, DynamicCache)
            size = full_cache_bytes(self.cache)
            return {
                "pool_bytes": size,
                "digest_bytes": 0,
                "table_bytes": 0,
                "resident_bytes": size,
                "swap_bytes": 0,
                "peak_rss_bytes": peak_rss_bytes(),
            }
        return {
            "pool_bytes": stats.pool_bytes,
            "digest_bytes": stats.digest_bytes,
            "table_bytes": stats.table_bytes,
            "resident_bytes": stats.resident_bytes,
            "swap_bytes": stats.swap_bytes,
            "peak_rss_bytes": stats.peak_rss_bytes,
        }
