"""Cumulative attention: heavy hitters."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from kvpager.core.numbers import PageNumbers
from kvpager.core.policies.base import Policy, keep_young
from kvpager.ports import FloatArray

__all__ = ["H2O"]


class H2O(Policy):
    """The page that was given the least attention in all leaves first.

    The Heavy-Hitter Oracle (Zhang et al., arXiv 2306.14048) sums the attention that each token was given
    over all queries so far, and keeps recent tokens beside the heavy hitters; here it is a page's mass, and
    the pager's protected recent pages and the grace period are the recent part.
    """

    name: ClassVar[str] = "h2o"
    needs: ClassVar[frozenset[str]] = frozenset({"total"})

    def score(self, numbers: PageNumbers, rng: np.random.Generator) -> FloatArray:
        """All mass ever given; +inf within the grace period."""
        return keep_young(numbers, numbers.total)
