"""What one thread has another one do: calls that wait for the engine's thread, and results that go back to a loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpager.engine.engine import Engine

__all__ = ["Call", "Calls", "settle"]

Call = tuple[Callable[["Engine"], Any], "asyncio.Future[Any] | None"]
"""What is to be called with the engine, and where its result goes."""


class Calls:
    """Calls that wait for the engine's thread. halted: set for good when that is to end; safe for several threads."""

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._calls: deque[Call] = deque()
        self.halted = False

    def __len__(self) -> int:
        return len(self._calls)

    def post(self, function: Callable[[Engine], Any], future: asyncio.Future[Any] | None = None) -> None:
        """Have a function called between two steps."""
        with self._wake:
            self._calls.append((function, future))
            self._wake.notify()

    def halt(self) -> None:
        """End the thread that waits, when it has done what it was called for."""
        with self._wake:
            self.halted = True
            self._wake.notify()

    def take(self, engine: Engine | None = None) -> list[Call]:
        """All that wait; with an engine that has nothing to do, sleeps while there are none."""
        with self._wake:
            while engine is not None and not (self._calls or self.halted or engine.has_work):
                self._wake.wait()
            calls = list(self._calls)
            self._calls.clear()
            return calls


def settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    """Give a future its result, or the error; on its loop's thread."""
    if future.done():  # who asked was cancelled
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
