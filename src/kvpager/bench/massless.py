"""The compiled kernel without page mass, to see what page mass costs. Only for benchmarks: a pager needs the masses.

Importing this module raises ImportError where the extension is not built.
"""

from __future__ import annotations

import numpy as np

from kvpager import _native
from kvpager.errors import InputError
from kvpager.kernels.native import NativeKernel
from kvpager.kernels.native_storage import NativeStorage
from kvpager.ports import FrameStorage, IntArray, Masses, PageList, Partial, Settled, TileQuery

__all__ = ["MasslessKernel"]


class MasslessKernel(NativeKernel):
    """NativeKernel that keeps no log-sum-exp of pages and settles without masses: those that it returns are empty."""

    name = "native-massless"

    def attend(self, storage: FrameStorage, tile: TileQuery, pages: PageList) -> Partial:
        """As NativeKernel's; `page_lse` names no page."""
        if not isinstance(storage, NativeStorage):
            raise InputError(f"storage: {type(storage).__name__} is not the native kernel's own")
        queries = np.ascontiguousarray(tile.queries, np.float32)
        heads, tokens, _ = queries.shape
        output = np.empty_like(queries)
        lse = np.empty((heads, tokens), np.float32)
        _native.attend(
            storage.native,
            pages.frames,
            pages.heads,
            pages.starts,
            pages.counts,
            pages.kv_heads,
            queries,
            tile.start,
            tile.scale,
            tile.window or 0,
            tile.softcap or 0.0,
            output,
            lse,
            None,
        )
        return Partial(output, lse, np.empty((0, heads // pages.kv_heads, tokens), np.float32))

    def settle(self, parts: list[Partial], heads: IntArray) -> Settled:
        """The parts' output, joined; the masses are empty."""
        joined = super().settle(parts, heads[:0])
        return Settled(joined.output, Masses(*(np.empty(0, np.float32) for _ in range(4))))
