"""The last query's attention."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from kvpager.core.numbers import PageNumbers
from kvpager.core.policies.base import Policy, keep_young
from kvpager.ports import FloatArray

__all__ = ["TOVA"]


class TOVA(Policy):
    """The page to which the last query gave the least attention leaves first.

    Token Omission Via Attention (Oren et al., arXiv 2401.06104) drops the token with the least attention of
    the last query, averaged over heads; here a page's mass, averaged over the query group of its KV head.
    A page that the last tile left out keeps what the last query that did attend to it gave.
    """

    name: ClassVar[str] = "tova"
    needs: ClassVar[frozenset[str]] = frozenset({"last"})

    def score(self, numbers: PageNumbers, rng: np.random.Generator) -> FloatArray:
        """Mass of the last query; +inf within the grace period."""
        return keep_young(numbers, numbers.last)
