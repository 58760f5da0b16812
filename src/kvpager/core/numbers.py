"""What eviction policies are told about pages: numbers alone, never keys or values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpager.ports import FloatArray

__all__ = ["FIELDS", "Int32Array", "PageNumbers"]

Int32Array = npt.NDArray[np.int32]

FIELDS = frozenset({"mass", "total", "last", "window", "estimate", "born"})
"""The fields that are kept only where a policy needs them."""


@dataclass(frozen=True, slots=True)
class PageNumbers:
    """What is known about n pages: arrays of n, aligned, one entry a page.

    mass           float32, decayed attention mass: each time that the page is attended to, the largest mass that a
                   query of the tile and group gave it, or what was there before times the decay for each query of the
                   tile, whichever is more
    total          float32, all mass ever given, summed over queries, mean over the query group (H2O)
    last           float32, mass that the last query gave when the page was last attended to, mean over the group (TOVA)
    window         float32, mass that the last 32 queries of the latest tile of several queries gave, summed over them,
                   mean over the group (SnapKV's observation window); NaN where no such tile attended to the page
    estimate       float32, at the layer's last selection, the page's estimated mass over the selection's threshold:
                   1 and above was selected; NaN where the page was never a candidate
    last_used      int32, tick at which the page was last attended to (or written)
    born           int32, tick at which the page was first written; 0 where the policy doesn't need it
    seen           uint8, tiles that attended to the page or passed it over in a selection, up to 255
    position       int32, index of the page's block in its sequence
    layer, head    int32
    missed         int32, ticks that the page's layer has run on since it last attended to the page; 0 when the pages
                   belong to one sequence only
    now            the tick
    current_layer  the layer that is running
    layers         layers of the model
    grace          a page that fewer tiles than this have seen is new, and kept
    again          whether the running layer has another tile to run before the next layer's turn

    Float fields that the policy doesn't need are NaN throughout.
    """

    mass: FloatArray
    total: FloatArray
    last: FloatArray
    window: FloatArray
    estimate: FloatArray
    last_used: Int32Array
    born: Int32Array
    seen: npt.NDArray[np.uint8]
    position: Int32Array
    layer: Int32Array
    head: Int32Array
    missed: Int32Array
    now: int
    current_layer: int
    layers: int = 1
    grace: int = 0
    again: bool = False

    def __len__(self) -> int:
        return len(self.last_used)

    @property
    def young(self) -> npt.NDArray[np.bool_]:
        """bool [n]: pages within the grace period."""
        return np.asarray(self.seen < self.grace)
