"""Losses, and how far a run's predictions are from the full cache's."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Divergence", "divergence", "token_losses"]


def token_losses(logits: torch.Tensor, targets: torch.Tensor) -> npt.NDArray[np.float32]:
    """Cross entropy of each prediction in nats, float32 [T].

    logits float [T, vocabulary] (any float dtype, summed in float32), targets int64 [T].
    """
    losses = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")
    array: npt.NDArray[np.float32] = losses.numpy()
    return array


def divergence(full: torch.Tensor, run: torch.Tensor) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """KL(full || run) of each position in nats, float32 [T], and whether both hold the same token likeliest, bool [T].

    Both are logits, float [T, vocabulary].
    """
    expected = torch.log_softmax(full.float(), dim=-1)
    got = torch.log_softmax(run.float(), dim=-1)
    kl = (expected.exp() * (expected - got)).sum(dim=-1).clamp_min(0)  # rounding can take it below zero
    return kl.numpy(), (expected.argmax(dim=-1) == got.argmax(dim=-1)).numpy()


@dataclass
class Divergence:
    """Collects `divergence` over the chunks of a run."""

    kl: list[npt.NDArray[np.float32]] = field(default_factory=list)
    same: list[npt.NDArray[np.bool_]] = field(default_factory=list)

    def add(self, full: torch.Tensor, run: torch.Tensor) -> None:
        """Take in some positions; logits, float [T, vocabulary]."""
        kl, same = divergence(full, run)
        self.kl.append(kl)
        self.same.append(same)

    @property
    def kl_mean(self) -> float:
        """Mean KL over all positions, nats."""
        return float(np.concatenate(self.kl).mean(dtype=np.float64))

    @property
    def kl_p99(self) -> float:
        """The KL that 99 % of positions stay below, nats."""
        return float(np.percentile(np.concatenate(self.kl), 99))

    @property
    def top1(self) -> float:
        """Share of positions at which both hold the same token likeliest."""
        return float(np.concatenate(self.same).mean())
