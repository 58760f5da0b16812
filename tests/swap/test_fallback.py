"""A file that can take no more is continued in memory."""

from pathlib import Path

import numpy as np
import pytest

from kvpager.errors import PageLost, SwapError, SwapFull
from kvpager.swap import FallbackSwap, MemorySwap, open_swap


class Failing(MemorySwap):
    failing = False

    def write(self, pages: np.ndarray, rows: np.ndarray | None = None) -> np.ndarray:
        if self.failing:
            raise SwapError("no space left on device")
        return super().write(pages, rows)


def some_pages(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, (count, 64), dtype=np.uint8)


def test_pages_of_both_parts_come_back_together() -> None:
    first = Failing(64, 2**20)
    swap = FallbackSwap(first, MemorySwap(64, 2**20), 64, 64 * 100)
    before, after = some_pages(7), some_pages(5)
    slots = swap.write(before)
    first.failing = True
    slots = np.concatenate([slots, swap.write(after)])
    assert len(np.unique(slots)) == 12
    assert swap.used == 12
    order = np.random.default_rng(0).permutation(12)
    swap.prefetch(slots[order])
    assert np.array_equal(swap.read(slots[order]), np.concatenate([before, after])[order])
    swap.free(slots[5:9])
    assert swap.used == 8
    with pytest.raises(PageLost):
        swap.read(slots[8:9])
    assert np.array_equal(swap.read(slots[9:]), after[2:])
    first.failing = False
    assert np.array_equal(swap.read(swap.write(before)), before)
    swap.close()
    swap.close()


def test_one_limit_holds_for_both() -> None:
    first = Failing(64, 2**20)
    swap = FallbackSwap(first, MemorySwap(64, 2**20), 64, 64 * 10)
    swap.write(some_pages(6))
    first.failing = True
    swap.write(some_pages(4))
    with pytest.raises(SwapFull, match="it would hold 704 bytes, and swap_limit is 640"):
        swap.write(some_pages(1))
    assert swap.used == 10


def test_a_path_opens_a_file_with_memory_behind_it(tmp_path: Path) -> None:
    swap = open_swap(tmp_path, 4096, 2**20)
    assert isinstance(swap, FallbackSwap)
    pages = np.random.default_rng(1).integers(0, 256, (100, 4096), dtype=np.uint8)
    assert np.array_equal(swap.read(swap.write(pages)), pages)
    assert swap.nbytes >= pages.nbytes
    assert swap.table_bytes >= 900
    with pytest.raises(SwapFull):
        swap.write(np.zeros((200, 4096), np.uint8))
    swap.close()
    assert list(tmp_path.iterdir()) == []
