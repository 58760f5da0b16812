from __future__ import annotations

import numpy as np
import pytest
import torch

from kvpager.evaluation.figures import Divergence, divergence, token_losses


def test_losses_are_minus_the_log_probability_of_the_target() -> None:
    probabilities = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]])
    losses = token_losses(probabilities.log().bfloat16().float(), torch.tensor([1, 2]))
    np.testing.assert_allclose(losses, [-np.log(0.25), -np.log(0.8)], atol=0.01)


def test_kl_is_zero_for_the_same_logits_and_right_for_others() -> None:
    full = torch.tensor([[0.5, 0.5], [0.9, 0.1], [0.25, 0.75]]).log()
    run = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.75, 0.25]]).log() + 7  # a constant changes nothing
    kl, same = divergence(full, run)
    expected = 0.9 * np.log(0.9 / 0.5) + 0.1 * np.log(0.1 / 0.5)
    np.testing.assert_allclose(kl, [0, expected, 0.5 * np.log(3)], atol=1e-6)
    assert same.tolist() == [True, True, False]


def test_chunks_add_up_to_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    full, run = torch.randn(2, 50, 11, generator=generator)
    whole, parts = Divergence(), Divergence()
    whole.add(full, run)
    for start in range(0, 50, 16):
        parts.add(full[start : start + 16], run[start : start + 16])
    assert parts.kl_mean == pytest.approx(whole.kl_mean)
    assert parts.kl_p99 == pytest.approx(whole.kl_p99)
    assert parts.top1 == whole.top1
