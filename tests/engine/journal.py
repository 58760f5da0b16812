"""A journal in memory, and what a standby makes of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvpager.journaled import Accepted, Gained, Resumable, Saved, Told

KEY = 32


@dataclass
class _Known:
    accepted: Accepted
    outputs: list[list[int]]
    logprobs: list[list[Any]]
    told: list[Told | None]
    saved: list[Saved | None]


@dataclass
class MemoryJournal:
    """A JournalSink; `steps` are all that was told, `known` what that comes to.

    late  `done` of a step is kept in `waiting` instead of being called
    """

    scores_every: int = 3
    page_size: int = 16
    late: bool = False
    known: dict[str, _Known] = field(default_factory=dict)
    steps: list[list[Told]] = field(default_factory=list)
    waiting: list[Callable[[], None]] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)

    def accept(self, accepted: Accepted) -> None:
        json.dumps(dict(accepted.params))
        n = accepted.params.get("n", 1)
        none: list[Any] = [None] * n
        self.known[accepted.id] = _Known(accepted, [[] for _ in range(n)], [[] for _ in range(n)], [*none], [*none])

    def step(self, told: Sequence[Told], done: Callable[[], None]) -> None:
        assert told
        self.steps.append(list(told))
        for one in told:
            known = self.known[one.id]
            assert known.told[one.index] is None, "told after its end"
            known.outputs[one.index] += one.tokens
            known.logprobs[one.index] += json.loads(json.dumps(list(one.logprobs or ())))
            if one.gained is not None:
                json.dumps(dict(one.gained.header))
                tokens = [*known.accepted.prompt, *known.outputs[one.index]]
                known.saved[one.index] = joined(known.saved[one.index], one.gained, tokens, self.page_size)
            if one.finish_reason is not None:
                known.told[one.index] = one
        if self.late:
            self.waiting.append(done)
        else:
            done()

    def resumable(self, id: str) -> bool:
        return id in self.known and id not in self.lost

    def resumables(self) -> list[Resumable]:
        """What is known of all requests now, as it would have come over a wire."""
        return [
            Resumable(
                replace(one.accepted, params=json.loads(json.dumps(dict(one.accepted.params)))),
                [list(tokens) for tokens in one.outputs],
                list(one.told),
                [list(logprobs) for logprobs in one.logprobs],
                list(one.saved),
            )
            for one in self.known.values()
        ]


def joined(saved: Saved | None, gained: Gained, tokens: list[int], size: int) -> Saved:
    """A sequence as it is known after one more telling of it."""
    length = gained.header["length"]
    start = length // size * size
    keys, slots, scores, singles = b"", b"", gained.scores, tuple(gained.singles)
    if saved is not None:
        old = saved.header["length"]
        assert gained.first <= len(saved.keys) // KEY
        keys, singles = saved.keys, singles or tuple(saved.singles)
        if old // size * size == start and gained.slots_from > start:
            slots = saved.slots[: (gained.slots_from - start) * (len(saved.slots) // (old - start))]
            scores = scores or saved.scores
    return Saved(
        gained.header, tokens[:length], keys[: KEY * gained.first] + gained.keys, slots + gained.slots, scores, singles
    )
