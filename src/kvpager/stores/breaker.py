"""A breaker: what fails is left alone for a while."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvpager.stores.limits import Limits

__all__ = ["Breaker"]


class Breaker:
    """Says whether a thing may be tried, from how its calls went.

    After so many failures one after the other it opens: nothing is tried for a pause. Then one call may try again; if
    that fails, the pause is twice as long. A success closes it. What was slow may be quick when little is asked of it:
    if it is slow again soon, the next pause is twice as long as the last one. Safe to use from several threads.

    reason  the kind of failure that opened it; None while it is closed
    """

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        """`clock`: seconds. One that jumps back never makes a pause longer than it was to be."""
        self.reason: str | None = None
        self._limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._pause = limits.pause_s
        self._until = 0.0
        self._was_slow = False

    @property
    def wait_s(self) -> float:
        """Seconds until something may be tried; 0 for now."""
        with self._lock:
            return self._left()

    def ready(self) -> bool:
        """Whether to try now. While it is open, one call a pause is told so, and is to tell how it went."""
        with self._lock:
            if self.reason is None:
                return True
            if self._left() > 0:
                return False
            self._until = self._clock() + self._pause  # nobody else tries meanwhile
            return True

    def succeeded(self) -> bool:
        """A call went well; returns whether that closed the breaker."""
        with self._lock:
            was, self.reason = self.reason, None
            self._failures = 0
            if not (self._was_slow and self._clock() - self._until < self._limits.longest_pause_s):
                self._was_slow = False
                self._pause = self._limits.pause_s
            return was is not None

    def failed(self, kind: str, at_once: bool = False) -> bool:
        """A call failed, or was slow; returns whether the breaker is open now. `at_once`: one failure is enough."""
        with self._lock:
            self._failures += 1
            if self.reason is None and not at_once and self._failures < self._limits.failures:
                return False
            if self.reason is not None or self._was_slow:
                self._pause = min(2 * self._pause, self._limits.longest_pause_s)
            self._was_slow = kind == "slow"
            self.reason = kind
            self._until = self._clock() + self._pause
            return True

    def _left(self) -> float:
        if self.reason is None:
            return 0.0
        now = self._clock()
        if self._until - now > self._pause:
            self._until = now + self._pause  # the clock jumped back
        return max(0.0, self._until - now)
