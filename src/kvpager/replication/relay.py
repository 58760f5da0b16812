"""The journal as an engine sees it that outlives its node's roles: it tells the journal of the day, or nobody."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvpager.journaled import Accepted, JournalSink, Told

__all__ = ["Relay"]


class Relay:
    """A JournalSink over the one that `journal` is set to. Without one nothing is told, and nothing is released.

    A journal that was lost stays until the next one takes its place: what comes late is refused by it.
    """

    def __init__(self, scores_every: int = 64) -> None:
        self.journal: JournalSink | None = None
        self._scores_every = scores_every

    @property
    def scores_every(self) -> int:
        """Steps between two tellings of an open block's scores."""
        return self._scores_every

    def accept(self, accepted: Accepted) -> None:
        """A request was taken."""
        if self.journal is not None:
            self.journal.accept(accepted)

    def step(self, told: Sequence[Told], done: Callable[[], None]) -> None:
        """What a step gave."""
        if self.journal is not None:
            self.journal.step(told, done)

    def resumable(self, id: str) -> bool:
        """Whether another process could go on with a request."""
        return self.journal is not None and self.journal.resumable(id)
