"""The attention of the prompt's end."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from kvpager.core.numbers import PageNumbers
from kvpager.core.policies.base import Policy, keep_young
from kvpager.ports import WINDOW, FloatArray

__all__ = ["SnapKV"]


class SnapKV(Policy):
    """The prompt page that the prompt's last queries looked at least leaves first.

    SnapKV (Li et al., arXiv 2404.14469) lets the last queries of a prompt, the observation window, vote for
    the prompt tokens to keep, pools the votes over neighbours, and keeps all that is generated later. Here
    the window is the last 32 queries of the latest tile of several queries, a page pools its 16 tokens, and
    pages that no such tile has seen (those written while decoding) leave last, the oldest of them first.
    """

    name: ClassVar[str] = "snapkv"
    needs: ClassVar[frozenset[str]] = frozenset({"window"})

    def score(self, numbers: PageNumbers, rng: np.random.Generator) -> FloatArray:
        """Mass of the observation window; above it, by position, where there is none; +inf within the grace period."""
        # A query's mass is at most 1, so that a window's sum is at most WINDOW.
        unseen = np.float32(2 * WINDOW) + numbers.position.astype(np.float32)
        return keep_young(numbers, np.where(np.isnan(numbers.window), unseen, numbers.window))
