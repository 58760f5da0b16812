"""First in, first out."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from kvpager.core.numbers import PageNumbers
from kvpager.core.policies.base import Policy
from kvpager.ports import FloatArray

__all__ = ["FIFO"]


class FIFO(Policy):
    """The page that was written first leaves first, whatever attention does.

    Age counts from when a page was first written, not from when it was last read back: a recall doesn't
    make a page new.
    """

    name: ClassVar[str] = "fifo"
    needs: ClassVar[frozenset[str]] = frozenset({"born"})

    def score(self, numbers: PageNumbers, rng: np.random.Generator) -> FloatArray:
        """Minus the page's age in ticks, layers as fractions of a tick."""
        within = numbers.layer.astype(np.float32) / np.float32(numbers.layers)
        return (numbers.born - numbers.now).astype(np.float32) + within
