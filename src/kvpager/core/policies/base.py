"""The interface of an eviction policy: one class, one scoring method.

A policy answers two questions with the same score. In recall mode: which resident page leaves the pool
next (pages of all layers compete). In discard mode: which page of one layer is dropped for good when its
sequence is over its budget. The pager keeps protected pages (open, pinned, first and recent ones) out of
the choice; a policy need not know them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from kvpager.core.numbers import PageNumbers
from kvpager.ports import FloatArray

__all__ = ["Policy", "keep_young"]


class Policy(ABC):
    """Scores pages from numbers about them, never from keys or values."""

    name: ClassVar[str]
    needs: ClassVar[frozenset[str]] = frozenset()
    """The fields of :class:`PageNumbers` that the scorer must keep for this policy."""

    @abstractmethod
    def score(self, numbers: PageNumbers, rng: np.random.Generator) -> FloatArray:
        """Score n pages: float32 [n], the higher the longer it stays; never NaN.

        Neither changes `numbers` nor keeps them. Only `random` draws from `rng`.
        """


def keep_young(numbers: PageNumbers, score: FloatArray) -> FloatArray:
    """`score` with +inf where a page is too new to be compared by its attention (the grace period)."""
    if numbers.grace == 0 or not numbers.young.any():
        return score
    return np.where(numbers.young, np.float32(np.inf), score)
