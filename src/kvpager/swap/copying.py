"""Pages between slabs and rows of memory, with a checksum a page: by the extension, or by NumPy where it isn't built.

Checksums are compared within one process alone, so that the two may differ in kind.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpager.ports import Bytes, IntArray

__all__ = ["Slabs", "Sums"]

Sums = npt.NDArray[np.int64]

try:
    from kvpager import _native

    native: Any = _native
except ImportError:
    native = None


class Slabs:
    """Arrays of pages, uint8 [n, page_bytes] each, that together are slots counted from 0. A slab never moves.

    arrays  the slabs
    starts  int64: each slab's first slot
    slots   how many there are
    """

    def __init__(self) -> None:
        self.arrays: list[Bytes] = []
        self.starts: IntArray = np.zeros(0, np.int64)
        self.slots = 0
        self._addresses: IntArray = np.zeros(0, np.int64)

    def add(self, slab: Bytes) -> None:
        """One more, after the others."""
        self.arrays.append(slab)
        self.starts = np.append(self.starts, self.slots)
        self._addresses = np.append(self._addresses, slab.ctypes.data)
        self.slots += len(slab)

    def owner(self, slots: IntArray) -> IntArray:
        """The index of the slab that each slot lies in."""
        return np.searchsorted(self.starts, slots, side="right") - 1

    def store(self, slots: IntArray, memory: Bytes, rows: IntArray) -> Sums:
        """Copy rows [n] of memory, uint8 [N, page_bytes], to slots [n]; returns the pages' checksums."""
        if native is not None:
            return self._copied(slots, memory, rows, True)
        pages = memory[rows]
        for slab, part, places in self._by_slab(slots):
            slab[places] = pages[part]
        return _checksums(pages)

    def load(self, slots: IntArray, memory: Bytes, rows: IntArray) -> Sums:
        """Copy slots [n] to rows [n] of memory, uint8 [N, page_bytes]; returns the pages' checksums."""
        if native is not None:
            return self._copied(slots, memory, rows, False)
        pages = np.empty((len(slots), memory.shape[1]), np.uint8)
        for slab, part, places in self._by_slab(slots):
            pages[part] = slab.take(places, axis=0)
        memory[rows] = pages
        return _checksums(pages)

    def _copied(self, slots: IntArray, memory: Bytes, rows: IntArray, to_slots: bool) -> Sums:
        sums = np.empty(len(slots), np.int64)
        held = list(self.arrays)  # another thread may close swap meanwhile: what is being copied stays mapped
        native.copy_pages(self._addresses, self.starts, self.slots, slots, memory, rows, to_slots, sums)
        del held
        return sums

    def _by_slab(self, slots: IntArray) -> Iterator[tuple[Bytes, IntArray, IntArray]]:
        """Slots, sorted into slabs: the slab, which of `slots` lie in it, and their places in it."""
        owner = self.owner(slots)
        for index in np.unique(owner).tolist():
            part = np.flatnonzero(owner == index)
            yield self.arrays[index], part, slots[part] - self.starts[index]


def _checksums(pages: Bytes) -> Sums:
    """CRC-32 of each row."""
    return np.fromiter(map(zlib.crc32, pages), np.int64, len(pages))
