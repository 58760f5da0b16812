"""Sampling follows its rules, prefill is cut at tiles."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvpager.cli.decoding import Sampler, chunk_size, chunks
from kvpager.config import KVShape, PagerConfig
from kvpager.core.pager import Pager


def test_temperature_zero_takes_the_likeliest() -> None:
    assert Sampler(0.0, 1.0, seed=0)(torch.tensor([0.1, 3.0, 2.9])) == 1


def test_sampling_follows_the_probabilities_and_its_seed() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log().bfloat16()
    first, second = Sampler(1.0, 1.0, seed=1), Sampler(1.0, 1.0, seed=1)
    drawn = [first(logits) for _ in range(2000)]
    assert drawn == [second(logits) for _ in range(2000)]
    assert drawn != [Sampler(1.0, 1.0, seed=2)(logits) for _ in range(2000)]
    counts = Counter(drawn)
    assert counts[0] / 2000 == pytest.approx(0.5, abs=0.05)
    assert counts[2] / 2000 == pytest.approx(0.2, abs=0.05)


def test_top_p_draws_from_the_likeliest_that_make_up_p() -> None:
    logits = torch.tensor([0.2, 0.5, 0.3]).log()
    sampler = Sampler(1.0, 0.6, seed=0)
    assert {sampler(logits) for _ in range(200)} == {1, 2}
    nearly_none = Sampler(1.0, 1e-6, seed=0)
    assert {nearly_none(logits) for _ in range(50)} == {1}


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 100.0])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    logits = torch.tensor([1000.0, -1000.0, math.nextafter(1000.0, 0)])
    assert 0 <= Sampler(temperature, 1.0, seed=0)(logits) < 3


SHAPE = KVShape(layers=2, kv_heads=2, query_heads=4, head_dim=16)


@pytest.mark.parametrize("tile", [1, 16, 64, 96, 512, 1024])
@pytest.mark.parametrize("spare", [0, 5, 40, 1000])
@pytest.mark.parametrize("settings", [{}, {"mode": "discard", "budget": 128}])
def test_a_chunk_is_whole_tiles_and_fits_the_pool(tile: int, spare: int, settings: dict[str, Any]) -> None:
    config = PagerConfig(pool=1, tile=tile, **settings)
    with Pager(SHAPE, config) as pager:
        frames = pager.minimum_frames() + spare
    rng = np.random.default_rng(0)
    with Pager(SHAPE, replace(config, pool=frames)) as pager:
        step = chunk_size(pager)
        assert step % tile == 0
        assert step <= max(512 + tile, tile)
        sequence = pager.open()
        for _ in range(3):
            pager.begin([sequence], [step])
            for layer in range(SHAPE.layers):
                keys, values = rng.standard_normal((2, 2, step, 16))
                pager.append(sequence, layer, keys, values)
                pager.attend(sequence, layer, rng.standard_normal((4, step, 16)))
            pager.commit()


@pytest.mark.parametrize(("length", "step"), [(1, 512), (512, 512), (513, 512), (4000, 528), (1500, 1024), (10, 1)])
def test_prefill_covers_all_in_order(length: int, step: int) -> None:
    cuts = list(chunks(length, step))
    assert cuts[0][0] == 0
    assert cuts[-1][1] == length
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(cuts))
    assert all(stop % step == 0 for _, stop in cuts[:-1])
