"""The thread that tries a far tier again, so that nobody who waits for an answer has to."""

from __future__ import annotations

import threading

from kvpager.stores.guard import Guard

__all__ = ["Prober"]

_LEAST_S = 0.01


class Prober:
    """Begins when a guard's reading breaker opens, tries after each pause, and ends when it has closed."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        guard.alarm = self.begin
        if guard.reading.reason is not None:
            self.begin()

    def begin(self) -> None:
        """The breaker is open."""
        with self._lock:
            if self._thread is None and not self._stopping.is_set():
                self._thread = threading.Thread(target=self._run, name="kvpager-store-prober", daemon=True)
                self._thread.start()

    def stop(self, timeout: float) -> None:
        """End the thread, after what it is trying."""
        self._stopping.set()
        thread = self._thread
        if thread is not None:
            thread.join(timeout)

    def _run(self) -> None:
        reading = self._guard.reading
        while not self._stopping.is_set():
            with self._lock:
                if reading.reason is None or self._guard.off:
                    self._thread = None  # whoever opens the breaker after this begins another one
                    return
            if not self._stopping.wait(max(_LEAST_S, reading.wait_s)):
                self._guard.probe()
