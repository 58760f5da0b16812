"""The compiled kernel: attention over pages where they lie, near the memory's speed.

Importing this module raises ImportError where the extension is not built. Sums over many pages are joined by
log-sum-exp in a fixed order (as in FlashAttention's split over keys, arXiv 2205.14135), whatever the threads do:
the same groups of pages give the same bits wherever the pages lie.
"""

from __future__ import annotations

import numpy as np

from kvpager import _native
from kvpager.config import KVShape
from kvpager.errors import InputError
from kvpager.kernels import batch, native_digest
from kvpager.kernels.native_digest import NativeDigest
from kvpager.kernels.native_storage import NativeStorage
from kvpager.ports import (
    Batch,
    BatchResult,
    Digest,
    FloatArray,
    FrameStorage,
    IntArray,
    Layer,
    Masses,
    PageList,
    Partial,
    Settled,
    States,
    TileQuery,
    Tiles,
)

__all__ = ["NativeKernel", "attend_group", "serves"]


def serves(shape: KVShape) -> bool:
    """Whether the compiled kernel can hold and attend to pages of this shape."""
    return native_digest.is_compiled(shape.head_dim)


def _frames(storage: FrameStorage) -> _native.Frames:
    if not isinstance(storage, NativeStorage):
        raise InputError(f"storage: {type(storage).__name__} is not the native kernel's own")
    return storage.native


def attend_group(storage: FrameStorage, tile: TileQuery, pages: PageList, with_pages: bool) -> Partial:
    """Attend one tile to one group of pages, with or without the pages' own log-sum-exp (those of no page then).

    Raises InputError for another kernel's storage, ValueError for arrays of the wrong shape or out of range.
    """
    queries = np.ascontiguousarray(tile.queries, np.float32)
    heads, tokens, _ = queries.shape
    output = np.empty_like(queries)
    lse = np.empty((heads, tokens), np.float32)
    group, count = heads // pages.kv_heads, len(pages.frames) if with_pages else 0
    page_lse = np.empty((group, 1, count) if tokens == 1 else (count, group, tokens), np.float32)
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
        page_lse if with_pages else None,
    )
    return Partial(output, lse, page_lse.transpose(2, 0, 1) if tokens == 1 else page_lse)


def _page_lse(part: Partial) -> FloatArray:
    """The log-sum-exp of a part's pages as the extension lays them out: of one query, pages last."""
    one = part.page_lse.shape[2] == 1
    return np.ascontiguousarray(part.page_lse.transpose(1, 2, 0) if one else part.page_lse)


class NativeBatch:
    """The attention of a call's tiles in one layer (:class:`kvpager.ports.Batch`), in one native call or a few."""

    def __init__(
        self,
        layer: Layer,
        tiles: Tiles,
        queries: States,
        scale: float,
        softcap: float | None,
        digest: NativeDigest | None,
        output: States,
    ) -> None:
        prepared = tiles.prepared
        if prepared is None:
            prepared = tiles.prepared = _prepared(tiles, layer.table.shape, digest)
        pages, count = prepared.pages, len(tiles.fields)
        self._offsets, self._missed = np.empty(count + 1, np.int64), np.empty(count, np.float32)
        self._pages = np.empty((3, pages), np.int64)
        self._recalled, self._masses = np.empty(pages, np.bool_), np.empty((4, pages), np.float32)
        self._ratios = np.empty(prepared.ratios, np.float32)
        rows, heads, blocks = self._pages
        results = (self._offsets, rows, heads, blocks, self._recalled, self._masses, self._ratios, self._missed)
        store = None if digest is None else digest.store
        table, frames = layer.table.reshape(-1), _frames(layer.storage)
        self.advance = _native.Batch(
            prepared, frames, table, layer.layer, store, queries, scale, softcap or 0.0, output, results
        ).advance

    def result(self) -> BatchResult:
        """What the tiles gave, in their order."""
        offsets = self._offsets.tolist()
        count = offsets[-1]  # scores beyond float32 choose fewer pages than there is room for
        rows, heads, blocks = self._pages[:, :count]
        masses = Masses(*self._masses[:, :count])
        return BatchResult(
            offsets, rows, heads, blocks, self._recalled[:count], masses, self._ratios, self._missed.tolist()
        )


def _prepared(tiles: Tiles, table: tuple[int, ...], digest: NativeDigest | None) -> _native.Tiles:
    room = tiles.room
    budget = (-1, 0, 0, 1)
    if room is not None and digest is not None:
        budget = (room.pages, room.sinks, room.recent, digest.sample)
    window = tiles.window or 0
    _, layers, heads = table
    return _native.Tiles(
        tiles.rows, tiles.fields, tiles.given, layers, heads, tiles.page_size, tiles.group_pages, window, budget
    )


class NativeKernel:
    """Kernel over NativeStorage: any grouping of heads, head_dim a multiple of 8 up to 256, windows, soft-capping."""

    name = "native"

    @property
    def numerics(self) -> str:
        """The instruction set decides how sums are rounded; the number changes with the layout of frames."""
        return f"native-2 {_native.isa()}"

    def storage(self, frames: int, shape: KVShape, page_size: int) -> NativeStorage:
        """Make the bytes of `frames` frames; ValueError for a head_dim that it does not serve."""
        return NativeStorage(frames, shape, page_size)

    def attend(self, storage: FrameStorage, tile: TileQuery, pages: PageList) -> Partial:
        """Attend one tile to one group of pages, causally, within the window.

        Slots of a page that are not written, or not visible, have no influence, whatever they hold. Raises InputError
        for another kernel's storage, ValueError for arrays of the wrong shape or out of range.
        """
        return attend_group(storage, tile, pages, with_pages=True)

    def settle(self, parts: list[Partial], heads: IntArray) -> Settled:
        """Join groups of pages in the order given; `heads` [n] names the KV head of each of their pages, in order."""
        first = parts[0]
        masses = np.empty((4, len(heads)), np.float32)
        output = first.output if len(parts) == 1 else np.empty_like(first.output)
        kv_heads = len(first.output) // first.page_lse.shape[1]
        arrays = [(part.output, part.lse, _page_lse(part)) for part in parts]
        _native.settle(arrays, np.ascontiguousarray(heads), kv_heads, output, masses)
        return Settled(output, Masses(masses[0], masses[1], masses[2], masses[3]))

    def within(self, states: States, most: float) -> bool:
        """Whether all numbers are in -most..most; NaN is not."""
        return _native.within(states, most)

    def write(
        self, layer: Layer, pieces: IntArray, keys: States, values: States, digest: Digest | None, full: IntArray
    ) -> None:
        """Store new tokens in the pages of all heads and summarise full pages, in one call."""
        if digest is not None and not isinstance(digest, NativeDigest):
            batch.write(layer, pieces, keys, values, digest, full)
            return
        _, layers, heads = layer.table.shape
        store = None if digest is None else digest.store
        frames, table = _frames(layer.storage), layer.table.reshape(-1)
        _native.write_tokens(frames, table, layer.layer, layers, heads, pieces, keys, values, store, full)

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
        """The attention of tiles, side by side; with digests that are not compiled, one after the other.

        Raises InputError for another kernel's storage, ValueError for arrays of the wrong shape or out of range.
        """
        if digest is not None and not isinstance(digest, NativeDigest):
            return batch.PlainBatch(self, layer, tiles, queries, scale, softcap, digest, output)
        return NativeBatch(layer, tiles, queries, scale, softcap, digest, output)

    def digest(
        self, kind: str, layers: int, kv_heads: int, head_dim: int, page_size: int, sample: int
    ) -> Digest | None:
        """Compiled digests of this kind, or None: the core's own serve."""
        return native_digest.make(kind, layers, kv_heads, head_dim, page_size, sample)
