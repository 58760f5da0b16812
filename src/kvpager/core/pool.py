"""The page allocator: a fixed number of frames, allocated once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvpager.errors import PoolExhausted
from kvpager.ports import IntArray

__all__ = ["NO_PAGE", "FramePool"]

NO_PAGE = -1


class FramePool:
    """Which frame holds which page, which frames are free, and which may be taken away.

    owner      int32 [frames]: the flat index of the page that a frame holds, or NO_PAGE
    evictable  bool [frames]: the page is immutable and nothing in the open step needs it to stay
    pinned     bool [frames]: needed beside the frames that are being made room for right now

    The bytes belong to the kernel's FrameStorage.
    """

    def __init__(self, frames: int) -> None:
        self.frames = frames
        self.owner: npt.NDArray[np.int32] = np.full(frames, NO_PAGE, np.int32)
        self.evictable: npt.NDArray[np.bool_] = np.zeros(frames, np.bool_)
        self.pinned: npt.NDArray[np.bool_] = np.zeros(frames, np.bool_)
        # a stack: the frame freed last is used next, while it is still warm in the cache
        self._stack: npt.NDArray[np.int32] = np.arange(frames - 1, -1, -1, dtype=np.int32)
        self.free_count = frames

    @property
    def used(self) -> int:
        """Frames that hold a page."""
        return self.frames - self.free_count

    @property
    def room(self) -> int:
        """Frames that are free or can be made free: the most full pages that can be in the pool together now.

        Open pages have theirs already. So a fault of at most so many pages that are not open fits.
        """
        return self.free_count + int(np.count_nonzero(self.evictable))

    @property
    def nbytes(self) -> int:
        """Bytes of these books."""
        return self.owner.nbytes + self.evictable.nbytes + self.pinned.nbytes + self._stack.nbytes

    def allocate(self, pages: IntArray, make_room: Callable[[int], None] | None = None) -> IntArray:
        """Give a frame to each page (flat indices, [n]); new frames are not evictable yet.

        `make_room(shortage)` is asked to free frames when too few are free. Raises PoolExhausted, with
        nothing allocated, when there is still no room.
        """
        count = len(pages)
        if count > self.free_count and make_room is not None:
            make_room(count - self.free_count)
        if count > self.free_count:
            raise PoolExhausted(
                f"{count} frames are needed and {self.free_count} of {self.frames} are free; nothing can be evicted "
                f"({int(self.pinned.sum())} pinned, {int(self.evictable.sum())} evictable): use a larger pool"
            )
        self.free_count -= count
        frames = self._stack[self.free_count : self.free_count + count].astype(np.int64)
        self.owner[frames] = pages
        return frames

    def free(self, frames: IntArray) -> None:
        """Give frames back, [n] distinct frames in use."""
        assert (self.owner[frames] != NO_PAGE).all(), "a frame was freed twice"
        self.owner[frames] = NO_PAGE
        self.evictable[frames] = False
        self.pinned[frames] = False
        self._stack[self.free_count : self.free_count + len(frames)] = frames
        self.free_count += len(frames)

    def pages(self, frames: IntArray) -> IntArray:
        """Flat indices of the pages that frames hold, [n]."""
        return self.owner[frames].astype(np.int64)

    def victims(self) -> IntArray:
        """Frames that may be taken away now."""
        return np.flatnonzero(self.evictable & ~self.pinned)

    def check(self) -> None:
        """Assert that each frame is counted once: free or in use."""
        free = self._stack[: self.free_count]
        assert len(np.unique(free)) == self.free_count, "a frame stands twice in the free list"
        assert (self.owner[free] == NO_PAGE).all(), "a free frame has an owner"
        assert int((self.owner == NO_PAGE).sum()) == self.free_count, "free and used frames do not add up"
        assert not self.pinned.any(), "a frame is still pinned"
        assert not self.evictable[free].any(), "a free frame is marked evictable"
