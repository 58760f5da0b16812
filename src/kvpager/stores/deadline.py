"""Calls that end in time, whatever the network does: other threads make them, and are given up when they are late."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from kvpager.errors import StoreUnavailable
from kvpager.stores.redis_links import Link

__all__ = ["Calls"]

T = TypeVar("T")


class _Job(Generic[T]):
    """A call and what became of it. `late`: nobody waits for it any more."""

    def __init__(self, work: Callable[[Link], T]) -> None:
        self.done = threading.Event()
        self.late = False
        self.answer: T
        self.error: Exception | None = None
        self._work = work

    def run(self, link: Callable[[], Link]) -> None:
        """Make the call."""
        try:
            self.answer = self._work(link())
        except Exception as error:
            self.error = error
        self.done.set()


class _Worker:
    """A thread with a connection of its own."""

    def __init__(self, make: Callable[[], Link], free: Callable[[_Worker], None]) -> None:
        self.jobs: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        self._make, self._free = make, free
        self._link: Link | None = None
        threading.Thread(target=self._run, name="kvpager-redis", daemon=True).start()

    def cut(self) -> None:
        """End the connection, so that a call that hangs in it ends too."""
        link = self._link
        if link is not None:
            with contextlib.suppress(Exception):  # it is in use: whatever it says, it is not used again
                link.cut()

    def _run(self) -> None:
        while (job := self.jobs.get()) is not None:
            job.run(self._connected)
            if job.late:
                self.cut()
                self._link = None
            self._free(self)
        self.cut()

    def _connected(self) -> Link:
        if self._link is None:
            self._link = self._make()
        return self._link


class Calls:
    """At most `most` calls at once, each in a thread with a connection of its own, made when it is needed.

    A call that is not done in time is given up: who asked goes on, and its connection is ended.
    """

    def __init__(self, make: Callable[[], Link], most: int) -> None:
        self._make, self._most = make, most
        self._changed = threading.Condition()
        self._idle: list[_Worker] = []
        self._workers = 0
        self._closed = False

    def call(self, work: Callable[[Link], T], timeout_s: float) -> T:
        """What `work` gives, in another thread. Raises what it raises, and StoreUnavailable ("timeout")."""
        worker = self._worker(timeout_s)
        job = _Job(work)
        worker.jobs.put(job)
        if not job.done.wait(timeout_s):
            job.late = True
            worker.cut()
            raise StoreUnavailable("timeout", f"Redis did not answer within {timeout_s:g} s")
        if job.error is not None:
            raise job.error
        return job.answer

    def close(self) -> None:
        """End all connections: at once where nobody waits for one, else with the call that goes on."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
            self._changed.notify_all()
        for worker in idle:
            worker.jobs.put(None)

    def _worker(self, timeout_s: float) -> _Worker:
        with self._changed:
            self._changed.wait_for(lambda: self._idle or self._workers < self._most or self._closed, timeout_s)
            if self._closed:
                raise StoreUnavailable("io", "the store in Redis is closed")
            if self._idle:
                return self._idle.pop()
            if self._workers >= self._most:
                raise StoreUnavailable("timeout", f"all {self._most} connections to Redis are in use")
            self._workers += 1
        return _Worker(self._make, self._free)

    def _free(self, worker: _Worker) -> None:
        with self._changed:
            if self._closed:
                worker.jobs.put(None)
            else:
                self._idle.append(worker)
                self._changed.notify()
