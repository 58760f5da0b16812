"""What the core asks of the outside: protocols for kernels, the bytes of frames, and swap.

Shapes use H (KV heads), G (query heads a KV head), T (queries of a tile), D (head_dim), P (page_size)
and n (pages of one call). Implementations must not keep or write to the arrays they are given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvpager.config import KVShape

__all__ = ["FloatArray", "FrameStorage", "IntArray", "Kernel", "PageList", "Partial", "Swap", "TileQuery"]

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class FrameStorage(Protocol):
    """The bytes behind the pool's frames, in a layout that belongs to the kernel."""

    page_bytes: int
    nbytes: int

    def write(self, frames: IntArray, offset: int, keys: FloatArray, values: FloatArray) -> None:
        """Store tokens `offset`.. of each frame's page; keys and values are float32 [n, tokens, D]."""

    def read(self, frames: IntArray) -> tuple[FloatArray, FloatArray]:
        """Keys and values of whole pages, float32 [n, P, D] each."""

    def load(self, frames: IntArray, pages: Bytes) -> None:
        """Fill frames from stored bytes, uint8 [n, page_bytes]."""

    def dump(self, frames: IntArray) -> Bytes:
        """The stored bytes of frames, uint8 [n, page_bytes], bit-equal."""

    def copy(self, source: IntArray, target: IntArray) -> None:
        """Copy frames to frames."""


@dataclass(frozen=True)
class PageList:
    """The pages of one group, sorted by head, then by position."""

    frames: IntArray  # [n]
    heads: IntArray  # [n] KV head of each page
    starts: IntArray  # [n] position of each page's first token
    counts: IntArray  # [n] tokens of each page that are written
    kv_heads: int  # H, of the layer; `heads` need not name them all


@dataclass(frozen=True)
class TileQuery:
    """The queries of one tile: float32 [H * G, T, D], already rotated; positions are start .. start + T - 1."""

    queries: FloatArray
    start: int
    scale: float
    window: int | None
    softcap: float | None


@dataclass(frozen=True)
class Partial:
    """Attention over some of a tile's pages: merge with others by their log-sum-exp.

    output    float32 [H * G, T, D], normalised over these pages (zeros where none is visible)
    lse       float32 [H * G, T], -inf where none is visible
    page_lse  float32 [n, G, T], each page's own log-sum-exp
    """

    output: FloatArray
    lse: FloatArray
    page_lse: FloatArray


class Kernel(Protocol):
    """Attention over pages that lie scattered in frames."""

    name: str

    def storage(self, frames: int, shape: KVShape, page_size: int) -> FrameStorage:
        """Make the bytes of `frames` frames."""

    def attend(self, storage: FrameStorage, tile: TileQuery, pages: PageList) -> Partial:
        """Attend one tile to one group of pages, causally, within the window."""


class Swap(Protocol):
    """Page-granular, process-local place below the pool. Slots are whole numbers from 0, given by `write`.

    Every slot carries a checksum. `read` raises PageLost when a slot was never written, was freed, or differs
    from what was written; `write` raises SwapFull at its limit (nothing written then), and SwapError when the
    outside fails.
    """

    @property
    def nbytes(self) -> int:
        """Bytes that it holds now (memory, or of its file)."""

    @property
    def table_bytes(self) -> int:
        """Bytes of its own books in memory."""

    def write(self, pages: Bytes) -> IntArray:
        """Store pages, uint8 [n, page_bytes]; returns their slots [n]."""

    def read(self, slots: IntArray) -> Bytes:
        """The pages of slots, uint8 [n, page_bytes]."""

    def free(self, slots: IntArray) -> None:
        """Give slots back."""

    def prefetch(self, slots: IntArray) -> None:
        """Slots that will be read soon; a hint."""

    @property
    def used(self) -> int:
        """Slots in use."""

    def close(self) -> None:
        """Release everything (a file is removed); idempotent."""
