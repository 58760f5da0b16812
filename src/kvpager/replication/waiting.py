"""What waits to be acknowledged, in order, and what becomes of it: acknowledged, or given up after a bound.

A thread of its own calls what is to be called, so that neither a network that hangs nor an engine that computes can
delay it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvpager.journaled import Accepted, Told
from kvpager.replication.limits import Limits

__all__ = ["Item", "State", "Waiting"]

log = logging.getLogger(__name__)

State = Literal["good", "degraded", "lost"]
LATE = 0.25  # of the bound: who wakes so late for a deadline did not run meanwhile
OVERHEAD = 512  # bytes that an item counts for beside its slots


@dataclass
class Item:
    """A request that was taken, or what a step gave. at: when it came; released: whether `done` may be called."""

    accepted: Accepted | None
    told: Sequence[Told]
    done: Callable[[], None] | None
    at: float
    size: int
    released: bool = False

    @property
    def ids(self) -> Iterable[str]:
        """Requests that it is of."""
        return [self.accepted.id] if self.accepted is not None else [told.id for told in self.told]


def size_of(told: Sequence[Told]) -> int:
    """Bytes that a step takes while it waits, about."""
    gained = [one.gained for one in told if one.gained is not None]
    return OVERHEAD * (1 + len(told)) + sum(len(gain.slots) + len(gain.keys) + len(gain.scores) for gain in gained)


class Waiting:
    """A queue between the engine and what writes, and the state of the journal.

    good      items wait to be written
    degraded  items are released as they come, and their requests have gone on without the journal
    lost      another has the lease: nothing is taken and nothing is released
    """

    def __init__(self, limits: Limits, clock: Callable[[], float], on_lost: Callable[[], None]) -> None:
        self._limits, self._clock, self._on_lost = limits, clock, on_lost
        self._lock = threading.Lock()
        self._to_write = threading.Condition(self._lock)
        self._to_release = threading.Condition(self._lock)
        self._drained = threading.Condition(self._lock)
        self._queue: deque[Item] = deque()
        self._pending: deque[Item] = deque()  # not yet released; those of the queue are its end
        self._bytes = 0
        self._known: set[str] = set()
        self._gone: set[str] = set()
        self._untold: set[str] = set()  # of those, that the writer has not heard of
        self._fading: deque[tuple[float, str]] = deque()
        self._failing: float | None = None
        self._since = 0.0
        self._closed = self._told_lost = False
        self.state: State = "good"
        self.generation = 0  # of items: all that were there when they were given up are of an older one
        self.given_up = 0
        self._thread = threading.Thread(target=self._run, name="kvpager-journal-release", daemon=True)

    def start(self) -> None:
        """Begin to release."""
        self._thread.start()

    # -- the engine's side

    def accept(self, accepted: Accepted) -> None:
        """A request was taken."""
        self._put(Item(accepted, (), None, self._clock(), OVERHEAD + 8 * len(accepted.prompt)))

    def step(self, told: Sequence[Told], done: Callable[[], None]) -> None:
        """What a step gave."""
        self._put(Item(None, told, done, self._clock(), size_of(told)))

    def resumable(self, id: str) -> bool:
        """Whether a request is known and has not gone on without the journal."""
        with self._lock:
            return self.state != "lost" and not self._closed and id in self._known and id not in self._gone

    def _put(self, item: Item) -> None:
        if self._closed and self.state != "lost":
            self._call(item.done)  # as if it were degraded; nobody else calls any more
            return
        with self._lock:
            if self.state == "lost":
                return
            if item.accepted is not None:
                self._known.add(item.accepted.id)
                self._gone.discard(item.accepted.id)
                self._untold.discard(item.accepted.id)
            limits = self._limits
            full = len(self._queue) >= limits.queue_entries or self._bytes + item.size > limits.queue_bytes
            if full and self.state == "good":
                self._give_up("too much waits")
            self._pending.append(item)
            self._bytes += item.size
            if self.state == "good":
                self._queue.append(item)
                self._to_write.notify()
            else:
                self._release(item)
            if len(self._pending) == 1 or item.released:
                self._to_release.notify()

    # -- the writer's side

    def know(self, ids: Iterable[str]) -> None:
        """Requests that another journal has known."""
        with self._lock:
            self._known.update(ids)

    def take(self, most_bytes: int, wait_s: float) -> tuple[list[Item], int]:
        """The next items, at least one if there is any within `wait_s`, and their generation."""
        with self._lock:
            if not self._queue and not self._closed and self.state != "lost":
                self._to_write.wait(wait_s)
            taken: list[Item] = []
            while self._queue and (not taken or most_bytes >= self._queue[0].size):
                taken.append(self._queue.popleft())
                most_bytes -= taken[-1].size
            return taken, self.generation

    def acknowledge(self, items: Sequence[Item]) -> None:
        """These are written: they may be released."""
        with self._lock:
            self._failing = None
            for item in items:
                item.released = True
            self._to_release.notify()

    def failing(self) -> None:
        """Redis could not be reached; if this goes on for the bound, the journal is degraded, also when idle."""
        with self._lock:
            if self._failing is None:
                self._failing = self._clock()
                self._to_release.notify()

    def give_up(self, why: str) -> None:
        """Release all that waits, and be degraded."""
        with self._lock:
            if self.state == "good":
                self._give_up(why)

    def abandon(self, ids: Iterable[str]) -> None:
        """These requests go on without the journal."""
        with self._lock:
            self._abandon(ids)

    def recovered(self) -> None:
        """Redis is reached again: what comes from now on waits again."""
        with self._lock:
            self._failing = None
            if self.state == "degraded":
                self.state = "good"
                log.warning("journal: reached again after %.1f s", self._clock() - self._since)

    def lose(self) -> None:
        """Another has the lease: refuse everything from now on."""
        with self._lock:
            if self.state != "lost":
                self.state = "lost"
                self.generation += 1
                self._queue.clear()
                self._pending.clear()
                self._bytes = 0
                self._drained.notify_all()
                self._to_write.notify_all()
                self._to_release.notify_all()

    def take_gone(self) -> set[str]:
        """Requests that have gone on without the journal since this was called last."""
        with self._lock:
            gone, self._untold = self._untold, set()
            return gone

    def forget(self, ids: Iterable[str]) -> None:
        """Requests that are kept no longer."""
        with self._lock:
            self._forget(ids)

    # -- looking

    def look(self) -> tuple[int, int, float, int]:
        """Items and bytes that wait, seconds since the first came (or since the journal is degraded), requests gone."""
        with self._lock:
            now = self._clock()
            lag = now - self._pending[0].at if self._pending else 0.0
            if self.state == "degraded":
                lag = now - self._since
            return len(self._pending), self._bytes, lag, len(self._gone)

    def close(self, flush_s: float) -> None:
        """Wait for what was taken to be acknowledged, give up what was not after so long, and end.

        For the engine's thread, or when that tells nothing any more.
        """
        with self._lock:
            self._drained.wait_for(lambda: not self._pending, flush_s)
            if self._pending and self.state == "good":
                self._give_up("closed before all was written")
            self._closed = True
            self._to_write.notify_all()
            self._to_release.notify_all()
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join(5)

    @property
    def closed(self) -> bool:
        """Whether nothing comes any more."""
        return self._closed

    # -- with the lock held

    def _release(self, item: Item) -> None:
        """Let an item go that is not written."""
        self._abandon(item.ids)
        item.released = True

    def _abandon(self, ids: Iterable[str]) -> None:
        new = {id for id in ids if id in self._known and id not in self._gone}
        self._gone |= new
        self._untold |= new

    def _give_up(self, why: str) -> None:
        log.warning("journal: %s; requests go on without it", why)
        self.state, self._since = "degraded", self._clock()
        self.generation += 1
        self.given_up += 1
        for item in self._pending:
            if not item.released:
                self._release(item)
        self._queue.clear()
        self._to_release.notify()

    def _forget(self, ids: Iterable[str]) -> None:
        for id in ids:
            self._known.discard(id)
            self._gone.discard(id)

    def _fade(self, now: float) -> None:
        """Forget requests that have gone on without the journal some time after they have ended."""
        while self._fading and self._fading[0][0] <= now:
            id = self._fading.popleft()[1]
            if id in self._gone:
                self._forget([id])

    def _ripe(self) -> list[Item]:
        ripe = []
        while self._pending and self._pending[0].released:
            item = self._pending.popleft()
            self._bytes -= item.size
            ripe.append(item)
            for told in item.told:
                if told.finish_reason is not None and told.id in self._gone:
                    self._fading.append((self._clock() + self._limits.ended_s, told.id))
        if not self._pending:
            self._drained.notify_all()
        return ripe

    def _deadline(self) -> float | None:
        """When to give up, if nothing happens."""
        if self.state != "good":
            return None
        starts = [item.at for item in (self._pending[0],)] if self._pending else []
        if self._failing is not None:
            starts.append(self._failing)
        return min(starts) + self._limits.bound_s if starts else None

    # -- the thread

    def _run(self) -> None:
        while True:
            with self._lock:
                ripe = self._ripe()
                if not ripe and not self._turn():
                    return
                lost = self.state == "lost" and not self._told_lost
                self._told_lost |= lost
                self._fade(self._clock())
            for item in ripe:
                self._call(item.done)
            if lost:
                self._call(self._on_lost)

    def _turn(self) -> bool:
        """Wait for something to do, or give up; False when it is closed."""
        if self._closed or (self.state == "lost" and self._told_lost):
            return False
        if self.state == "lost":
            return True
        deadline = self._deadline()
        left = None if deadline is None else deadline - self._clock()
        if left is None or left > 0:
            self._to_release.wait(left)
        elif left < -LATE * self._limits.bound_s:
            self._wait_anew()
        else:
            self._give_up(f"not acknowledged for {self._limits.bound_s:g} s")
        return True

    def _wait_anew(self) -> None:
        """This process was stopped, and another may have the lease: the writer is to find that out first."""
        now = self._clock()
        for item in self._pending:
            item.at = now
        self._failing = None if self._failing is None else now

    @staticmethod
    def _call(function: Callable[[], None] | None) -> None:
        try:
            if function is not None:
                function()
        except Exception:
            log.exception("journal: what was to be told of a step failed")
