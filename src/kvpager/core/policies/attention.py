"""Kvpager's own: how soon will attention want the page again?"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from kvpager.core.numbers import PageNumbers
from kvpager.core.policies.base import Policy, keep_young
from kvpager.ports import FloatArray

__all__ = ["Attention"]

PAUSE = 8  # ticks that a sequence may miss while others take turns before it counts as paused
RATIO_MIN = np.float32(1e-6)


class Attention(Policy):
    """The page with the longest expected wait until attention wants it again leaves first.

    The wait, in ticks, has three parts:

    - until its layer's next turn: layers run in order, so a page of a layer that has just run waits for almost a
      whole tick, and one of the next layer is wanted almost at once;
    - the turns in which selection is expected to pass it over. A page whose estimated mass at the last selection
      was r times the threshold was selected at the next one with odds close to r, and odds of r mean 1 / r turns
      passed over on average;
    - if its sequence is paused (the page was wanted, and its layer has run on without it), as long again as it has
      been paused.

    Where there has been no selection yet, every page is wanted at every turn, and the decayed mass alone decides
    between pages of one layer. So it does in discard mode, where nothing is ever selected.
    """

    name: ClassVar[str] = "attention"
    needs: ClassVar[frozenset[str]] = frozenset({"mass", "estimate"})

    def score(self, numbers: PageNumbers, rng: np.random.Generator) -> FloatArray:
        """Minus the expected wait in ticks; +inf within the grace period."""
        ratio = numbers.estimate
        passed_over = ratio < 1  # False where there is no estimate
        wait = np.reciprocal(np.maximum(ratio, RATIO_MIN))
        wait[np.isnan(wait)] = 0
        # The running layer's turn is over for all but pages that it selected and is yet to attend to.
        ahead = numbers.layer - np.int32(numbers.current_layer + 1)
        due = (ahead == -1) & (numbers.again | (~passed_over & (numbers.last_used < numbers.now)))
        ahead[ahead < 0] += numbers.layers
        ahead[due] = 0
        # Mass is at most 1: it orders pages of one layer and never exceeds one layer's step.
        wait += (ahead + (1 - numbers.mass)) * np.float32(1 / numbers.layers)
        paused = np.maximum(numbers.missed - np.int32(PAUSE), 0)
        paused[passed_over | due] = 0
        wait += paused
        return keep_young(numbers, np.negative(wait, out=wait))
