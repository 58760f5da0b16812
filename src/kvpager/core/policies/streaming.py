"""Sinks and recent pages."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from kvpager.core.numbers import PageNumbers
from kvpager.core.policies.base import Policy
from kvpager.ports import FloatArray

__all__ = ["Streaming"]


class Streaming(Policy):
    """The first page, where attention sinks, and the most recent ones stay; the middle leaves, oldest first.

    StreamingLLM (Xiao et al., arXiv 2309.17453) keeps four sink tokens, all in the first page, and a window
    of recent tokens. Pages count by their place in their own sequence.
    """

    name: ClassVar[str] = "streaming"

    def score(self, numbers: PageNumbers, rng: np.random.Generator) -> FloatArray:
        """The page's place in its sequence; +inf for the first."""
        place = numbers.position.astype(np.float32)
        return np.where(numbers.position == 0, np.float32(np.inf), place)
