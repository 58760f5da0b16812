"""What the core asks of the outside: protocols for kernels, digests, the bytes of frames, and swap.

Shapes use H (KV heads), G (query heads a KV head), T (queries of a tile), D (head_dim), P (page_size)
and n (pages of one call). Implementations must not keep or write to the arrays they are given, but where they say so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvpager.config import KVShape

__all__ = [
    "WINDOW",
    "Batch",
    "BatchResult",
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
    "Room",
    "Rows",
    "Settled",
    "States",
    "Swap",
    "TileQuery",
    "Tiles",
]

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Rows = IntArray | slice
"""Rows of a table by block: int64 [n], or a slice where they lie one after the other."""

States = npt.NDArray[Any]
"""Keys, values, queries or outputs [heads, T, D] in any strides, channels side by side: float32, float16, or uint16,
which stands for bfloat16 (NumPy has no such type)."""

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

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of an open page: its keys [D], then its values [D], as they are held until it is full."""

    def tokens(self, frames: IntArray, offsets: IntArray) -> Bytes:
        """One token of each frame's open page, at `offsets` [n] in it: uint8 [n, token_bytes]; frames may repeat."""

    def put_tokens(self, frames: IntArray, tokens: Bytes) -> None:
        """Make frames hold open pages of these tokens, the first of each: uint8 [n, fewer than P, token_bytes].

        All that is done next gives the same bits as where `tokens` gave them.
        """


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
    """Small summaries of pages by block row and layer, from which a tile's pages are chosen; see core.digest.

    kind  what `dump` gives bytes of: text that changes whenever their meaning does
    """

    kind: str

    @property
    def page_bytes(self) -> int:
        """Bytes of one page's digest, all included."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated for digests."""

    @property
    def scratch_nbytes(self) -> int:
        """Bytes of scratch; bounded, whatever the length of the sequences."""

    @property
    def seconds(self) -> float:
        """How long building and choosing have taken so far, together."""

    def grow(self, rows: int) -> None:
        """Make room for `rows` rows."""

    def build(self, layer: int, rows: IntArray, keys: FloatArray) -> None:
        """Make the digests of whole pages: rows [n], keys float32 [n, H, P, D]."""

    def dump(self, rows: IntArray) -> Bytes:
        """The digests of rows in all layers, uint8 [n, layers * H * page_bytes]; for others of this kind and shape."""

    def load(self, rows: IntArray, digests: Bytes) -> None:
        """Make rows hold what `dump` gave: what is chosen then is the same to the bit. ValueError for another size."""

    def choose(
        self, layer: int, rows: IntArray, tile: TileQuery, starts: IntArray, own_lse: FloatArray, room: Room
    ) -> Choice:
        """Choose among the pages of built rows [n], whose first tokens are at `starts` [n], all before the tile.

        own_lse  float32 [H * G, T]: log-sum-exp of each query's scores of the tile's own keys
        """


class Layer(NamedTuple):
    """Where a kernel finds a layer's pages: frames of the page table [rows, layers, H], int32."""

    storage: FrameStorage
    table: npt.NDArray[np.int32]
    layer: int


@dataclass(eq=False)
class Tiles:
    """The tiles of one call in all layers of one window: a ragged batch, sequence after sequence.

    rows         int64 [R]: the page table's rows of the sequences' blocks, one sequence after the other
    fields       int64 [n, 8], a tile each: its first query among the call's; how many; position of the first; where in
                 `rows` its sequence begins; blocks: the first in the window, the tile's first, the one behind it; and
                 the tokens of the sequence that are written
    window       the layers' sliding window
    page_size    tokens of a page
    group_pages  pages of one partial attention; a tile's own and its past pages are each cut into such groups
    room         what a tile may attend to of its past, chosen by digests where there is more; None for all of it
    given        heads and blocks int64 [m], by head, then by block: the past pages of a single tile, in place of all
    prepared     what a kernel has made of it
    """

    rows: IntArray
    fields: IntArray
    window: int | None
    page_size: int
    group_pages: int
    room: Room | None
    given: tuple[IntArray, IntArray] | None = None
    prepared: Any = None


class BatchResult(NamedTuple):
    """What the tiles of a call gave; a tile's pages are its own, then past ones, each by head, then by block.

    offsets   where each tile's pages begin, and the end: n + 1
    rows, heads, blocks   int64 [m]: of each page
    recalled  bool [m]: pages that were absent when their group's turn came
    masses    float32 [m] each
    ratios    float32: of the tiles that chose, one after the other, [H, candidates] each (see Choice)
    missed    float [n]: as in Choice; 0 for those that did not choose
    """

    offsets: list[int]
    rows: IntArray
    heads: IntArray
    blocks: IntArray
    recalled: BoolArray
    masses: Masses
    ratios: FloatArray
    missed: list[float]


class Batch(Protocol):
    """The attention of one call's tiles in one layer."""

    def advance(self, room: int) -> tuple[IntArray, IntArray] | None:
        """Go on as far as resident pages allow. None when all is done.

        Else pages, as flat indices: those that are to be in frames together at the next call, groups of at most `room`
        pages in all or one group, and some of those after them.
        """

    def result(self) -> BatchResult:
        """What the tiles gave, once all is done; the output is written by then."""


class Kernel(Protocol):
    """Attention over pages that lie scattered in frames."""

    name: str

    @property
    def numerics(self) -> str:
        """What the bytes of pages depend on: name, version of the frames' layout, and what decides how it rounds."""

    def storage(self, frames: int, shape: KVShape, page_size: int) -> FrameStorage:
        """Make the bytes of `frames` frames."""

    def attend(self, storage: FrameStorage, tile: TileQuery, pages: PageList) -> Partial:
        """Attend one tile to one group of pages, causally, within the window."""

    def settle(self, parts: list[Partial], heads: IntArray) -> Settled:
        """Join groups of pages in the order given; `heads` [n] names the KV head of each of their pages, in order."""

    def within(self, states: States, most: float) -> bool:
        """Whether all numbers are in -most..most; NaN is not."""

    def write(
        self, layer: Layer, pieces: IntArray, keys: States, values: States, digest: Digest | None, full: IntArray
    ) -> None:
        """Store new tokens, keys and values [H, T, D], in the pages of all heads, and summarise full pages.

        pieces  int64 [n, 4]: row of the page table, offset in the page, first token, how many
        full    int64 [k]: rows that are full now; `digest` gets their pages as they are stored
        """

    def batch(
        self,
        layer: Layer,
        tiles: Tiles,
        queries: States,
        scale: float,
        softcap: float | None,
        digest: Digest | None,
        output: States,
    ) -> Batch:
        """The attention of tiles: queries [H * G, T, D] to `output` of that shape, in its dtype."""

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
