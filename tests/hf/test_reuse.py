"""Prompts that share a beginning share its blocks, across caches of one pager."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hf import tiny
from hf.runs import SMALL, minimum, own_logits
from kvpager import Pager, PagerConfig
from kvpager.errors import InputError, StepError
from kvpager.hf import PagerCache, kv_shape

KEEP = replace(SMALL, prefix_tokens=4096)


@contextmanager
def kept(model: Any, config: PagerConfig = KEEP, frames: int | None = None) -> Iterator[Pager]:
    """A pager that keeps blocks of closed sequences for reuse; its books balance at the end."""
    shape = kv_shape(model.config)
    with Pager(shape, replace(config, pool=frames or minimum(shape, config))) as pager:
        yield pager
        pager.check()
        assert pager.stats().sequences == 0


def send(model: Any, pager: Pager, ids: torch.Tensor, steps: int = 12, **more: Any) -> tuple[list[int], int]:
    """One request: its new tokens, and how many prompt tokens were found."""
    cache = PagerCache(model.config, pager=pager)
    [found] = cache.reuse(ids)
    text = model.generate(
        ids, attention_mask=torch.ones_like(ids), cache=cache, max_new_tokens=steps, do_sample=False, **more
    )
    assert cache.sequences[0].length == ids.shape[1] + steps - 1
    cache.close()
    pager.check()
    return text[0, ids.shape[1] :].tolist(), found


def oracle(own: Any, ids: torch.Tensor, steps: int = 12) -> list[int]:
    mask = torch.ones_like(ids)
    text: list[int] = own.generate(ids, attention_mask=mask, max_new_tokens=steps, do_sample=False)[0].tolist()
    return text[ids.shape[1] :]


@pytest.mark.promise(2)
@pytest.mark.parametrize("length", [100, 32, 33, 64])
@pytest.mark.parametrize("name", ["qwen3-sliding", "mistral", "gemma2"])
def test_a_repeated_prompt_gets_the_same_text_with_sliding_windows(name: str, length: int) -> None:
    """G06"""
    model, own = tiny.pair(name)
    ids = tiny.tokens(length, seed=length)
    wanted = oracle(own, ids)
    with kept(model) as pager:
        for turn in range(4):
            text, found = send(model, pager, ids)
            assert text == wanted
            assert found == (0 if turn == 0 else (length - 1) // 16 * 16)


@pytest.mark.parametrize("mode", ["recall", "discard"])
def test_a_repeated_prompt_gets_the_same_text_under_a_budget(mode: Any) -> None:
    """Blocks computed under a budget are found under that budget, up to a tile boundary; discarded ones never."""
    model, _ = tiny.pair("llama")
    ids = tiny.tokens(200)
    config = replace(KEEP, budget=64, mode=mode)
    with kept(model, config, frames=400) as pager:
        texts, found = zip(*(send(model, pager, ids) for _ in range(3)), strict=True)
    assert texts[0] == texts[1] == texts[2]
    assert found == (0, 192, 192) if mode == "recall" else (0, 0, 0)


@pytest.mark.promise(2)
@pytest.mark.promise(3)
@pytest.mark.slow
def test_a_small_pool_never_gives_another_prompts_pages() -> None:
    """G08: A, B and C take turns in a pool of 8 blocks; A's answer is always its own."""
    model, own = tiny.pair("llama")
    prompts = {name: tiny.tokens(64, seed=seed) for seed, name in enumerate("ABC")}
    wanted = {name: oracle(own, ids, 5) for name, ids in prompts.items()}
    config = replace(KEEP, group_pages=4, prefix_tokens=128)
    order = "ABCA" + "".join(np.random.default_rng(0).choice(list("ABC"), 50))
    hits = 0
    with kept(model, config, frames=8 * 2 * 2) as pager:
        for name in order:
            text, found = send(model, pager, prompts[name], 5)
            assert text == wanted[name]
            assert found in (0, 16, 32, 48)
            hits += found > 0
    assert hits > 10


@pytest.mark.promise(2)
@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 48])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_prompt_held_whole_leaves_a_token_to_compute(length: int, chunked: bool) -> None:
    """G09"""
    model, own = tiny.pair("llama")
    ids = tiny.tokens(length, seed=length)
    wanted = oracle(own, ids)
    more = {"prefill_chunk_size": 8} if chunked else {}
    with kept(model) as pager:
        assert send(model, pager, ids, **more) == (wanted, 0)
        assert send(model, pager, ids, **more) == (wanted, (length - 1) // 16 * 16)
        assert pager.stats().prefix_tokens_hit <= length - 1


@pytest.mark.promise(2)
def test_logits_after_a_shared_prefix_are_the_models_own() -> None:
    model, own = tiny.pair("llama")
    common = tiny.tokens(70, seed=1)
    with kept(model) as pager:
        for seed in (2, 3):
            ids = torch.cat([common, tiny.tokens(30, seed)], dim=1)
            cache = PagerCache(model.config, pager=pager)
            [found] = cache.reuse(ids)
            assert found == (0 if seed == 2 else 64)
            logits = model(ids[:, found:], cache=cache).logits
            torch.testing.assert_close(logits, own_logits(own, ids)[:, found:], atol=1e-4, rtol=0)
            cache.close()


@pytest.mark.promise(2)
def test_a_padded_batch_shares_what_its_least_lucky_row_allows() -> None:
    model, own = tiny.pair("llama")
    known = tiny.tokens(64, seed=1)
    prompts = [tiny.tokens(10, seed=5), torch.cat([known, tiny.tokens(9, seed=6)], dim=1)]
    wanted = [oracle(own, ids) for ids in prompts]
    ids, mask = tiny.padded(prompts)
    shape = kv_shape(model.config)
    with kept(model, frames=minimum(shape, KEEP, 2)) as pager:
        send(model, pager, known)
        cache = PagerCache(model.config, pager=pager)
        assert cache.reuse(ids, mask) == [0, 63]  # the first row's tokens begin in column 63
        assert cache.get_seq_length() == 63
        text = model.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=12, do_sample=False)
        assert [row[ids.shape[1] :].tolist() for row in text] == wanted
        cache.close()


@pytest.mark.promise(6)
def test_reuse_refuses_what_it_cannot_do() -> None:
    model, _ = tiny.pair("llama")
    ids = tiny.tokens(20)
    with kept(model) as pager:
        cache = PagerCache(model.config, pager=pager)
        with pytest.raises(InputError, match=r"\(20,\)"):
            cache.reuse(ids[0])
        with pytest.raises(InputError, match=r"\(1, 3\)"):
            cache.reuse(ids, torch.ones((1, 3)))
        model(ids, cache=cache)
        with pytest.raises(StepError, match="20 columns"):
            cache.reuse(ids)
        cache.close()
