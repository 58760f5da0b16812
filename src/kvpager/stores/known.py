"""What a node knows of blocks that lie elsewhere: a bounded number of keys, for a bounded time."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

__all__ = ["Known"]

MOST = 1 << 16  # keys: about 15 MB
THERE_S = 10.0  # one that makes way meanwhile is found out when its head is read
ABSENT_S = 1.0  # so long, another node's block may stay unseen


class Known:
    """Whether blocks were there when that was last asked. Safe for several threads."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: OrderedDict[bytes, tuple[bool, float]] = OrderedDict()

    def get(self, keys: Sequence[bytes]) -> list[bool | None]:
        """What is known of each: None for nothing, or nothing that is young enough."""
        now = self._clock()
        with self._lock:
            return [self._young(self._seen.get(key), now) for key in keys]

    def note(self, keys: Sequence[bytes], there: Sequence[bool]) -> None:
        """What was found out."""
        now = self._clock()
        with self._lock:
            for key, is_there in zip(keys, there, strict=True):
                self._seen[key] = (is_there, now)
                self._seen.move_to_end(key)
            while len(self._seen) > MOST:
                self._seen.popitem(last=False)

    def forget(self) -> None:
        """Nothing is known any more."""
        with self._lock:
            self._seen.clear()

    @staticmethod
    def _young(seen: tuple[bool, float] | None, now: float) -> bool | None:
        if seen is None or not 0 <= now - seen[1] < (THERE_S if seen[0] else ABSENT_S):
            return None
        return seen[0]
