"""What the core asks of the outside: protocols for kernels, digests, the bytes of frames, and swap.

Shapes use H (KV heads), G (query heads a KV head), T (queries of a tile), D (head_dim), P (page_size)
and n (pages of one call). Implementations must not keep or write to the arrays they are given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvpager.config import KVShape

__all__ = [
    "WINDOW",
    "BoolArray",
    "Choice",
    "Digest",
    "FloatArray",
    "FrameStorage",
    "IntArray",
    "Kernel",
    "Layer",
    "Masses",
    "PageList",
    "Partial",
    "PlacedPages",
    "ResidentChoice",
    "Room",
    "Rows",
    "Settled",
    "Swap",
    "TileQuery",
]

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Rows = IntArray | slice
"""Rows of a table by block: int64 [n], or a slice where they lie one after the other."""

WINDOW = 32
"""Queries of SnapKV's observation window (arXiv 2404.14469)."""


class FrameStorage(Protocol):
    """The bytes behind the pool's frames, in a layout that belongs to the kernel.

    Some dtypes can code a page only when it is full; such storage holds open pages beside the frames.

    memory  uint8 [frames, page_bytes], the frames themselves where they lie so that a full page's row is what `dump`
            gives and `load` takes, and may be read and written in its place; None where they don't
    """

    memory: Bytes | None

    @property
    def page_bytes(self) -> int:
        """Bytes of a page as it is stored."""

    @property
    def nbytes(self) -> int:
        """Bytes of all frames, and of what is held beside them."""

    def write(self, frames: IntArray, offset: int, keys: FloatArray, values: FloatArray) -> None:
        """Store tokens `offset`.. of each frame's page; keys and values are float32 [n, tokens, D]."""

    def read(self, frames: IntArray, counts: IntArray | None = None) -> tuple[FloatArray, FloatArray]:
        """Keys and values of whole pages, float32 [n, P, D] each.

        `counts` [n] says how many tokens each page has now; None that all are full.
        """

    def load(self, frames: IntArray, pages: Bytes) -> None:
        """Fill frames from stored bytes, uint8 [n, page_bytes]."""

    def dump(self, frames: IntArray) -> Bytes:
        """The stored bytes of frames, uint8 [n, page_bytes], bit-equal."""

    def copy(self, source: IntArray, target: IntArray) -> None:
        """Copy frames to frames."""

    def finish(self, frames: IntArray) -> None:
        """These frames' pages are full for good, or gone: what was held beside them to open them again may go."""

    def suspend(self, frames: IntArray) -> Bytes:
        """All that open pages need to go on elsewhere: uint8 [n * k, page_bytes], k pieces a page after one another."""

    def resume(self, frames: IntArray, pieces: Bytes) -> None:
        """Make frames hold what `suspend` gave, [n * k, page_bytes]: all that is done next gives the same bits."""


class PageList(NamedTuple):
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


class Partial(NamedTuple):
    """Attention over some of a tile's pages: merge with others by their log-sum-exp.

    output    float32 [H * G, T, D], normalised over these pages (zeros where none is visible)
    lse       float32 [H * G, T], -inf where none is visible
    page_lse  float32 [n, G, T], each page's own log-sum-exp
    """

    output: FloatArray
    lse: FloatArray
    page_lse: FloatArray


class Masses(NamedTuple):
    """The softmax mass that one tile gave to n pages, float32 [n] each.

    peak    the most that one query of the tile and group gave
    total   summed over the tile's queries, mean over the query group
    last    what the tile's last query gave, mean over the group
    window  as `total`, over the tile's last 32 queries alone
    """

    peak: FloatArray
    total: FloatArray
    last: FloatArray
    window: FloatArray


class Settled(NamedTuple):
    """A tile's attention once all its groups of pages are in: output float32 [H * G, T, D], and each page's mass."""

    output: FloatArray
    masses: Masses


class Room(NamedTuple):
    """What a selection may take: `pages` a KV head, on average, protected ones included.

    sinks, recent  leading pages of the sequence, and last candidates, that are always in
    first_block    block of the first candidate; above 0 where a sliding window hides the sequence's beginning
    """

    pages: int
    sinks: int
    recent: int
    first_block: int = 0

    def leading(self, candidates: int) -> int:
        """How many of the first of so many candidates are among the sinks."""
        return min(max(self.sinks - self.first_block, 0), candidates)


class Choice(NamedTuple):
    """The pages of one layer that a tile attends to.

    chosen  bool [H, n]
    ratio   float32 [H, n], the estimate over the smallest one that got a page in: 1 or more where a page is in
    missed  the share of all attention that is estimated to go to pages left out, mean over the queries looked at
    """

    chosen: BoolArray
    ratio: FloatArray
    missed: float


class Digest(Protocol):
    """Small summaries of pages by block row and layer, from which a tile's pages are chosen; see core.digest."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page's digest, all included."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated for digests."""

    @property
    def scratch_nbytes(self) -> int:
        """Bytes of scratch; bounded, whatever the length of the sequences."""

    def grow(self, rows: int) -> None:
        """Make room for `rows` rows."""

    def build(self, layer: int, rows: IntArray, keys: FloatArray) -> None:
        """Make the digests of whole pages: rows [n], keys float32 [n, H, P, D]."""

    def choose(
        self, layer: int, rows: IntArray, tile: TileQuery, starts: IntArray, own_lse: FloatArray, room: Room
    ) -> Choice:
        """Choose among the pages of built rows [n], whose first tokens are at `starts` [n], all before the tile.

        own_lse  float32 [H * G, T]: log-sum-exp of each query's scores of the tile's own keys
        """


class PlacedPages(NamedTuple):
    """Pages of one layer, sorted by head, then by position: int64 [n] each.

    heads, blocks   KV head, and block of the sequence
    rows            the block's row of the page table
    starts, counts  position of the first token, and the tokens that are written
    flat            place in the page table [rows, layers, H], in layer 0
    """

    heads: IntArray
    blocks: IntArray
    rows: IntArray
    starts: IntArray
    counts: IntArray
    flat: IntArray


class ResidentChoice(NamedTuple):
    """Pages chosen by their digests: heads and blocks int64 [n], by head, then by block; ratio and missed as in Choice.

    settled  the tile's attention to its own pages and to these, or None where one of these is absent
    """

    settled: Settled | None
    heads: IntArray
    blocks: IntArray
    ratio: FloatArray
    missed: float


class Layer(NamedTuple):
    """Where a kernel finds a layer's pages: frames of the page table [rows, layers, H], int32, and fixed groups."""

    storage: FrameStorage
    table: npt.NDArray[np.int32]
    layer: int
    group_pages: int


class Kernel(Protocol):
    """Attention over pages that lie scattered in frames."""

    name: str

    def storage(self, frames: int, shape: KVShape, page_size: int) -> FrameStorage:
        """Make the bytes of `frames` frames."""

    def attend(self, storage: FrameStorage, tile: TileQuery, pages: PageList) -> Partial:
        """Attend one tile to one group of pages, causally, within the window."""

    def settle(self, parts: list[Partial], heads: IntArray) -> Settled:
        """Join groups of pages in the order given; `heads` [n] names the KV head of each of their pages, in order."""

    def attend_resident(
        self, layer: Layer, tile: TileQuery, own: PlacedPages, past: PlacedPages | None
    ) -> Settled | None:
        """`attend` to all groups of a tile's own and past pages, and `settle`, in one call, to the same bits.

        None where a page is absent, or where the kernel has no such call.
        """

    def choose_resident(
        self, layer: Layer, tile: TileQuery, own: PlacedPages, digest: Digest, rows: IntArray, room: Room
    ) -> ResidentChoice | None:
        """As `attend_resident`, the past pages being chosen among those of rows [n] as Digest.choose does.

        None where one of its own pages is absent, or where the kernel has no such call.
        """

    def digest(
        self, kind: str, layers: int, kv_heads: int, head_dim: int, page_size: int, sample: int
    ) -> Digest | None:
        """Faster digests of this kind than the core's own, or None; `sample` as in PagerConfig."""


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

    def write(self, pages: Bytes, rows: IntArray | None = None) -> IntArray:
        """Store pages, uint8 [n, page_bytes], or so many rows of them; returns their slots [n]."""

    def read(self, slots: IntArray, into: Bytes | None = None, rows: IntArray | None = None) -> Bytes:
        """The pages of slots, uint8 [n, page_bytes].

        With `into`, uint8 [N, page_bytes], they are copied to its `rows` [n] instead, and it is returned; where
        PageLost is raised these rows may have been overwritten.
        """

    def free(self, slots: IntArray) -> None:
        """Give slots back."""

    def prefetch(self, slots: IntArray) -> None:
        """Slots that will be read soon; a hint."""

    @property
    def used(self) -> int:
        """Slots in use."""

    def close(self) -> None:
        """Release everything (a file is removed); idempotent."""
