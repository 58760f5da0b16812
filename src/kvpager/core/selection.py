"""Selection: which past pages one tile attends to in one layer, from their estimated mass.

A pure function of the estimate and the budget: it never sees what is resident, so a pool's size cannot
change an answer.
"""

from __future__ import annotations

import numpy as np

from kvpager.errors import InputError
from kvpager.ports import BoolArray, Choice, FloatArray, IntArray, Room

__all__ = ["choose", "looks", "normalised", "pull", "select"]

FLOOR = 1e-12  # mass below this is rounding noise; ratios against a threshold stay finite


def choose(shares: FloatArray, room: Room) -> Choice:
    """The pages that a tile attends to, from the mass that each query is estimated to give each page.

    shares  float32 [n, H, G * T], of blocks in order, the last one just before the tile

    Raises InputError when the protected pages alone are more than the room.
    """
    estimate = pull(shares)
    chosen, threshold = select(estimate, room)
    # protected pages are as good as selected, whatever their estimate
    ratio = estimate / np.float32(threshold)
    ratio = np.where(chosen, np.maximum(ratio, np.float32(1)), ratio)
    _, heads, width = shares.shape
    missed = float(shares.sum(axis=2)[~chosen.T].sum()) / (heads * width)
    return Choice(chosen, ratio, missed)


def select(mass: FloatArray, room: Room) -> tuple[BoolArray, float]:
    """Choose the pages of one layer that a tile attends to.

    mass  float32 [H, n], how much each of a KV head's candidates is wanted (see `pull`): n blocks in order, the
          last one just before the tile

    Returns bool [H, n], and the smallest estimate that got a page in, at least 1e-12. What the protected pages leave
    of the layer's room goes to the pages with the largest estimate, whichever head they belong to. Between equals
    the earlier block wins, then the lower head. Where there is room for all, all are in. Raises InputError when the
    protected pages alone are more than the room.
    """
    heads, n = mass.shape
    protected = np.zeros(n, np.bool_)
    protected[: room.leading(n)] = True
    protected[max(n - room.recent, 0) :] = True
    kept = int(protected.sum())
    if kept > room.pages:
        raise InputError(f"pages: a budget of {room.pages} a KV head is less than its {kept} protected pages")
    chosen = np.broadcast_to(protected, (heads, n)).copy()
    estimates = mass.T[~protected].ravel()  # by block, then by head: the order in which ties are settled
    left = min((room.pages - kept) * heads, estimates.size)
    threshold = 0.0
    if left:
        least = np.partition(estimates, estimates.size - left)[estimates.size - left]
        taken = estimates > least
        ties = np.flatnonzero(estimates == least)
        taken[ties[: left - int(taken.sum())]] = True
        chosen[:, ~protected] = taken.reshape(-1, heads).T
        threshold = float(least)
    return chosen, max(threshold, FLOOR)


def pull(shares: FloatArray) -> FloatArray:
    """How strongly a tile is drawn to each page: float32 [H, n], the root of the sum of squares over its queries.

    shares  float32 [n, H, G * T], the mass that each query is estimated to give each page

    Between the sum, by which many queries' crumbs outweigh the one query that needs a page, and the maximum, by which
    one query decides for all. Choosing by it diverges least from the full cache (docs/decisions/0004).
    """
    squares: FloatArray = np.einsum("nhw,nhw->hn", shares, shares)
    return np.sqrt(squares)


def looks(group: int, tokens: int, sample: int) -> tuple[IntArray, IntArray]:
    """Which queries of a tile choose its pages: of each query head in a group every `sample`-th, counted from the end.

    The first query head looks from the tile's last query; each further one begins ``sample / group`` positions earlier,
    so that a group together sees more positions than one head could. Queries are never pooled: the mean of rotated
    queries says nothing (docs/decisions/0006).

    Returns the member of the group and the token of each look, int [W] each, by member, then by token.
    """
    members = []
    for member in range(group):
        last = tokens - 1 - min(sample * member // group, tokens - 1)
        members.append(np.arange(last % sample, last + 1, sample))
    return np.repeat(np.arange(group), [len(part) for part in members]), np.concatenate(members)


def normalised(shares: FloatArray, peaks: FloatArray, slab: int, own_lse: FloatArray | None) -> FloatArray:
    """Mass [n, H, W] from sums of exponentials, in place; each slab's are relative to its own peak [slabs, H, W]."""
    top = peaks.max(axis=0)
    if own_lse is not None:
        np.maximum(top, own_lse, out=top)
    for i, low in enumerate(range(0, len(shares), slab)):
        shares[low : low + slab] *= np.exp(peaks[i] - top)
    total = shares.sum(axis=0)
    if own_lse is not None:
        total += np.exp(own_lse - top)
    shares *= np.divide(1, total, out=np.zeros_like(total), where=total > 0)
    return shares
