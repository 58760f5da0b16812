"""Least recently used."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from kvpager.core.numbers import PageNumbers
from kvpager.core.policies.base import Policy
from kvpager.ports import FloatArray

__all__ = ["LRU"]


class LRU(Policy):
    """The page that was attended to longest ago leaves first.

    The order is that of (tick, layer), so it is exact within a tick as well.
    """

    name: ClassVar[str] = "lru"

    def score(self, numbers: PageNumbers, rng: np.random.Generator) -> FloatArray:
        """Minus the ticks since the last use, layers as fractions of a tick."""
        # Relative to now: ticks grow without bound and float32 counts exactly only up to 2**24.
        within = numbers.layer.astype(np.float32) / np.float32(numbers.layers)
        return (numbers.last_used - numbers.now).astype(np.float32) + within
