"""The fewest recalls that any eviction policy could have had: Belady's rule on a recorded run.

L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966:
evict the page whose next use lies farthest ahead. It needs the future, so it is no policy, but a bound.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvpager.errors import InputError

if TYPE_CHECKING:
    from kvpager.core.attention import TileEvent
    from kvpager.core.pager import Pager
    from kvpager.ports import IntArray

__all__ = ["AccessTrace", "optimal_recalls"]

NEVER = np.iinfo(np.int64).max


class AccessTrace:
    """Observer of a pager that records which pages were needed together, in order, for one sequence.

    `groups` holds one int64 array of page numbers (block, layer and head in one) for each group of pages that had to
    be resident at once. What is recorded does not depend on the pool: the selection never does.
    """

    def __init__(self, pager: Pager) -> None:
        self._layers, self._heads = pager.shape.layers, pager.shape.kv_heads
        self._size = pager.group_pages
        self.groups: list[IntArray] = []

    def __call__(self, event: TileEvent) -> None:
        """Record one tile of one layer."""
        heads, blocks = np.nonzero(event.selected)
        pages = (blocks * self._layers + event.layer) * self._heads + heads
        self.groups += [pages[start : start + self._size] for start in range(0, len(pages), self._size)]


def optimal_recalls(groups: Sequence[IntArray], frames: int) -> int:
    """The fewest pages that must be read back when `groups` are needed one after the other in `frames` frames.

    A page needed for the first time is being written: it takes a frame and is not a recall. In a real run it takes it
    somewhat earlier, when its chunk is written, and open pages may not leave at all, so this is a lower bound.
    Raises InputError when a group is larger than the pool.
    """
    largest = max((len(group) for group in groups), default=0)
    if largest > frames:
        raise InputError(f"frames: {frames} can't hold a group of {largest} pages at once")
    following = _next_uses(groups)
    next_use: dict[int, int] = {}  # of resident pages
    farthest: list[tuple[int, int]] = []  # heap of (-next use, page); stale where next_use says otherwise
    seen: set[int] = set()
    recalls = 0
    for group, uses in zip(groups, following, strict=True):
        pages = group.tolist()
        missing = [page for page in pages if page not in next_use]
        recalls += sum(page in seen for page in missing)
        # Pages of this group have the nearest next use of all, so they never come up here before the others.
        excess = len(next_use) + len(missing) - frames
        while excess > 0:
            use, page = heapq.heappop(farthest)
            if next_use.get(page) == -use:
                del next_use[page]
                excess -= 1
        for page, use in zip(pages, uses.tolist(), strict=True):
            next_use[page] = use
            heapq.heappush(farthest, (-use, page))
        seen.update(missing)
    return recalls


def _next_uses(groups: Sequence[IntArray]) -> list[IntArray]:
    """For each page of each group, the index of the next group that needs it, or NEVER."""
    last: dict[int, int] = {}
    uses: list[IntArray] = []
    for index in range(len(groups) - 1, -1, -1):
        pages = groups[index].tolist()
        uses.append(np.array([last.get(page, NEVER) for page in pages], np.int64))
        last.update(dict.fromkeys(pages, index))
    return uses[::-1]
