"""Swap in the process's own memory."""

from __future__ import annotations

import numpy as np

from kvpager.errors import SwapFull
from kvpager.ports import Bytes, IntArray
from kvpager.swap.slots import SlabSwap

__all__ = ["MemorySwap"]


class MemorySwap(SlabSwap):
    """Pages in ordinary memory: the simplest swap, and the right one where the pool is dearer than memory."""

    def prefetch(self, slots: IntArray) -> None:
        """Nothing to do: memory is there."""

    def _add_slab(self, slots: int) -> Bytes:
        try:
            return np.empty((slots, self.page_bytes), np.uint8)
        except MemoryError as error:
            raise SwapFull(
                f"no memory for {slots * self.page_bytes} more bytes of swap ({self.nbytes} bytes held)"
            ) from error
