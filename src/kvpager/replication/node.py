"""A node of a pair: on standby it follows the primary's journal, and becomes the primary when that one's lease ends.

One thread goes around: on standby, taking over, primary, stepping down, on standby. Whoever answers clients is told
through `Host`. What another node writes is never written over: Redis looks at the epoch (see `lease`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from kvpager.journaled import Resumable
from kvpager.replication.journal import Journal
from kvpager.replication.keeper import LeaseKeeper
from kvpager.replication.lease import Holder, Lease
from kvpager.replication.limits import Limits
from kvpager.replication.link import Connect, Unreachable
from kvpager.replication.mirror import Mirror
from kvpager.replication.relay import Relay
from kvpager.stored import KEY_BYTES, Fence

__all__ = ["Host", "Node", "Role"]

log = logging.getLogger(__name__)

Role = Literal["standby", "taking over", "primary", "stepping down"]
LOOKS = 20  # at the lease, in the time that it lives
SHORTEST_LOOK_S, LONGEST_LOOK_S = 0.02, 0.5
PATIENCE = 10  # lease times that a standby leaves to a primary that it has never seen
RETURNS = 3  # lease times that it leaves to the primary after Redis could not be reached: it was cut off as well
WARM_S = 0.5  # between two looks at what to have in memory
FLUSH_S = 2.0  # for what waits to be written, when the lease is handed over


class Host(Protocol):
    """Who has the engine and answers clients. Calls come from the node's thread; they wait until it is done."""

    @property
    def page_size(self) -> int:
        """Tokens of a block."""

    def go_on(self, resumables: Sequence[Resumable]) -> Collection[str]:
        """Go on with these requests, then let clients in; returns the names of those that go on."""

    def step_down(self, flush: Callable[[], None] | None) -> None:
        """Let no client in and let go of all requests. `flush` has written what was told; None where that is useless.

        Never raises.
        """

    def warm(self, keys: Sequence[bytes]) -> None:
        """Stored blocks that would be wanted, were this the primary. Never raises."""


@dataclass(eq=False)
class Term:
    """The time from one acquiring of the lease to its end. asked, lost: how it ends; news: set with either."""

    journal: Journal | None = None
    asked: bool = False
    lost: bool = False

    def __post_init__(self) -> None:
        self.news = threading.Event()

    def lose(self) -> None:
        """Another has the lease. Called from threads of keeper and journal, maybe twice."""
        self.lost = True
        if self.journal is not None:
            self.journal.lose()
        self.news.set()

    def ask(self) -> None:
        """Somebody asks for the lease."""
        self.asked = True
        self.news.set()


class Node:
    """One of a pair, from `start` to `close`. relay: what its engine tells of requests."""

    def __init__(
        self,
        connect: Connect,
        name: str,
        owner: str,
        *,
        eager: bool,
        ttl_s: float = 1.0,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`connect` gives clients of redis-py as Journal wants them; `name` is the pair's, `owner` this node's.

        An `eager` node takes a lease that is free at once; another one leaves it to a primary that may be on its way.
        Raises ConfigError.
        """
        self._connect, self.name, self._owner, self._ttl_s = connect, name, owner, ttl_s
        self._limits, self._clock = limits or Limits(), clock
        self.relay = Relay()
        self._lease = self._new_lease()
        self._role: Role = "standby"
        self._holder: tuple[Holder, float] | None = None
        self._reached = False
        self._mirror: Mirror | None = None
        self._term = Term()
        self._warmed: set[bytes] = set()
        self._patience = 0.0 if eager else PATIENCE * ttl_s
        self._not_before = float("inf")
        self._host: Host | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvpager-node", daemon=True)

    def start(self, host: Host) -> None:
        """Begin, on standby."""
        self._host = host
        self._not_before = self._clock() + self._patience
        self._thread.start()

    def close(self) -> None:
        """End. A lease is handed over, with all that was told written; its requests must have been let go of."""
        self._stop.set()
        self._term.news.set()
        if self._thread.ident is not None:
            self._thread.join(FLUSH_S + self._ttl_s + 10)

    def fence(self) -> Fence:
        """What must be held to write to a store in the same Redis; nobody holds it while this is no primary."""
        return Fence(self._lease.keys.lease, self._lease.epoch)

    def state(self) -> dict[str, Any]:
        """For people and JSON: the role, the lease, and how far this node, or its journal, is behind."""
        lease, mirror, journal = self._lease, self._mirror, self._term.journal
        told: dict[str, Any] = {"role": self._role, "cluster": self.name, "node": self._owner}
        if journal is not None:
            stats = journal.stats()
            told |= {"primary": self._owner, "epoch": lease.epoch, "lease_seconds": round(lease.left_s, 3)}
            told |= {"lag_seconds": round(stats.lag_s, 3), "degraded": stats.degraded, "journal": stats.state}
            return told | {"requests": stats.requests, "replicas": stats.replicas}
        holder, seen = self._holder or (None, 0.0)
        left = None if holder is None else round(max(0.0, holder.left_s - (self._clock() - seen)), 3)
        told |= {"primary": None if holder is None else holder.owner, "epoch": None if holder is None else holder.epoch}
        told |= {"lease_seconds": left, "degraded": not self._reached}
        known = None if mirror is None else mirror.stats()
        lag, requests = (0.0, 0) if known is None else (round(known.lag_s, 3), known.requests)
        return told | {"lag_seconds": lag, "requests": requests}

    # -- the thread

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                mirror = self._mirror = Mirror(self._connect, self.name, limits=self._limits)
                if self._stand_by(mirror):
                    self._serve(mirror)
            except Exception:  # a fault of ours: begin again
                log.exception("node: a fault; it goes back on standby")
                self._step_down(None)
                self._stop.wait(self._ttl_s)
        self._lease.close()

    def _stand_by(self, mirror: Mirror) -> bool:
        """Follow the journal until this node has the lease; False where the node is to end."""
        mirror.start()
        pause = min(max(self._ttl_s / LOOKS, SHORTEST_LOOK_S), LONGEST_LOOK_S)
        next_warm = self._clock()
        while not self._stop.is_set():
            try:
                if self._take():
                    return True
                self._reached = True
            except Unreachable:
                self._reached, self._holder = False, None
                self._not_before = max(self._not_before, self._clock() + RETURNS * self._ttl_s)
            if self._clock() >= next_warm:
                self._warm(mirror)
                next_warm = self._clock() + WARM_S
            self._stop.wait(pause)
        mirror.close()
        return False

    def _take(self) -> bool:
        """Take the lease where it is free and may be taken. Raises Unreachable."""
        holder = self._lease.watch()
        if holder is not None:
            if self._holder is None or self._holder[0].epoch != holder.epoch:
                log.warning("node: on standby; the primary of %s is %s", self.name, holder.owner)
                self._not_before = self._clock()
            self._holder = (holder, self._clock())
            return False
        return self._clock() >= self._not_before and self._lease.acquire()

    def _warm(self, mirror: Mirror) -> None:
        """Have blocks of running requests at hand, those that were not asked for before."""
        wanted: dict[bytes, None] = {}
        for request in mirror.requests().values():
            for saved in request.saved:
                keys = b"" if saved is None else saved.keys
                wanted.update(dict.fromkeys(keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)))
        new = [key for key in wanted if key not in self._warmed]
        self._warmed = set(wanted)
        if new and self._host is not None:
            self._host.warm(new)

    def _serve(self, mirror: Mirror) -> None:
        """Be the primary, until the lease is lost or asked for, or the node is to end."""
        assert self._host is not None, "start() comes first"
        began = self._clock()
        self._role = "taking over"
        term = self._term = Term()
        keeper = LeaseKeeper(self._lease, term.lose, term.ask)
        try:
            known = mirror.finish()
            journal = Journal(self._connect, self._lease, self._host.page_size, on_lost=term.lose, limits=self._limits)
            journal.adopt(known)
            term.journal = self.relay.journal = journal
            journal.start()
            if term.lost:
                journal.lose()
            names = self._host.go_on(list(known.values()))
            journal.abandon([name for name in known if name not in names])
            self._role = "primary"
            taken = (len(names), self._clock() - began)
            log.warning("node: primary of %s, epoch %d; %d requests go on after %.2f s", self.name, self._epoch, *taken)
            if not self._stop.is_set():
                term.news.wait()
        finally:
            self._end(term, keeper)

    @property
    def _epoch(self) -> int:
        return self._lease.epoch

    def _end(self, term: Term, keeper: LeaseKeeper) -> None:
        """No longer be the primary: at once where the lease is another's, else in good order."""
        journal = term.journal
        flush = None if journal is None or term.lost else lambda: journal.close(FLUSH_S)
        if not self._stop.is_set():
            log.warning("node: %s; it steps down", "the lease is another's" if term.lost else "asked to hand over")
            self._step_down(flush)
        elif flush is not None:
            flush()
        keeper.close(release=not term.lost)
        if journal is not None:
            journal.close(0)
        self._lease.close()
        self._term, self._lease = Term(), self._new_lease()
        self._holder, self._warmed = None, set()
        self._not_before = self._clock()

    def _step_down(self, flush: Callable[[], None] | None) -> None:
        self._role = "stepping down"
        if self._host is not None:
            self._host.step_down(flush)
        self._role = "standby"

    def _new_lease(self) -> Lease:
        """One that was never acquired: what belongs to an earlier one keeps that one's epoch."""
        return Lease(self._connect, self.name, self._owner, self._ttl_s)
