"""A conversation of one session, for tests: what is said and answered, in one engine or a new one for each turn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from kvpager import PagerConfig
from kvpager.engine.engine import Engine
from kvpager.engine.outputs import TokenLogprob
from kvpager.engine.params import SamplingParams
from tests.engine import rig
from tests.engine.rig import SMALL, Answers, prompt
from tests.memory_store import MemoryStore

TIGHT = replace(SMALL, pool=6 * 4 + 4)  # six blocks and a group
BUDGETS = [None, 64]


def drawn(max_tokens: int = 30, **more: Any) -> SamplingParams:
    """Tokens left to chance, from the seed that the session has."""
    return SamplingParams(max_tokens=max_tokens, **more)


class Talk:
    """A conversation of one session: what is said and answered, in one engine or a new one for each turn."""

    def __init__(self, store: MemoryStore, pager: PagerConfig, restarts: bool) -> None:
        self.store, self.pager, self.restarts = store, pager, restarts
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.scores: list[Any] = []
        self.cached: list[int] = []
        self._turns = 0

    def turns(self, said: list[list[int]], params: SamplingParams) -> Talk:
        """Say and be answered."""
        if self.restarts:
            for words in said:
                with self.engine() as engine:
                    self.turn(engine, words, params)
        else:
            with self.engine() as engine:
                for words in said:
                    self.turn(engine, words, params)
        return self

    @contextmanager
    def engine(self) -> Iterator[Engine]:
        """One over the same shelf."""
        self.store = self.store.reopened()
        with rig.engine(pager=self.pager, store=self.store) as engine:
            yield engine

    def turn(self, engine: Engine, words: list[int], params: SamplingParams) -> None:
        self.ids += words
        name = str(self._turns)
        self._turns += 1
        engine.add(name, self.ids, params, session="talk")
        answers = Answers()
        while engine.has_work:
            choice = engine._answers.requests[name].choices[0]
            if choice.sequence is not None and len(choice.output) == (params.max_tokens or 0) - 1:
                self.scores.append([scores(engine, choice.sequence, layer) for layer in range(2)])
            answers.take(engine.step())
        self.ids += answers[name]
        self.logprobs += [one for output in answers.outputs for one in output.logprobs or ()]
        self.cached.append(usage(answers, name).cached_tokens)


def scores(engine: Engine, sequence: Any, layer: int) -> list[tuple[int, int, float]]:
    """A layer's pages in the order in which they would leave, could they all."""
    found = [(one.score, one.block, one.kv_head) for one in engine.pager.scores(sequence, layer)]
    return [(block, head, score) for score, block, head in sorted(found)]


def usage(answers: Answers, name: str) -> Any:
    return answers.last[name, 0].usage


SAID = [prompt(150, seed=1), prompt(50, seed=2), prompt(77, seed=3), prompt(5, seed=4)]
