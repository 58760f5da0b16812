"""Kvpager's own: how soon will attention want the page again?"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from kvpager.core.policies.base import Policy, keep_young
from kvpager.core.scorer import PageNumbers
from kvpager.ports import FloatArray

__all__ = ["Attention"]


class Attention(Policy):
    """The page that attention is expected to want again last leaves first."""

    name: ClassVar[str] = "attention"
    needs: ClassVar[frozenset[str]] = frozenset({"mass", "estimate"})

    def score(self, numbers: PageNumbers, rng: np.random.Generator) -> FloatArray:
        """Minus the expected wait in ticks until the page is wanted again; +inf within the grace period."""
        unknown = np.isnan(numbers.estimate)
        # Layer steps until its layer's next turn; a page of the running layer that is yet to be used is wanted now.
        ahead = (numbers.layer - (numbers.current_layer + 1)) % numbers.layers
        due = numbers.again | ((unknown | (numbers.estimate >= 1)) & (numbers.last_used < numbers.now))
        ahead = np.where((numbers.layer == numbers.current_layer) & due, 0, ahead)
        turn = (ahead.astype(np.float32) + 1 - numbers.mass) / numbers.layers
        with np.errstate(divide="ignore"):
            skipped = np.where(unknown, 0, 1 / numbers.estimate)
        return keep_young(numbers, (-(turn + skipped)).astype(np.float32))
