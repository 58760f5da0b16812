"""Swap that goes on in memory when its file can't take more."""

from __future__ import annotations

import numpy as np

from kvpager.errors import PageLost, SwapError, SwapFull
from kvpager.ports import Bytes, IntArray, Swap

__all__ = ["FallbackSwap"]


class FallbackSwap:
    """Pages go to `first`; what it fails to write goes to `second`, up to one limit for both (see ports.Swap).

    So a disk that fills up, or fails, costs memory before it costs an answer. Slots of `first` are even here,
    slots of `second` odd.
    """

    def __init__(self, first: Swap, second: Swap, page_bytes: int, limit_bytes: int) -> None:
        self._parts = (first, second)
        self._page_bytes = page_bytes
        self._limit_bytes = limit_bytes

    @property
    def nbytes(self) -> int:
        """Bytes that both hold now."""
        return sum(part.nbytes for part in self._parts)

    @property
    def table_bytes(self) -> int:
        """Bytes of both's books."""
        return sum(part.table_bytes for part in self._parts)

    @property
    def used(self) -> int:
        """Slots in use."""
        return sum(part.used for part in self._parts)

    def write(self, pages: Bytes, rows: IntArray | None = None) -> IntArray:
        """Store pages, or rows of them; returns their slots [n]. Raises SwapFull when both are full."""
        first, second = self._parts
        try:
            return first.write(pages, rows) * 2
        except SwapError as error:
            held = (self.used + len(pages if rows is None else rows)) * self._page_bytes
            if held > self._limit_bytes:
                raise SwapFull(
                    f"swap is full: it would hold {held} bytes, and swap_limit is {self._limit_bytes}"
                ) from error
            return second.write(pages, rows) * 2 + 1

    def read(self, slots: IntArray, into: Bytes | None = None, rows: IntArray | None = None) -> Bytes:
        """The pages of slots, uint8 [n, page_bytes], or `into` whose `rows` hold them then."""
        if into is None or rows is None:
            into, rows = np.empty((len(slots), self._page_bytes), np.uint8), np.arange(len(slots))
        for which, (part, (mine, own)) in enumerate(zip(self._parts, self._split(slots), strict=True)):
            if len(own):
                try:
                    part.read(own, into, rows[mine])
                except PageLost as error:
                    error.slots = tuple(2 * slot + which for slot in error.slots)
                    raise
        return into

    def free(self, slots: IntArray) -> None:
        """Give slots back."""
        for part, (_, own) in zip(self._parts, self._split(slots), strict=True):
            if len(own):
                part.free(own)

    def prefetch(self, slots: IntArray) -> None:
        """Slots that will be read soon."""
        for part, (_, own) in zip(self._parts, self._split(slots), strict=True):
            if len(own):
                part.prefetch(own)

    def close(self) -> None:
        """Release both; idempotent."""
        for part in self._parts:
            part.close()

    @staticmethod
    def _split(slots: IntArray) -> list[tuple[IntArray, IntArray]]:
        """For each part: the places of its slots, and the slots as it knows them."""
        places = [np.flatnonzero(slots % 2 == odd) for odd in (0, 1)]
        return [(mine, slots[mine] // 2) for mine in places]
