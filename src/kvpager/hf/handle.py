"""What a cache hands to the attention function: one forward that has begun."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from kvpager.core.pager import Pager

__all__ = ["Forward"]


class Forward(ABC):
    """A forward of a model through a pager, shared by all its layers.

    layer     the layer whose keys and values came last
    pending   they came, and the attention function has not taken them yet
    """

    __slots__ = ("layer", "pending")

    def __init__(self) -> None:
        self.layer = 0
        self.pending = False

    @property
    @abstractmethod
    def pager(self) -> Pager:
        """The pager that holds the keys and values."""

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
