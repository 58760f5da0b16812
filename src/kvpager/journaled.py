"""What a journal is told of running requests, and what another process needs to go on with them.

An engine with a journal tells it each request that it takes, and after each step what every answer has gained: tokens,
and of its pages what cannot be computed from anything else. Full blocks are in a store; here are their keys, the tokens
of the open block one by one, and scores now and then. What is lost of it is computed anew from the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Accepted", "Gained", "JournalSink", "Resumable", "Saved", "Told"]


@dataclass(frozen=True)
class Accepted:
    """A request as it was taken.

    id        its name, as the engine knows it
    prompt    token ids
    params    the SamplingParams that differ from their defaults, as JSON can hold them
    priority  lower ones are served first
    seconds   left until its deadline when it was taken; None for no deadline
    salt      what keeps its blocks from other tenants'
    session   the conversation that it belongs to, or None
    seed      what its answers are drawn with, in whatever way it was found
    client    opaque: what a server needs to answer who comes back
    """

    id: str
    prompt: Sequence[int]
    params: Mapping[str, Any]
    priority: int
    seconds: float | None
    salt: bytes
    session: str | None
    seed: int
    client: bytes = b""


@dataclass(frozen=True)
class Gained:
    """What a sequence holds more than when it was last told; its open block comes token by token.

    header      SavedSequence.header as it is now; "length" says how many tokens it holds
    first       the full block whose key is the first of `keys`; blocks from there on have these keys
    keys        32 bytes each
    slots_from  the position, in the sequence, of the first token of `slots`
    slots       keys and values of tokens of the open block, in order, all of one size. Tokens of a block that has
                become full count no more: what is kept are those from the last block's end on
    scores      of the open block, told every few steps, else b""
    singles     ranges that were computed one token at a time, all of them where they changed, else ()
    """

    header: Mapping[str, Any]
    first: int
    keys: bytes
    slots_from: int
    slots: bytes
    scores: bytes = b""
    singles: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True)
class Told:
    """What one answer of a request gained in one step, or how it ended.

    id, index      the request, and which of its answers
    tokens         that were drawn in this step: none where only its prompt was read, or where it just ended
    logprobs       one for each token where they were asked for, else None; as JSON can hold them
    gained         of its pages; None where nothing can be told of them: what was told before counts no more, and what
                   comes next tells them from their beginning
    finish_reason  "stop", "length", "abort", "deadline" or "error" with the answer's end, else None
    stop_reason    the token or text that ended it
    error          what went wrong
    usage          tokens of prompt and answer, with the end
    """

    id: str
    index: int
    tokens: Sequence[int]
    logprobs: Sequence[Mapping[str, Any]] | None
    gained: Gained | None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    usage: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Saved:
    """What a journal knows of one answer's sequence: all that was gained, joined.

    header   the latest
    tokens   that the sequence holds, prompt and answer; `header["length"]` of them
    keys     of all full blocks, 32 bytes each
    slots    keys and values of all tokens of the open block, in order; b"" where there is none
    scores   of the open block, the latest that were told while it was the open one, else b""
    singles  ranges that were computed one token at a time
    """

    header: Mapping[str, Any]
    tokens: Sequence[int]
    keys: bytes
    slots: bytes
    scores: bytes = b""
    singles: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True)
class Resumable:
    """A request as a journal knows it: what Engine.resume takes.

    accepted  as it was taken
    outputs   tokens so far, by answer
    told      how each answer ended; None for one that runs
    logprobs  of `outputs`, by answer; empty where they were not asked for
    saved     what is known of each answer's sequence; None where it is to be computed anew
    """

    accepted: Accepted
    outputs: Sequence[Sequence[int]]
    told: Sequence[Told | None]
    logprobs: Sequence[Sequence[Mapping[str, Any]]]
    saved: Sequence[Saved | None]


class JournalSink(Protocol):
    """Where an engine tells its requests. All calls but `done` and `resumable` come from the engine's thread.

    Nothing here raises for what the outside does: a journal that can't be reached is degraded, and says so.
    """

    @property
    def scores_every(self) -> int:
        """Steps between two tellings of an open block's scores; at least 1."""

    def accept(self, accepted: Accepted) -> None:
        """A request was taken; comes before anything else of it.

        One that is known already begins anew: who goes on with it tells it from its beginning.
        """

    def step(self, told: Sequence[Told], done: Callable[[], None]) -> None:
        """What a step gave. Never blocks for longer than the sink's own bound.

        `done` is called once, from any thread, when these may be released: acknowledged, or given up as degraded. It is
        called in the order of the steps.
        """

    def resumable(self, id: str) -> bool:
        """False once a request has gone on without the journal, or is not known to it; from any thread, at once."""
