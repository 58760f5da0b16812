"""The compiled kernel: attention over pages where they lie, near the memory's speed.

Importing this module raises ImportError where the extension is not built. Sums over many pages are joined by
log-sum-exp in a fixed order (as in FlashAttention's split over keys, arXiv 2205.14135), whatever the threads do:
the same groups of pages give the same bits wherever the pages lie.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvpager import _native
from kvpager.config import KVShape
from kvpager.errors import InputError
from kvpager.kernels import native_digest
from kvpager.kernels.native_digest import NativeDigest
from kvpager.kernels.native_storage import NativeStorage
from kvpager.ports import (
    Digest,
    FloatArray,
    FrameStorage,
    IntArray,
    Layer,
    Masses,
    PageList,
    Partial,
    PlacedPages,
    ResidentChoice,
    Room,
    Settled,
    TileQuery,
)

__all__ = ["NativeKernel", "attend_group", "serves"]

MOST_HEAD_DIM = 256


def serves(shape: KVShape) -> bool:
    """Whether the compiled kernel can hold and attend to pages of this shape."""
    return shape.head_dim % 8 == 0 and shape.head_dim <= MOST_HEAD_DIM


NO_PAGES = (np.empty(0, np.int64),) * 4


def _frames(storage: FrameStorage) -> _native.Frames:
    if not isinstance(storage, NativeStorage):
        raise InputError(f"storage: {type(storage).__name__} is not the native kernel's own")
    return storage.native


def _place(layer: Layer) -> tuple[_native.Frames, npt.NDArray[np.int32], int]:
    """The frames, the page table in one line, and where in it the layer's pages of a block start."""
    return _frames(layer.storage), layer.table.reshape(-1), layer.layer * layer.table.shape[2]


def attend_group(storage: FrameStorage, tile: TileQuery, pages: PageList, page_lse: FloatArray | None) -> Partial:
    """Attend one tile to one group of pages; the pages' log-sum-exp go to page_lse [n, G, T], or are left out.

    Raises InputError for another kernel's storage, ValueError for arrays of the wrong shape or out of range.
    """
    queries = np.ascontiguousarray(tile.queries, np.float32)
    heads, tokens, _ = queries.shape
    output = np.empty_like(queries)
    lse = np.empty((heads, tokens), np.float32)
    _native.attend(
        _frames(storage),
        np.ascontiguousarray(pages.frames),
        np.ascontiguousarray(pages.heads),
        np.ascontiguousarray(pages.starts),
        np.ascontiguousarray(pages.counts),
        pages.kv_heads,
        queries,
        tile.start,
        tile.scale,
        tile.window or 0,
        tile.softcap or 0.0,
        output,
        lse,
        page_lse,
    )
    if page_lse is None:
        page_lse = np.empty((0, heads // pages.kv_heads, tokens), np.float32)
    return Partial(output, lse, page_lse)


class NativeKernel:
    """Kernel over NativeStorage: any grouping of heads, head_dim a multiple of 8 up to 256, windows, soft-capping."""

    name = "native"

    def storage(self, frames: int, shape: KVShape, page_size: int) -> NativeStorage:
        """Make the bytes of `frames` frames; ValueError for a head_dim that it does not serve."""
        return NativeStorage(frames, shape, page_size)

    def attend(self, storage: FrameStorage, tile: TileQuery, pages: PageList) -> Partial:
        """Attend one tile to one group of pages, causally, within the window.

        Slots of a page that are not written, or not visible, have no influence, whatever they hold. Raises InputError
        for another kernel's storage, ValueError for arrays of the wrong shape or out of range.
        """
        heads, tokens, _ = tile.queries.shape
        page_lse = np.empty((len(pages.frames), heads // pages.kv_heads, tokens), np.float32)
        return attend_group(storage, tile, pages, page_lse)

    def settle(self, parts: list[Partial], heads: IntArray) -> Settled:
        """Join groups of pages in the order given; `heads` [n] names the KV head of each of their pages, in order."""
        first = parts[0]
        masses = np.empty((4, len(heads)), np.float32)
        output = first.output if len(parts) == 1 else np.empty_like(first.output)
        kv_heads = len(first.output) // first.page_lse.shape[1]
        arrays = [(part.output, part.lse, part.page_lse) for part in parts]
        _native.settle(arrays, np.ascontiguousarray(heads), kv_heads, output, masses)
        return Settled(output, Masses(masses[0], masses[1], masses[2], masses[3]))

    def attend_resident(
        self, layer: Layer, tile: TileQuery, own: PlacedPages, past: PlacedPages | None
    ) -> Settled | None:
        """`attend` to all groups of a tile's own and past pages, and `settle`, in one call, to the same bits.

        None where a page is absent.
        """
        queries = np.ascontiguousarray(tile.queries, np.float32)
        output = np.empty_like(queries)
        masses = np.empty((4, len(own.heads) + (0 if past is None else len(past.heads))), np.float32)
        done = _native.attend_tile(
            *_place(layer),
            (own.flat, own.heads, own.starts, own.counts),
            NO_PAGES if past is None else (past.flat, past.heads, past.starts, past.counts),
            layer.group_pages,
            layer.table.shape[2],
            queries,
            tile.start,
            tile.scale,
            tile.window or 0,
            tile.softcap or 0.0,
            output,
            masses,
        )
        return Settled(output, Masses(*masses)) if done else None

    def choose_resident(
        self, layer: Layer, tile: TileQuery, own: PlacedPages, digest: Digest, rows: IntArray, room: Room
    ) -> ResidentChoice | None:
        """As `attend_resident`, the past pages being chosen among those of rows [n] as Digest.choose does.

        None where one of its own pages is absent, or where it can't be done in one call: with digests that are not
        compiled, more own pages than a group holds, room for all candidates, or scores beyond float32.
        """
        n, heads = len(rows), layer.table.shape[2]
        sinks = room.leading(n)
        if (
            not isinstance(digest, NativeDigest)
            or len(own.heads) > layer.group_pages
            or not sinks + room.recent <= room.pages < n
        ):
            return None
        queries = np.ascontiguousarray(tile.queries, np.float32)
        output = np.empty_like(queries)
        count = room.pages * heads
        masses = np.empty((4, len(own.heads) + count), np.float32)
        chosen, ratio = np.empty((2, count), np.int64), np.empty((heads, n), np.float32)
        outcome, missed = _native.choose_tile(
            *_place(layer),
            (own.flat, own.heads, own.starts, own.counts),
            layer.group_pages,
            heads,
            queries,
            tile.start,
            tile.scale,
            tile.window or 0,
            tile.softcap or 0.0,
            digest.store,
            layer.layer,
            rows,
            room.first_block,
            layer.table.shape[1] * heads,
            digest.sample,
            room.pages,
            sinks,
            room.recent,
            output,
            masses,
            chosen[0],
            chosen[1],
            ratio,
        )
        if outcome == 0:
            return None
        settled = Settled(output, Masses(*masses)) if outcome == 2 else None
        return ResidentChoice(settled, chosen[0], chosen[1], ratio, missed)

    def digest(
        self, kind: str, layers: int, kv_heads: int, head_dim: int, page_size: int, sample: int
    ) -> Digest | None:
        """Compiled digests of this kind, or None: the core's own serve."""
        return native_digest.make(kind, layers, kv_heads, head_dim, page_size, sample)
