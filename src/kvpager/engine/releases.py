"""What steps gave, held until a journal has it, and given on in the order of the steps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

__all__ = ["Release", "Releases"]


class Release:
    """One step's: `give` says what is to be done with it, `done` that this may be done. From any thread, each once."""

    def __init__(self, owner: Releases) -> None:
        self._owner = owner
        self.action: Callable[[], None] | None = None
        self.acknowledged = False

    def give(self, action: Callable[[], None]) -> None:
        """Have `action` called, as soon as all steps until this one are acknowledged."""
        with self._owner.lock:
            self.action = action
            self._owner.advance()

    def done(self) -> None:
        """The step is acknowledged."""
        with self._owner.lock:
            self.acknowledged = True
            self._owner.advance()


class Releases:
    """The steps of one engine that were not given on yet; nobody waits for them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # held while one is given on: none can overtake it
        self._waiting: deque[Release] = deque()

    def next(self) -> Release:
        """The next step's."""
        release = Release(self)
        with self.lock:
            self._waiting.append(release)
        return release

    def close(self) -> None:
        """Forget those that were not given on yet: they never are."""
        with self.lock:
            self._waiting.clear()

    def advance(self) -> None:
        """Give on what may be; under the lock."""
        while self._waiting and self._waiting[0].acknowledged and (action := self._waiting[0].action) is not None:
            self._waiting.popleft()
            action()
