"""Engines over tiny models, and transformers' own cache as the plain oracle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from transformers import DynamicCache

from kvpager import PagerConfig
from kvpager.config import DType
from kvpager.engine.engine import Engine, EngineConfig
from kvpager.engine.outputs import Output
from kvpager.engine.params import SamplingParams
from kvpager.journaled import JournalSink
from kvpager.models import LoadedModel
from kvpager.stored import BlockStore
from tests.hf import tiny
from tests.small_llm import tokenizer

SMALL = PagerConfig(pool=4096, group_pages=4)


@cache
def loaded(name: str = "llama", end_ids: frozenset[int] = frozenset()) -> LoadedModel:
    """A tiny model of tests/hf/tiny.py with a byte-level tokenizer (whose ids go beyond the model's)."""
    model, _ = tiny.pair(name)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer(),
        name=name,
        context_length=model.config.max_position_embeddings,
        weight_bytes=0,
        dtype="float32",
        end_ids=end_ids,
    )


@contextmanager
def engine(
    name: str = "llama",
    pager: PagerConfig = SMALL,
    *,
    end_ids: frozenset[int] = frozenset(),
    clock: Any = None,
    store: BlockStore | None = None,
    journal: JournalSink | None = None,
    kv_dtype: DType | None = None,
    **settings: Any,
) -> Iterator[Engine]:
    """An engine whose books balance at the end."""
    more: dict[str, Any] = {"kv_dtype": kv_dtype, **({} if clock is None else {"clock": clock})}
    one = Engine(loaded(name, end_ids), pager, EngineConfig(**settings), store=store, journal=journal, **more)
    try:
        yield one
        one.check()
    finally:
        one.close()


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random ids."""
    ids: list[int] = tiny.tokens(length, seed)[0].tolist()
    return ids


def greedy(max_tokens: int | None = 16, **more: Any) -> SamplingParams:
    """The likeliest token each time."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **more)


@cache
def _oracle(name: str, ids: tuple[int, ...], count: int) -> list[int]:
    _, model = tiny.pair(name)
    past = DynamicCache(config=model.config)
    tokens: list[int] = []
    inputs = torch.tensor([ids])
    with torch.no_grad():
        for _ in range(count):
            logits = model(input_ids=inputs, cache=past, use_cache=True, logits_to_keep=1).logits
            tokens.append(int(logits[0, -1].argmax()))
            inputs = torch.tensor([tokens[-1:]])
    return tokens


def oracle(ids: Sequence[int], count: int, name: str = "llama") -> list[int]:
    """The greedy answer by transformers' own cache, the prompt in one forward."""
    return list(_oracle(name, tuple(ids), count))


class Answers:
    """Collects an engine's outputs by request and index."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.text: dict[tuple[str, int], str] = {}
        self.last: dict[tuple[str, int], Output] = {}
        self.outputs: list[Output] = []

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            key = (output.request_id, output.index)
            assert key not in self.last, f"{key} goes on after its end"
            self.tokens.setdefault(key, []).extend(output.token_ids)
            self.text[key] = self.text.get(key, "") + output.text
            self.outputs.append(output)
            if output.finish_reason is not None:
                assert output.usage is not None
                assert output.usage.completion_tokens == len(self.tokens[key])
                self.last[key] = output

    def __getitem__(self, name: str) -> list[int]:
        return self.tokens[name, 0]

    def reason(self, name: str, index: int = 0) -> str | None:
        return self.last[name, index].finish_reason


def run(one: Engine, answers: Answers | None = None, steps: int = 10_000) -> Answers:
    """Step until idle."""
    answers = Answers() if answers is None else answers
    for _ in range(steps):
        if not one.has_work:
            return answers
        answers.take(one.step())
    raise AssertionError(f"the engine is not idle after {steps} steps: {one.stats()}")
