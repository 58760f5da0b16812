"""Forwards of ragged batches: each sequence's logits are the model's own, for every architecture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.hf import tiny
from transformers import DynamicCache

from kvpager import Pager, PagerConfig
from kvpager.errors import CacheMismatch, PoolExhausted, StepError
from kvpager.hf import kv_shape
from kvpager.hf.ragged import RaggedRunner, batch_length

LENGTHS = (5, 70, 33)


def own_logits(model: Any, cache: Any, ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=torch.tensor([ids]), cache=cache, use_cache=True).logits[0]
    return logits


@pytest.mark.promise(2)
@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_a_ragged_batch_gives_each_sequence_the_models_own_logits(name: str) -> None:
    model, own = tiny.pair(name)
    texts = [tiny.tokens(length + 20, seed=length)[0].tolist() for length in LENGTHS]
    with Pager(kv_shape(model.config), PagerConfig(group_pages=4)) as pager:
        runner = RaggedRunner(model, pager)
        sequences = [pager.open() for _ in texts]
        caches = [DynamicCache(config=own.config) for _ in texts]
        done = [0] * len(texts)
        # prompts in two chunks, one of them beside decodes; then tokens one by one, not all in each step
        for counts in ((5, 64, 0), (1, 6, 33), *[(1, 1, step % 2) for step in range(8)]):
            entries = [place for place, count in enumerate(counts) if count]
            parts = [texts[place][done[place] : done[place] + counts[place]] for place in entries]
            found = runner.forward([sequences[place] for place in entries], parts, list(range(sum(counts))))
            expected = [own_logits(own, caches[place], part) for place, part in zip(entries, parts, strict=True)]
            torch.testing.assert_close(found, torch.cat(expected), atol=1e-4, rtol=0)
            for place in entries:
                done[place] += counts[place]
                assert sequences[place].length == done[place]
        pager.check()


def test_only_the_rows_asked_for_go_through_the_output_layer() -> None:
    model, own = tiny.pair("llama")
    widths: list[int] = []
    hook = model.lm_head.register_forward_pre_hook(lambda _, inputs: widths.append(inputs[0].shape[1]))
    ids = tiny.tokens(40)[0].tolist()
    with Pager(kv_shape(model.config), PagerConfig(group_pages=4)) as pager:
        runner = RaggedRunner(model, pager)
        found = runner.forward([pager.open(), pager.open()], [ids, ids[:7]], [39, 46, 3, 39])
    hook.remove()
    expected = own_logits(own, DynamicCache(config=own.config), ids)
    assert widths == [4]
    torch.testing.assert_close(found, expected[[39, 6, 3, 39]], atol=1e-4, rtol=0)


def test_bfloat16_models_run_too() -> None:
    model = tiny.build(tiny.llama()).to(torch.bfloat16)
    ids = tiny.tokens(30)[0].tolist()
    with Pager(kv_shape(model.config, "bfloat16"), PagerConfig(group_pages=4)) as pager:
        runner = RaggedRunner(model, pager)
        together = runner.forward([pager.open(), pager.open()], [ids, ids[:9]], [29, 38])
        assert together.dtype is torch.bfloat16
        alone = runner.forward([pager.open()], [ids], [29])
        torch.testing.assert_close(together[:1], alone, atol=0.1, rtol=0)


@pytest.mark.promise(3)
def test_whatever_fails_in_a_forward_leaves_the_sequences_as_they_were() -> None:
    model, _ = tiny.pair("llama")
    ids = tiny.tokens(20)[0].tolist()
    with Pager(kv_shape(model.config), PagerConfig(pool=24, group_pages=4)) as pager:
        runner = RaggedRunner(model, pager)
        first, second = pager.open(), pager.open()
        before = runner.forward([first], [ids[:10]], [9])

        def failing(*_: Any) -> None:
            raise RuntimeError("in the middle")

        hook = model.model.layers[1].register_forward_pre_hook(failing)
        with pytest.raises(RuntimeError, match="in the middle"):
            runner.forward([first, second], [ids[10:11], ids], [0])
        hook.remove()
        others = [pager.open() for _ in range(5)]
        with pytest.raises(PoolExhausted):
            runner.forward([first, *others], [ids[10:11], *[ids] * 5], [0])
        assert (first.length, second.length, pager.step) == (10, 0, None)
        pager.check()
        again = runner.forward([second], [ids[:10]], [9])
        torch.testing.assert_close(again, before, atol=1e-5, rtol=0)


def test_a_model_with_another_attention_is_refused() -> None:
    model, own = tiny.pair("llama")
    with Pager(kv_shape(model.config), PagerConfig(group_pages=4)) as pager:
        with pytest.raises(CacheMismatch, match="eager"):
            RaggedRunner(own, pager)
        changing = tiny.build(tiny.llama())
        runner = RaggedRunner(changing, pager)
        changing.set_attn_implementation("sdpa")
        sequence = pager.open()
        with pytest.raises(CacheMismatch, match="layer 0 was not attended to"):
            runner.forward([sequence], [[1, 2, 3]], [2])
        assert sequence.length == 0
        pager.check()


def test_the_pager_used_in_the_middle_of_a_forward_undoes_it() -> None:
    model = tiny.build(tiny.llama())
    with Pager(kv_shape(model.config), PagerConfig(group_pages=4)) as pager:
        runner = RaggedRunner(model, pager)
        sequence, other = pager.open(), pager.open()
        hook = model.model.layers[1].register_forward_pre_hook(lambda *_: pager.begin([other], [1]))
        with pytest.raises(StepError, match="in the middle of this forward"):
            runner.forward([sequence], [[1, 2, 3]], [2])
        hook.remove()
        pager.rollback()
        assert (sequence.length, other.length) == (0, 0)
        pager.check()


def test_long_factors_of_a_rotary_embedding_bound_the_length_in_a_batch() -> None:
    config = tiny.CONFIGS["phi3"]()
    assert batch_length(config) is None
    factors = [1.0] * 8
    config.rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": factors,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 256,
    }
    assert batch_length(config) == 256
