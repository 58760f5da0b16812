"""Prompts of exact lengths for a server whose tokenizer is not here, and the requests that carry them.

Completions get token ids: their number is exact whatever the server does with text. A chat gets text, which the
server's ``/tokenize`` measures; what the chat template adds comes on top.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpager.bench.workload import Item, Prompts, Workload
from kvpager.errors import InputError, RemoteError
from kvpager.remote import Endpoint, Piece, Remote

__all__ = ["Requests", "chat_texts", "text_ids", "unknown_ids"]

PART = 4000  # characters of one question: some servers refuse texts longer than their context
LONGEST_FILL = 12  # words put in for the last tokens
TRIES = 12
FILLER = "and"
LEAST_VARIETY = 4096


async def text_ids(remote: Remote, model: str, text: str, progress: Callable[[int], None]) -> list[int] | None:
    """The ids of all of `text`; None where the server has no ``/tokenize``. `progress` gets the characters done."""
    ids: list[int] = []
    for start in range(0, len(text), PART):
        found = await remote.tokenize(model, text[start : start + PART])
        if found is None:
            return None
        ids += found
        progress(min(start + PART, len(text)))
    return ids


def unknown_ids(workload: Workload, low: int, high: int) -> list[int]:
    """Random ids in `low` to `high` for a server that does not tell what its ids mean; raises InputError."""
    if not 0 <= low < high:
        raise InputError(f"token-ids: {low}-{high} is not a range")
    size = max(LEAST_VARIETY, 2 * (workload.requests + workload.groups))
    return [int(one) for one in np.random.default_rng(workload.seed).integers(low, high, size=size)]


async def chat_texts(
    remote: Remote,
    model: str,
    words: list[str],
    workload: Workload,
    items: list[Item],
    progress: Callable[[int], None] = lambda done: None,
) -> dict[int, list[dict[str, str]]]:
    """Messages for each item's index: the group's prefix as the system's, the rest as the user's.

    Raises InputError where the server has no ``/tokenize``.
    """
    prompts = Prompts(words, workload, spare=max(0, len(items) - workload.requests))
    prefixes: dict[int, str] = {}
    found: dict[int, list[dict[str, str]]] = {}
    for done, item in enumerate(items):
        messages = []
        prefix = prompts.prefix(item)
        if prefix:
            if item.group not in prefixes:
                take = _taker(prompts.shared, item.group)
                prefixes[item.group] = await _measured(remote, model, take, prefix)
            messages.append({"role": "system", "content": prefixes[item.group]})
        text = await _measured(remote, model, _taker(prompts.own, item), item.prompt_tokens - prefix)
        found[item.index] = [*messages, {"role": "user", "content": text}]
        progress(done + 1)
    return found


def _taker(window: Callable[[Any, int], list[str]], place: Any) -> Callable[[int], list[str]]:
    return lambda count: window(place, count)


async def _measured(remote: Remote, model: str, take: Callable[[int], list[str]], tokens: int) -> str:
    """Words of one place that make `tokens` tokens; as near as it goes where no number of words does."""
    count, best, missed = max(1, round(tokens / 1.4)), "", tokens
    for _ in range(TRIES):
        words = take(count)
        held = await _length(remote, model, " ".join(words))
        if 0 < tokens - held <= LONGEST_FILL:
            words = [*words, *[FILLER] * (tokens - held)]
            held = await _length(remote, model, " ".join(words))
        if not best or abs(tokens - held) < missed:
            best, missed = " ".join(words), abs(tokens - held)
        if missed == 0:
            break
        step = round((tokens - held) * count / max(1, held))
        count = max(1, count + (step or (1 if held < tokens else -1)))
    return best


async def _length(remote: Remote, model: str, text: str) -> int:
    ids = await remote.tokenize(model, text)
    if ids is None:
        raise InputError(
            f"endpoint: {remote.url} has no /tokenize to measure chat texts with; use --endpoint completions"
        )
    return len(ids)


@dataclass(frozen=True)
class Requests:
    """Turns items into requests. `prompts` gives token ids (completions) or messages (chat) by the item's index."""

    remote: Remote
    model: str
    endpoint: Endpoint
    prompts: Callable[[Item], Any]
    ignore_eos: bool = False
    temperature: float = 0.0
    more: Mapping[str, Any] | None = None

    def body(self, item: Item) -> dict[str, Any]:
        """The JSON that is sent for an item, less what asks for a stream."""
        name = "prompt" if self.endpoint == "completions" else "messages"
        return {
            "model": self.model,
            name: self.prompts(item),
            "max_tokens": item.output_tokens,
            "temperature": self.temperature,
            **({"ignore_eos": True} if self.ignore_eos else {}),  # not OpenAI's: sent only where it is asked for
            **(self.more or {}),
        }

    def __call__(self, item: Item) -> AsyncIterator[Piece]:
        """Make the request."""
        return self.remote.stream(self.endpoint, self.body(item))

    async def warm_up(self, items: list[Item]) -> None:
        """Make requests that don't count, one after another; raises RemoteError when one fails."""
        for item in items:
            heard = False
            async for piece in self(item):
                heard = heard or bool(piece.text or piece.usage)
            if not heard:
                raise RemoteError("empty", f"{self.remote.url} ended its stream without any text")
