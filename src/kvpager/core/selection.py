"""Selection: which past pages one tile attends to in one layer, from their estimated mass.

A pure function of the estimate and the budget: it never sees what is resident, so a pool's size cannot
change an answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpager.errors import InputError
from kvpager.ports import FloatArray

__all__ = ["Selection", "pull", "select"]

BoolArray = npt.NDArray[np.bool_]

FLOOR = 1e-12  # mass below this is rounding noise; ratios against a threshold stay finite


@dataclass(frozen=True)
class Selection:
    """What `select` chose.

    chosen     bool [H, n], the pages that are in
    threshold  the smallest estimate that got a page in; at least 1e-12. estimate / threshold is 1 or more for
               pages that are in by their estimate (protected pages may be below it)
    """

    chosen: BoolArray
    threshold: float


def select(mass: FloatArray, pages: int, *, sinks: int, recent: int, first_block: int = 0) -> Selection:
    """Choose the pages of one layer that a tile attends to.

    mass         float32 [H, n], how much each of a KV head's candidates is wanted (see `pull`): n blocks in order,
                 the last one just before the tile
    pages        budget a KV head, protected pages included; a layer's whole budget is pages * H
    sinks        leading blocks of the sequence that are always in
    recent       last candidates that are always in
    first_block  block of the first candidate; above 0 where a sliding window hides the sequence's beginning

    What the protected pages leave of the layer's budget goes to the pages with the largest estimate, whichever
    head they belong to. Between equals the earlier block wins, then the lower head. With n <= `pages` all are in.
    Raises InputError when the protected pages alone are more than the budget.
    """
    heads, n = mass.shape
    protected = np.zeros(n, np.bool_)
    protected[: max(sinks - first_block, 0)] = True
    protected[max(n - recent, 0) :] = True
    kept = int(protected.sum())
    if kept > pages:
        raise InputError(f"pages: a budget of {pages} a KV head is less than its {kept} protected pages")
    chosen = np.broadcast_to(protected, (heads, n)).copy()
    estimates = mass.T[~protected].ravel()  # by block, then by head: the order in which ties are settled
    left = min((pages - kept) * heads, estimates.size)
    threshold = 0.0
    if left:
        least = np.partition(estimates, estimates.size - left)[estimates.size - left]
        taken = estimates > least
        ties = np.flatnonzero(estimates == least)
        taken[ties[: left - int(taken.sum())]] = True
        chosen[:, ~protected] = taken.reshape(-1, heads).T
        threshold = float(least)
    return Selection(chosen, max(threshold, FLOOR))


def pull(shares: FloatArray) -> FloatArray:
    """How strongly a tile is drawn to each page: float32 [H, n], the root of the sum of squares over its queries.

    shares  float32 [n, H, G * T], the mass that each query is estimated to give each page

    Between the sum, by which many queries' crumbs outweigh the one query that needs a page, and the maximum, by which
    one query decides for all. Choosing by it diverges least from the full cache (docs/decisions/0004).
    """
    squares: FloatArray = np.einsum("nhw,nhw->hn", shares, shares)
    return np.sqrt(squares)
