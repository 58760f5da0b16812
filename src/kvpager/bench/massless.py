"""The compiled kernel without page mass, to see what page mass costs. Only for benchmarks: a pager needs the masses.

Importing this module raises ImportError where the extension is not built.
"""

from __future__ import annotations

import numpy as np

from kvpager.kernels.native import NativeKernel, attend_group
from kvpager.ports import FrameStorage, IntArray, Masses, PageList, Partial, Settled, TileQuery

__all__ = ["MasslessKernel"]


class MasslessKernel(NativeKernel):
    """NativeKernel that keeps no log-sum-exp of pages and settles without masses: those that it returns are empty."""

    name = "native-massless"

    def attend(self, storage: FrameStorage, tile: TileQuery, pages: PageList) -> Partial:
        """As NativeKernel's; `page_lse` names no page."""
        return attend_group(storage, tile, pages, with_pages=False)

    def settle(self, parts: list[Partial], heads: IntArray) -> Settled:
        """The parts' output, joined; the masses are empty."""
        joined = super().settle(parts, heads[:0])
        return Settled(joined.output, Masses(*(np.empty(0, np.float32) for _ in range(4))))
