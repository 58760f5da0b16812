"""Any page."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from kvpager.core.numbers import PageNumbers
from kvpager.core.policies.base import Policy
from kvpager.ports import FloatArray

__all__ = ["Random"]


class Random(Policy):
    """Pages leave by lot: the baseline that every other policy must beat."""

    name: ClassVar[str] = "random"

    def score(self, numbers: PageNumbers, rng: np.random.Generator) -> FloatArray:
        """Uniform draws from `rng`."""
        return rng.random(len(numbers), dtype=np.float32)
