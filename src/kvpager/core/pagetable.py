"""Where each page is: `[row, layer, kv_head] -> frame`, and its slot in swap."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvpager.ports import IntArray

__all__ = ["ABSENT", "PageTable", "grown"]

ABSENT = -1


def grown(rows: int, needed: int) -> int:
    """The next capacity of a table that grows by an eighth, so that little is allocated in vain."""
    return max(needed, rows + max(8, rows // 8))


class PageTable:
    """Residency of pages. A row is a block's place in the table; rows are reused.

    frame    int32 [rows, layers, heads]: the frame, or ABSENT
    slot     int32 [rows, layers, heads]: the slot in swap that holds the same bytes, or ABSENT (a dirty page)
    sealed   bool [rows, layers]: the pages are full and immutable
    expired  bool [rows, layers]: out of the layer's sliding window, hence the first victims
    stored   bool [rows]: the store has the block's pages, those too that are neither in a frame nor in swap
    left     int32 [rows]: how often one of the block's pages has left the pool and stayed readable
    """

    def __init__(self, layers: int, heads: int) -> None:
        self.layers, self.heads = layers, heads
        self.frame: npt.NDArray[np.int32] = np.empty((0, layers, heads), np.int32)
        self.slot: npt.NDArray[np.int32] = np.empty((0, layers, heads), np.int32)
        self.sealed: npt.NDArray[np.bool_] = np.empty((0, layers), np.bool_)
        self.expired: npt.NDArray[np.bool_] = np.empty((0, layers), np.bool_)
        self.stored: npt.NDArray[np.bool_] = np.empty(0, np.bool_)
        self.left: npt.NDArray[np.int32] = np.empty(0, np.int32)

    @property
    def rows(self) -> int:
        """Rows allocated."""
        return len(self.frame)

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        arrays = (self.frame, self.slot, self.sealed, self.expired, self.stored, self.left)
        return sum(array.nbytes for array in arrays)

    def grow(self, rows: int) -> None:
        """Have at least `rows` rows."""
        more = rows - self.rows
        if more > 0:
            fresh = np.full((more, self.layers, self.heads), ABSENT, np.int32)
            self.frame = np.concatenate([self.frame, fresh])
            self.slot = np.concatenate([self.slot, fresh])
            flags = np.zeros((more, self.layers), np.bool_)
            self.sealed = np.concatenate([self.sealed, flags])
            self.expired = np.concatenate([self.expired, flags])
            self.stored = np.concatenate([self.stored, np.zeros(more, np.bool_)])
            self.left = np.concatenate([self.left, np.zeros(more, np.int32)])

    def flat(self, rows: IntArray | int, layer: int, heads: IntArray) -> IntArray:
        """Flat indices of pages: the owners' names in the frame pool."""
        return (rows * self.layers + layer) * self.heads + heads

    def pages(self, rows: IntArray) -> IntArray:
        """Flat indices of all pages of blocks [n], block by block: [n * layers * heads]."""
        pages = self.layers * self.heads
        flat: IntArray = (rows[:, None] * pages + np.arange(pages)).reshape(-1)
        return flat

    def evictions(self, rows: IntArray) -> int:
        """How often a page of these blocks has left the pool."""
        return int(self.left[rows].sum())

    def clear(self, rows: IntArray, layer: int | slice) -> None:
        """Forget pages whose frames and slots have been given back."""
        self.frame[rows, layer] = ABSENT
        self.slot[rows, layer] = ABSENT
        self.sealed[rows, layer] = False
        self.expired[rows, layer] = False
        if isinstance(layer, slice):
            self.stored[rows] = False
            self.left[rows] = 0
