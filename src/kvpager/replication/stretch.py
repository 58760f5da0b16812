"""How far the journal is, which of its entries are still needed, and what keeps the stream long."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvpager.replication.limits import Limits

__all__ = ["Stretch"]

TRIM_SHARE = 16  # the stream is trimmed when a sixteenth of what it may hold is needed no more


class Stretch:
    """The part of a journal since it began anew.

    epoch, number  of the last entry
    beginning      the id of the first
    touched        requests that are in entries since they were written in full: the first such entry, and how many
                   bytes had been written before it
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.epoch = self.number = 0
        self.beginning = ""
        self.touched: dict[str, tuple[int, int]] = {}
        self._bytes = 0
        self._kept = (0, 0)  # the first entry of the stream, and bytes before it

    def begin(self, epoch: int) -> None:
        """Its first entry is the next one."""
        self.number = self.number + 1 if epoch == self.epoch else 0
        self.epoch = epoch
        self.beginning = f"{epoch}-{self.number + 1}"
        self.touched.clear()
        self._kept = (self.number + 1, self._bytes)

    def touch(self, id: str, number: int) -> None:
        """A request is in this entry."""
        self.touched.setdefault(id, (number, self._bytes))

    def forget(self, id: str) -> None:
        """A request is not held any more."""
        self.touched.pop(id, None)

    def wrote(self, size: int, whole: Iterable[str]) -> None:
        """The next entry was written, of so many bytes; these requests were written in full with it."""
        self.number += 1
        self._bytes += size
        for id in whole:
            self.forget(id)

    def ripe(self, running: int, light: Callable[[str], bool]) -> list[str]:
        """Requests that keep more than half of what the stream may hold, and can be written down cheaply; or three
        quarters, whatever it costs.
        """
        entries, size = self._limits.stream_entries, self._allowed(running)
        ripe = []
        for id, (number, before) in self.touched.items():
            share = max((self.number - number) / entries, (self._bytes - before) / size)
            if share >= 0.75 or (share >= 0.5 and light(id)):
                ripe.append(id)
        return ripe

    def trim(self, whole: Iterable[str], dropped: Iterable[str]) -> str:
        """The first entry that is needed when these are written in full and those dropped; "" to trim later."""
        left = [self.touched[id] for id in self.touched.keys() - set(whole) - set(dropped)]
        number, before = min(left, default=(self.number + 1, self._bytes))
        limits = self._limits
        much = number - self._kept[0] >= limits.stream_entries // TRIM_SHARE
        if not much and before - self._kept[1] < limits.stream_bytes // TRIM_SHARE:
            return ""
        self._kept = (number, before)
        return f"{self.epoch}-{number}"

    def _allowed(self, running: int) -> int:
        return self._limits.stream_bytes + self._limits.request_bytes * running
