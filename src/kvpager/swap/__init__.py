"""Swap: where evicted pages of live sequences stay readable, in memory or in a memory-mapped file.

Below the core, so that a pager can make its own from a setting; see docs/swap.md.
"""

from __future__ import annotations

from pathlib import Path

from kvpager.ports import Swap
from kvpager.swap.fallback import FallbackSwap
from kvpager.swap.file import FileSwap
from kvpager.swap.memory import MemorySwap
from kvpager.swap.slots import SLAB_BYTES

__all__ = ["SLAB_BYTES", "FallbackSwap", "FileSwap", "MemorySwap", "open_swap"]


def open_swap(swap: str | Path | None, page_bytes: int, limit_bytes: int) -> Swap:
    """The swap that a setting names: None or ``"memory"`` is memory, all else the path of a file or folder.

    `page_bytes` is the size of one page, `limit_bytes` the most that swap may hold. A file that can take no more
    (a full disk) is continued in memory, up to the same limit for both. Raises SwapError when the file can't
    be made.
    """
    memory = MemorySwap(page_bytes, limit_bytes)
    if swap is None or swap == "memory":
        return memory
    return FallbackSwap(FileSwap(swap, page_bytes, limit_bytes), memory, page_bytes, limit_bytes)
