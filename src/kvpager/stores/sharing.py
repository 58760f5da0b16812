"""Blocks from the nearer tiers to the one that nodes share, behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvpager.stored import StoredBlock
from kvpager.stores.level import Level

__all__ = ["Sharer"]

_AT_ONCE = 8
_MOST = 1 << 14  # keys that wait
_WAIT_S = 0.05  # how often one looks whether there is room again


class Sharer:
    """Reads blocks that are to be published from a near level, in its own thread, and puts them into the far one.

    What the near level does not have (any more) is left out, and what the far one has no room for waits.
    """

    def __init__(self, far: Level, read: Callable[[Sequence[bytes]], list[StoredBlock]]) -> None:
        """`read`: blocks that are near; it never raises."""
        self._far, self._read = far, read
        self._changed = threading.Condition()
        self._wanted: dict[bytes, None] = {}
        self._busy = False
        self._stopping = False
        self._thread: threading.Thread | None = None

    def share(self, keys: Sequence[bytes]) -> None:
        """These are to be published."""
        with self._changed:
            self._wanted.update(dict.fromkeys(keys))
            while len(self._wanted) > _MOST:
                del self._wanted[next(iter(self._wanted))]
            if self._thread is None and self._wanted and not self._stopping:
                self._thread = threading.Thread(target=self._run, name="kvpager-store-sharer", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def forget(self, keys: Sequence[bytes] | None = None) -> None:
        """These are not to be published any more; None for all."""
        with self._changed:
            for key in list(self._wanted) if keys is None else keys:
                self._wanted.pop(key, None)

    def flush(self, timeout: float) -> bool:
        """Wait until all is handed on, for so many seconds at most; returns whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._wanted and not self._busy, timeout)

    def stop(self, timeout: float) -> None:
        """End the thread; what waits is left out."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._stopping)
                while not self._stopping and not self._far.room:
                    self._changed.wait(_WAIT_S)
                if self._stopping:
                    return
                some = list(self._wanted)[:_AT_ONCE]
                self._busy = True
            found = self._read(some)
            with self._changed:
                blocks = [block for block in found if block.head.key in self._wanted]  # not forgotten meanwhile
                taken = self._far.put(blocks)
                for key in set(some) - {block.head.key for block in blocks[taken:]}:
                    self._wanted.pop(key, None)
                self._busy = False
                self._changed.notify_all()
                if taken < len(blocks) and not self._stopping:
                    self._changed.wait(_WAIT_S)
