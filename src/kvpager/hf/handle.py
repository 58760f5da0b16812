"""What caches over a pager have in common, and what they hand to the attention function: one forward that has begun."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from transformers.cache_utils import Cache

from kvpager.core.pager import Pager

__all__ = ["Forward", "PagedCache"]


class Forward(ABC):
    """A forward of a model through a pager, shared by all its layers.

    pager     holds the keys and values
    layer     the layer whose keys and values came last
    pending   they came, and the attention function has not taken them yet
    """

    __slots__ = ("layer", "pager", "pending")

    def __init__(self, pager: Pager) -> None:
        self.pager = pager
        self.layer = 0
        self.pending = False

    @abstractmethod
    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Store the current layer's keys and values and attend: [batch, columns, query heads, head_dim].

        query [B, Hq, T, D], key and value [B, H, T, D]; the output has the query's dtype and device. Where it raises,
        nothing of the forward is left in the pager.
        """


class PagedCache(Cache):
    """What transformers asks of a cache, where a pager holds the keys and values of every layer."""

    def __init__(self, pager: Pager) -> None:
        super().__init__(layers=[])
        self.pager = pager

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: the cache grows as long as there is swap."""
        return -1

    def __len__(self) -> int:
        return self.pager.shape.layers

    @property
    def is_initialized(self) -> bool:
        """True: the pool is there from the beginning."""
        return True

    @property
    def is_compileable(self) -> bool:
        """False: paging is not traced."""
        return False

    @property
    def is_sliding(self) -> list[bool]:
        """For each layer, whether it has a sliding window."""
        return [self.pager.shape.window(layer) is not None for layer in range(len(self))]

    @property
    def is_linear(self) -> list[bool]:
        """For each layer False: there are no recurrent layers."""
        return [False] * len(self)

    @property
    def is_dummy(self) -> list[bool]:
        """For each layer False: every layer holds keys and values."""
        return [False] * len(self)
