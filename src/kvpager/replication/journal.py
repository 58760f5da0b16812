"""The journal: where an engine tells its requests, so that another machine can go on with them.

What an engine tells is written to a stream in Redis and acknowledged there, by a replica too where there is one, before
it may reach a client. While Redis can't be reached for longer than the bound, requests go on without the journal: they
are not `resumable` any more. What another pair of hands has written since is never overwritten: see `lease`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvpager.errors import ConfigError
from kvpager.journaled import Accepted, Resumable, Told
from kvpager.replication.lease import Lease
from kvpager.replication.limits import Limits
from kvpager.replication.link import Connect
from kvpager.replication.waiting import State, Waiting
from kvpager.replication.writer import Writer

__all__ = ["Journal", "JournalStats"]


@dataclass(frozen=True)
class JournalStats:
    """One look at a journal.

    state       "good", "degraded" or "lost"; lag_s: since when the oldest that waits does, or since it is degraded
    waiting, waiting_bytes   steps and requests that are not acknowledged yet
    entries, bytes           written to the stream, and in all
    wholes      requests that were written in full; beginnings: how often all of them were
    requests    that are held, running and ended
    gone        that have gone on without the journal and have not been forgotten; given_up: how often it was degraded
    replicas    that acknowledge
    """

    state: State
    lag_s: float
    waiting: int
    waiting_bytes: int
    entries: int
    bytes: int
    wholes: int
    beginnings: int
    requests: int
    gone: int
    given_up: int
    replicas: int

    @property
    def degraded(self) -> bool:
        """Whether requests go on without it."""
        return self.state != "good"


class Journal:
    """A JournalSink over a Redis Stream. The lease must have been acquired before `start`."""

    def __init__(
        self,
        connect: Connect,
        lease: Lease,
        page_size: int,
        *,
        on_lost: Callable[[], None],
        scores_every: int = 64,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`connect` gives a client of redis-py that does not try again by itself and waits no longer than the bound.

        `page_size`: tokens of a block. `on_lost` is called once, from a thread of the journal's, when another has the
        lease: from then on nothing is taken, and what waits is never released. Raises ConfigError.
        """
        if scores_every < 1:
            raise ConfigError(f"scores_every: {scores_every} is not above zero")
        if page_size < 1:
            raise ConfigError(f"page_size: {page_size} is not above zero")
        limits = limits or Limits()
        self._scores_every = scores_every
        self._waiting = Waiting(limits, clock, on_lost)
        self._writer = Writer(connect, lease, page_size, self._waiting, limits, clock)

    def adopt(self, known: Mapping[str, Resumable]) -> None:
        """Take over requests that a mirror knows, before `start`.

        An engine that goes on with one accepts it, and tells all that is known of it with the next step: both are
        written as one. Or it does not accept it, and tells what it gains.
        """
        self._writer.adopt(known)

    def start(self) -> None:
        """Begin to write."""
        self._waiting.start()
        self._writer.start()

    @property
    def scores_every(self) -> int:
        """Steps between two tellings of an open block's scores."""
        return self._scores_every

    def accept(self, accepted: Accepted) -> None:
        """A request was taken; comes before anything else of it."""
        self._waiting.accept(accepted)

    def step(self, told: Sequence[Told], done: Callable[[], None]) -> None:
        """What a step gave; see JournalSink. Takes microseconds, whatever Redis does."""
        self._waiting.step(told, done)

    def resumable(self, id: str) -> bool:
        """False once a request has gone on without the journal, or is not known to it."""
        return self._waiting.resumable(id)

    def abandon(self, ids: Iterable[str]) -> None:
        """Nobody goes on with these requests, which were adopted: they are held no longer."""
        self._waiting.abandon(ids)

    def lose(self) -> None:
        """Another has the lease, as its keeper says: refuse everything from now on, and call `on_lost` if not yet."""
        self._waiting.lose()

    def stats(self) -> JournalStats:
        """Figures."""
        waiting, writer = self._waiting, self._writer
        items, size, lag, gone = waiting.look()
        return JournalStats(
            state=waiting.state,
            lag_s=lag,
            waiting=items,
            waiting_bytes=size,
            entries=writer.entries,
            bytes=writer.bytes,
            wholes=writer.wholes,
            beginnings=writer.beginnings,
            requests=len(writer.requests),
            gone=gone,
            given_up=waiting.given_up,
            replicas=writer.replicas,
        )

    def close(self, flush_s: float = 2.0) -> None:
        """Write what waits, as far as that takes no longer, and end; idempotent. The lease stays as it is.

        What was not written then is released as if the journal were degraded, and so is what comes later.
        """
        self._waiting.close(flush_s)
        self._writer.join()
