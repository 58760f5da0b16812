"""Promise 1: the pool's size, the policy and the swap never change a bit of the answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hf import tiny
from hf.runs import SMALL, cut, forwards, minimum, paged
from kvpager import PagerConfig
from kvpager.config import POLICIES
from kvpager.hf import kv_shape

TOKENS = 170
CHUNKS = cut(TOKENS, 44, 20)
BUDGETED = replace(SMALL, budget=64)


def logits(name: str, config: PagerConfig) -> tuple[torch.Tensor, int]:
    """The logits of a run, and how many pages were recalled."""
    model, _ = tiny.pair(name)
    with paged(model, config, least=False) as cache:
        found = forwards(model, tiny.tokens(TOKENS), cache, CHUNKS)
        return found, cache.stats().recalls


def pools(name: str, config: PagerConfig) -> list[int]:
    """The smallest pool, twice that, half of all pages and all of them, in frames."""
    shape = kv_shape(tiny.CONFIGS[name]())
    pages = -(-TOKENS // config.page_size) * shape.layers * shape.kv_heads
    least = minimum(shape, config)
    assert least < pages // 2
    return [least, 2 * least, pages // 2, pages + config.group_pages]


@pytest.mark.promise(1)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("config", [SMALL, BUDGETED], ids=["no budget", "budget"])
def test_every_pool_policy_and_swap_gives_the_same_bits(tmp_path: Path, config: PagerConfig, policy: Any) -> None:
    wanted, none = logits("llama", replace(config, pool=1000))
    assert none == 0
    for number, frames in enumerate(pools("llama", config)):
        for swap in ("memory", tmp_path / f"swap{number}"):
            found, recalls = logits("llama", replace(config, pool=frames, policy=policy, swap=swap))
            assert torch.equal(found, wanted), (frames, swap)
            assert number or recalls > 0, "the smallest pool must be under pressure"


@pytest.mark.promise(1)
@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_every_architecture_gives_the_same_bits_under_pressure(name: str) -> None:
    config = replace(BUDGETED, group_pages=2)
    wanted, _ = logits(name, replace(config, pool=1000))
    for frames in pools(name, config)[:2]:
        assert torch.equal(logits(name, replace(config, pool=frames))[0], wanted)


@pytest.mark.promise(1)
def test_a_batch_under_pressure_gets_the_same_bits() -> None:
    model, _ = tiny.pair("llama")
    ids, mask = tiny.padded([tiny.tokens(length, length) for length in (30, 120, 77)])
    texts, scores = [], []
    for frames in (minimum(kv_shape(model.config), BUDGETED, 3), 1000):
        with paged(model, replace(BUDGETED, pool=frames), least=False) as cache:
            out = model.generate(
                ids,
                attention_mask=mask,
                cache=cache,
                max_new_tokens=20,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
            texts.append(out.sequences.tolist())
            scores.append(torch.stack(out.logits))
            assert (cache.stats().recalls > 0) == (frames < 1000)
    assert texts[0] == texts[1]
    assert torch.equal(scores[0], scores[1])
