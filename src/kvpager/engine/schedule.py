"""The order in which a sequence's tokens are computed: in whole tiles, or one at a time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

__all__ = ["Range", "Schedule"]

Range = tuple[int, int]
"""Positions start..stop-1; where both are equal, a tile ended there."""

END = 2**63


class Schedule:
    """Which positions of a sequence are computed one at a time; what lies between them comes in whole tiles.

    Under a budget a tile's queries share one selection, so what a sequence's pages hold depends on it: whoever
    computes them anew has to keep to it. An answer's tokens come one at a time, from the prompt's end on. `past` are
    the ranges of earlier answers that the prompt holds.
    """

    def __init__(self, prompt: int, past: Iterable[Range] = ()) -> None:
        self._ranges: list[Range] = []
        for start, stop in sorted([*past, (prompt, END)]):
            if self._ranges and start <= self._ranges[-1][1]:
                first, last = self._ranges.pop()
                start, stop = first, max(last, stop)
            self._ranges.append((start, stop))
        self._starts = [start for start, _ in self._ranges]

    @property
    def first(self) -> int:
        """Where the first tokens come one at a time: up to there it is as every prompt is."""
        return self._starts[0]

    def single(self, position: int) -> bool:
        """Whether this position is computed alone."""
        place = bisect_right(self._starts, position) - 1
        return place >= 0 and position < self._ranges[place][1]

    def cut(self, position: int) -> int:
        """Where a tile that begins here ends at the latest."""
        place = bisect_right(self._starts, position)
        return self._starts[place] if place < len(self._starts) else END

    def until(self, length: int) -> list[Range]:
        """The ranges among the first `length` positions."""
        return [(start, min(stop, length)) for start, stop in self._ranges if start <= length]
