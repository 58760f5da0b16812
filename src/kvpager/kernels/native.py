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
from kvpager.kernels import native_digest
from kvpager.kernels.native_storage import NativeStorage
from kvpager.ports import Digest, FrameStorage, IntArray, Masses, PageList, Partial, Settled, TileQuery

__all__ = ["NativeKernel", "serves"]

MOST_HEAD_DIM = 256


def serves(shape: KVShape) -> bool:
    """Whether the compiled kernel can hold and attend to pages of this shape."""
    return shape.head_dim % 8 == 0 and shape.head_dim <= MOST_HEAD_DIM


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
        if not isinstance(storage, NativeStorage):
            raise InputError(f"storage: {type(storage).__name__} is not the native kernel's own")
        queries = np.ascontiguousarray(tile.queries, np.float32)
        heads, tokens, _ = queries.shape
        output = np.empty_like(queries)
        lse = np.empty((heads, tokens), np.float32)
        page_lse = np.empty((len(pages.frames), heads // pages.kv_heads, tokens), np.float32)
        _native.attend(
            storage.native,
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
        return Partial(output, lse, page_lse)

    def settle(self, parts: list[Partial], heads: IntArray) -> Settled:
        """Join groups of pages in the order given; `heads` [n] names the KV head of each of their pages, in order."""
        first = parts[0]
        masses = np.empty((4, len(heads)), np.float32)
        output = first.output if len(parts) == 1 else np.empty_like(first.output)
        kv_heads = len(first.output) // first.page_lse.shape[1]
        arrays = [(part.output, part.lse, part.page_lse) for part in parts]
        _native.settle(arrays, np.ascontiguousarray(heads), kv_heads, output, masses)
        return Settled(output, Masses(masses[0], masses[1], masses[2], masses[3]))

    def digest(
        self, kind: str, layers: int, kv_heads: int, head_dim: int, page_size: int, sample: int
    ) -> Digest | None:
        """Compiled digests of this kind, or None: the core's own serve."""
        return native_digest.make(kind, layers, kv_heads, head_dim, page_size, sample)
