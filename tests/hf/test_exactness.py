"""Promise 2: without a budget, logits are the model's own, for every architecture, page size and head_dim."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf import tiny
from hf.runs import SMALL, cut, forwards, own_logits, paged
from kvpager import PagerConfig

TOKENS = 170
SIZES = {"one go": cut(TOKENS, TOKENS), "chunks": cut(TOKENS, 44, 6), "decoding": cut(TOKENS, 150, 20)}


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


@pytest.mark.promise(2)
@pytest.mark.parametrize("page_size", [8, 16, 32])
@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_logits_are_the_models_own_at_the_smallest_pool(name: str, page_size: int) -> None:
    model, own = tiny.pair(name)
    ids = tiny.tokens(TOKENS)
    wanted = own_logits(own, ids)
    config = replace(SMALL, page_size=page_size, tile=64, group_pages=64 // page_size)
    for chunks in SIZES.values():
        with paged(model, config) as cache:
            close(forwards(model, ids, cache, chunks), wanted)
            stats = cache.stats()
            assert stats.recalls > 0, "a pool in which everything fits shows nothing"
            assert stats.tokens == TOKENS
            assert stats.mass_coverage == 1.0


@pytest.mark.promise(2)
@pytest.mark.parametrize("dim", [16, 24, 64, 80, 96, 128])
def test_logits_are_the_models_own_for_every_head_dim(dim: int) -> None:
    config = tiny.llama(dim=dim)
    model, own = tiny.build(config), tiny.build(tiny.llama(dim=dim), "sdpa")
    ids = tiny.tokens(TOKENS)
    with paged(model) as cache:
        close(forwards(model, ids, cache, cut(TOKENS, 64, 10)), own_logits(own, ids))
        full = cache.stats().full_kv_bytes
    assert full == TOKENS * 2 * 2 * 2 * dim * 4  # layers, keys and values, KV heads, channels, bytes


@pytest.mark.promise(2)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_budget_changes_nothing_while_the_sequence_is_no_longer(name: str) -> None:
    model, own = tiny.pair(name)
    ids = tiny.tokens(128)
    with paged(model, replace(SMALL, budget=128)) as cache:
        close(forwards(model, ids, cache, cut(128, 50, 8)), own_logits(own, ids))


def test_pages_in_bfloat16_serve_a_bfloat16_model() -> None:
    model = tiny.build(tiny.llama()).to(torch.bfloat16)
    own = tiny.build(tiny.llama(), "sdpa").to(torch.bfloat16)
    ids = tiny.tokens(100)
    model.config.dtype = torch.bfloat16
    with paged(model) as cache:
        assert cache.pager.shape.dtype == "bfloat16"
        found = forwards(model, ids, cache, cut(100, 40, 5))
        assert found.dtype is torch.bfloat16
        wanted = own_logits(own, ids)
        assert (found - wanted).abs().mean() < 0.05 * wanted.float().std()


def test_the_default_configuration_is_exact() -> None:
    model, own = tiny.pair("llama")
    ids = tiny.tokens(60)
    with paged(model, PagerConfig(), least=False) as cache:
        close(model(ids, cache=cache).logits, own_logits(own, ids))
