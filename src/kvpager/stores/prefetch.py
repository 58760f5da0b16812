"""Blocks that are read before they are asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvpager.ports import Bytes

__all__ = ["Prefetcher"]

_AT_ONCE = 4  # blocks a read: an urgent one waits for no more than that


class Prefetcher:
    """Reads blocks that will be wanted, in its own thread, into bounded memory, until each is taken once."""

    def __init__(self, read: Callable[[Sequence[bytes]], list[Bytes | None]], limit_bytes: int, wait_s: float) -> None:
        """`read` never raises; `wait_s`: `take` waits for a block that is being read for no longer than this."""
        self._read = read
        self._limit_bytes = limit_bytes
        self._wait_s = wait_s
        self._changed = threading.Condition()
        self._wanted: list[bytes] = []  # the most wanted last
        self._reading: set[bytes] = set()
        self._held: dict[bytes, Bytes] = {}
        self._bytes = 0
        self._stopping = False
        self._thread: threading.Thread | None = None

    def want(self, keys: Sequence[bytes]) -> None:
        """These are wanted soon, the most wanted first, and those of earlier calls no longer, but for what was read."""
        with self._changed:
            asked = dict.fromkeys(keys)
            self._wanted = [key for key in reversed(asked) if key not in self._held and key not in self._reading]
            for key in [key for key in self._held if key not in asked]:
                if not self._wanted or self._bytes <= self._limit_bytes // 2:
                    break
                self._bytes -= self._held.pop(key).nbytes
            if self._thread is None and self._wanted and not self._stopping:
                self._thread = threading.Thread(target=self._run, name="kvpager-store-reader", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def take(self, keys: Sequence[bytes]) -> list[Bytes | None]:
        """Blocks that were read, which are not held any longer; None for those that are to be read still."""
        with self._changed:
            if not self._reading.isdisjoint(keys):
                self._changed.wait_for(lambda: self._reading.isdisjoint(keys), self._wait_s)
            asked = set(keys)
            self._wanted = [key for key in self._wanted if key not in asked]
            found = [self._held.pop(key, None) for key in keys]
            self._bytes -= sum(payload.nbytes for payload in found if payload is not None)
            self._changed.notify_all()
            return found

    def forget(self, keys: Sequence[bytes] | None = None) -> None:
        """Blocks that must not be handed out any more; None for all. One that is being read just now is not kept."""
        with self._changed:
            gone = [*self._held, *self._reading] if keys is None else keys
            for key in gone:
                self._reading.discard(key)
                payload = self._held.pop(key, None)
                self._bytes -= 0 if payload is None else payload.nbytes
            self._wanted = [] if keys is None else [key for key in self._wanted if key not in set(keys)]

    def stop(self, timeout: float) -> bool:
        """End the thread and hold nothing; returns whether it has ended within so many seconds."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self.forget()
        if self._thread is not None:
            self._thread.join(timeout)
            return not self._thread.is_alive()
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._may_read)
                if self._stopping:
                    return
                some = [self._wanted.pop() for _ in range(min(_AT_ONCE, len(self._wanted)))]
                self._reading.update(some)
            found = self._read(some)
            with self._changed:
                for key, payload in zip(some, found, strict=True):
                    if payload is not None and key in self._reading:
                        self._held[key] = payload
                        self._bytes += payload.nbytes
                self._reading.difference_update(some)
                self._changed.notify_all()

    def _may_read(self) -> bool:
        return self._stopping or (bool(self._wanted) and self._bytes < self._limit_bytes)
