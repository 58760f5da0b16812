"""Slots in slabs, with a checksum a slot: what both kinds of swap have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import gcd

import numpy as np
import numpy.typing as npt

from kvpager.errors import InputError, PageLost, SwapError, SwapFull
from kvpager.ports import Bytes, IntArray
from kvpager.swap.copying import Slabs, Sums

__all__ = ["SLAB_BYTES", "SlabSwap"]

SLAB_BYTES = 2**20  # the least that is added at once; from 8 MiB on it is an eighth of what is there
_MOST_SLOTS = 2**31 - 1  # slots are kept as int32 in the free list


class SlabSwap(ABC):
    """Slots of one page each, laid out in slabs that are added when room is needed (see ports.Swap).

    A slab never moves once it is there, so growing copies nothing. Freed slots are used again before new
    ones, lowest first, so that pages written together tend to lie together.

    nbytes         bytes that it holds now, free slots included
    table_bytes    bytes of its own books in memory: checksum, state and place in the free list of every slot
    """

    nbytes: int
    table_bytes: int

    def __init__(self, page_bytes: int, limit_bytes: int, granularity: int = 1) -> None:
        """`granularity`: slabs hold a multiple of so many bytes (but the last one, which ends at the limit)."""
        if page_bytes < 1:
            raise InputError(f"page_bytes: {page_bytes} is not above zero")
        if limit_bytes < 0:
            raise InputError(f"limit_bytes: {limit_bytes} is below zero")
        self.page_bytes = page_bytes
        self.limit_bytes = limit_bytes
        self._limit_slots = min(limit_bytes // page_bytes, _MOST_SLOTS)
        self._multiple = granularity // gcd(granularity, page_bytes)
        self._slabs = Slabs()
        self._sums: Sums = np.zeros(0, np.int64)
        self._live = np.zeros(0, np.bool_)
        self._free = np.zeros(0, np.int32)  # a stack: [:_free_count] are free, the last is used next
        self._free_count = 0
        self._closed = False
        self._count_bytes()

    @abstractmethod
    def _add_slab(self, slots: int) -> Bytes:
        """Make room for `slots` more pages, uint8 [slots, page_bytes]. Raises SwapFull or SwapError."""

    @property
    def used(self) -> int:
        """Slots in use."""
        return self._capacity - self._free_count

    def write(self, pages: Bytes, rows: IntArray | None = None) -> IntArray:
        """Store pages, uint8 [n, page_bytes], or so many `rows` of them; returns their slots, int64 [n].

        Raises SwapFull, before anything is written, when they don't fit under the limit or on the disk.
        """
        self._check_open()
        if pages.dtype != np.uint8 or pages.ndim != 2 or pages.shape[1] != self.page_bytes:
            raise InputError(
                f"pages: {pages.dtype} {list(pages.shape)} given, uint8 [n, {self.page_bytes}] is what swap stores"
            )
        places = np.arange(len(pages)) if rows is None else np.asarray(rows, np.int64)
        count = len(places)
        if count > self._free_count:
            self._grow(count)
        left = self._free_count - count
        slots = np.sort(self._free[left : self._free_count]).astype(np.int64)
        sums = self._slabs.store(slots, np.ascontiguousarray(pages), places)
        self._check_open()
        self._sums[slots] = sums
        self._live[slots] = True
        self._free_count = left
        return slots

    def read(self, slots: IntArray, into: Bytes | None = None, rows: IntArray | None = None) -> Bytes:
        """The pages of slots, uint8 [n, page_bytes]: a copy, or `into` whose `rows` [n] hold them then.

        Raises PageLost, naming the slots, when one was never written, was freed, or differs from what was written.
        """
        self._check_open()
        slots = np.asarray(slots, np.int64)
        known = self._known(slots)
        if not known.all():
            gone = slots[~known]
            raise PageLost(f"swap slots {_some(gone)} hold no page: never written, or freed", gone.tolist())
        if into is None or rows is None:
            into, rows = np.empty((len(slots), self.page_bytes), np.uint8), np.arange(len(slots))
        sums = self._slabs.load(slots, into, rows)
        self._check_open()
        damaged = sums != self._sums[slots]
        if damaged.any():
            gone = slots[damaged]
            raise PageLost(f"swap slots {_some(gone)} differ from what was written (checksum)", gone.tolist())
        return into

    def free(self, slots: IntArray) -> None:
        """Give slots back. A slot that is not in use is a broken invariant: AssertionError, nothing changed."""
        self._check_open()
        slots = np.asarray(slots, np.int64)
        known = self._known(slots)
        if not known.all():
            raise AssertionError(f"swap slots {_some(slots[~known])} are freed but not in use")
        ordered = np.unique(slots)
        if len(ordered) != len(slots):
            raise AssertionError(f"swap slots are freed twice in one call: {_some(slots)}")
        self._live[ordered] = False
        self._free[self._free_count : self._free_count + len(ordered)] = ordered[::-1]
        self._free_count += len(ordered)

    @abstractmethod
    def prefetch(self, slots: IntArray) -> None:
        """Slots that will be read soon: a hint."""

    def close(self) -> None:
        """Release everything; idempotent."""
        self._closed = True
        self._slabs = Slabs()
        self._sums = self._sums[:0].copy()
        self._live = self._live[:0].copy()
        self._free = self._free[:0].copy()
        self._free_count = 0
        self._count_bytes()

    @property
    def _capacity(self) -> int:
        return len(self._live)

    def _count_bytes(self) -> None:
        self.nbytes = self._capacity * self.page_bytes
        self.table_bytes = self._sums.nbytes + self._live.nbytes + self._free.nbytes + self._slabs.starts.nbytes

    def _check_open(self) -> None:
        if self._closed:
            raise SwapError("swap is closed")

    def _known(self, slots: IntArray) -> npt.NDArray[np.bool_]:
        """Which slots hold a page."""
        inside = (slots >= 0) & (slots < self._capacity)
        return inside & self._live[np.where(inside, slots, 0)] if self._capacity else inside

    def _grow(self, count: int) -> None:
        """Add a slab so that `count` slots are free."""
        need = count - self._free_count
        room = self._limit_slots - self._capacity
        if need > room:
            raise SwapFull(
                f"swap is full: {count} pages of {self.page_bytes} bytes are to be written, {self._free_count + room} "
                f"more fit under the limit of {self.limit_bytes} bytes ({self.used} slots in use)"
            )
        wish = max(need, SLAB_BYTES // self.page_bytes, self._capacity // 8)
        wish = min(-(-wish // self._multiple) * self._multiple, room)
        least = min(-(-need // self._multiple) * self._multiple, room)
        try:
            slab = self._add_slab(wish)
        except SwapFull:
            if least == wish:
                raise
            slab = self._add_slab(least)  # a disk that is nearly full may still hold what is needed
        first = self._capacity
        fresh = np.arange(first + len(slab) - 1, first - 1, -1, dtype=np.int32)
        self._slabs.add(slab)
        self._sums = np.concatenate([self._sums, np.zeros(len(slab), np.int64)])
        self._live = np.concatenate([self._live, np.zeros(len(slab), np.bool_)])
        # New slots go below the ones that were free already, which are used first.
        self._free = np.concatenate([fresh, self._free])
        self._free_count += len(slab)
        self._count_bytes()


def _some(slots: IntArray) -> str:
    """Slot numbers for a message: the first eight, and how many more there are."""
    shown = ", ".join(str(int(slot)) for slot in slots[:8])
    return f"{shown} and {len(slots) - 8} more" if len(slots) > 8 else shown
