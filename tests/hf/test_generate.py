"""generate() through a pager: greedy, sampling, beams, assisted decoding, chunks, turns. Oracle: the model's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf import tiny
from hf.runs import SMALL, own_logits, paged
from kvpager.hf import PagerCache


def both(name: str, ids: torch.Tensor, rows: int = 1, seed: int | None = None, **more: Any) -> tuple[Any, Any]:
    """What generate() returns through a pager at the smallest pool, and with the model's own cache."""
    model, own = tiny.pair(name)
    results = []
    for one in (model, own):
        if seed is not None:
            torch.manual_seed(seed)
        if one is own:
            results.append(one.generate(ids, **more))
            continue
        with paged(one, rows=rows) as cache:
            results.append(one.generate(ids, cache=cache, **more))
    return results[0], results[1]


@pytest.mark.promise(2)
@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_greedy_text_is_the_models_own(name: str) -> None:
    found, wanted = both(name, tiny.tokens(70), max_new_tokens=40, do_sample=False)
    assert found.tolist() == wanted.tolist()


@pytest.mark.promise(2)
def test_sampled_text_is_the_models_own_for_the_same_seed() -> None:
    found, wanted = both("llama", tiny.tokens(30), seed=5, max_new_tokens=40, do_sample=True, temperature=0.8)
    assert found.tolist() == wanted.tolist()


@pytest.mark.promise(2)
def test_several_sampled_texts_of_one_prompt() -> None:
    more = {"max_new_tokens": 20, "do_sample": True, "num_return_sequences": 3}
    found, wanted = both("llama", tiny.tokens(30), rows=3, seed=5, **more)
    assert found.tolist() == wanted.tolist()


@pytest.mark.promise(2)
@pytest.mark.promise(3)
@pytest.mark.parametrize("length", [15, 16, 17])
@pytest.mark.parametrize("name", ["llama", "qwen3-sliding"])
def test_beams_are_the_models_own_and_the_books_balance_after(name: str, length: int) -> None:
    """G05: pages shared by beams are copied before they are written to."""
    model, own = tiny.pair(name)
    ids = tiny.tokens(length, seed=length)
    more = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 40, "do_sample": False}
    more |= {"return_dict_in_generate": True, "output_scores": True}
    wanted = own.generate(ids, **more)
    with paged(model, rows=3) as cache:
        found = model.generate(ids, cache=cache, **more)
        assert len(cache.sequences) == 3
        assert cache.stats().sequences == 3
    assert found.sequences.tolist() == wanted.sequences.tolist()
    torch.testing.assert_close(found.sequences_scores, wanted.sequences_scores, atol=1e-4, rtol=0)


@pytest.mark.promise(2)
def test_beams_of_a_padded_batch() -> None:
    model, own = tiny.pair("llama")
    ids, mask = tiny.padded([tiny.tokens(9, 1), tiny.tokens(20, 2)])
    more = {"num_beams": 2, "max_new_tokens": 12, "do_sample": False, "attention_mask": mask}
    with paged(model, rows=4) as cache:
        found = model.generate(ids, cache=cache, **more)
    assert found.tolist() == own.generate(ids, **more).tolist()


@pytest.mark.promise(2)
@pytest.mark.parametrize("chunk", [1, 16, 37, 200])
def test_prefill_in_chunks(chunk: int) -> None:
    found, wanted = both("llama", tiny.tokens(90), prefill_chunk_size=chunk, max_new_tokens=10, do_sample=False)
    assert found.tolist() == wanted.tolist()


@pytest.mark.promise(2)
def test_prefill_of_a_padded_batch_in_chunks() -> None:
    """Chunks in which a row has no token at all."""
    model, own = tiny.pair("llama")
    ids, mask = tiny.padded([tiny.tokens(3, 1), tiny.tokens(40, 2)])
    more = {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False}
    with paged(model, rows=2) as cache:
        found = model.generate(ids, cache=cache, prefill_chunk_size=16, **more)
        assert [sequence.length for sequence in cache.sequences] == [12, 49]
    assert found.tolist() == own.generate(ids, **more).tolist()


@pytest.mark.promise(2)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_assisted_decoding_by_prompt_lookup(name: str) -> None:
    ids = tiny.tokens(12).repeat(1, 6)
    found, wanted = both(name, ids, prompt_lookup_num_tokens=4, max_new_tokens=40, do_sample=False)
    assert found.tolist() == wanted.tolist()


@pytest.mark.promise(2)
def test_assisted_decoding_by_another_model() -> None:
    model, own = tiny.pair("llama")
    assistant = tiny.build(tiny.llama(), "sdpa", seed=0)
    ids = tiny.tokens(30)
    with paged(model) as cache:
        found = model.generate(ids, cache=cache, assistant_model=assistant, max_new_tokens=30, do_sample=False)
    assert found.tolist() == own.generate(ids, max_new_tokens=30, do_sample=False).tolist()


@pytest.mark.promise(2)
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_turns_of_one_conversation_share_a_cache(name: str) -> None:
    model, own = tiny.pair(name)
    with paged(model) as cache:
        ids = tiny.tokens(40, seed=1)
        for seed in (10, 11, 12):
            more = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 15, "do_sample": False}
            found = model.generate(ids, cache=cache, **more)
            assert found.tolist() == own.generate(ids, **more).tolist()
            assert cache.get_seq_length() == found.shape[1] - 1
            ids = torch.cat([found, tiny.tokens(25, seed=seed)], dim=1)


@pytest.mark.promise(2)
def test_turns_of_a_batch_leave_padding_in_the_middle() -> None:
    """Each row goes on as it would alone, with pads before it and between its turns."""
    model, own = tiny.pair("llama")
    prompts = [[tiny.tokens(5, 1), tiny.tokens(22, 2)], [tiny.tokens(21, 3), tiny.tokens(4, 4)]]
    alone: list[list[int]] = []
    for row in prompts:
        ids = torch.empty((1, 0), dtype=torch.long)
        for turn in row:
            ids = torch.cat([ids, turn], dim=1)
            ids = own.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        alone.append(ids[0].tolist())
    with paged(model, rows=2) as cache:
        ids = torch.empty((2, 0), dtype=torch.long)
        mask = torch.empty((2, 0), dtype=torch.long)
        for number in range(2):
            new_ids, new_mask = tiny.padded([row[number] for row in prompts])
            ids, mask = torch.cat([ids, new_ids], dim=1), torch.cat([mask, new_mask], dim=1)
            ids = model.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=8, do_sample=False)
            mask = torch.nn.functional.pad(mask, (0, 8), value=1)
        together = [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)]
        assert [sequence.length for sequence in cache.sequences] == [len(row) - 1 for row in alone]
    assert together == alone


@pytest.mark.promise(2)
def test_a_deep_copy_of_the_cache_goes_its_own_way() -> None:
    """How transformers' documentation reuses the cache of a common prefix."""
    model, own = tiny.pair("llama")
    prefix = tiny.tokens(37, seed=1)
    with paged(model, rows=3) as cache:
        model(prefix, cache=cache)
        for seed in (2, 3):
            ids = torch.cat([prefix, tiny.tokens(11, seed)], dim=1)
            branch = copy.deepcopy(cache)
            found = model.generate(ids, cache=branch, max_new_tokens=10, do_sample=False)
            assert found.tolist() == own.generate(ids, max_new_tokens=10, do_sample=False).tolist()
            branch.close()
        assert cache.get_seq_length() == 37
        assert cache.stats().sequences == 1


def test_the_older_name_of_the_argument_works() -> None:
    model, own = tiny.pair("llama")
    ids = tiny.tokens(20)
    with paged(model) as cache, pytest.warns(FutureWarning, match="past_key_values"):
        logits = model(ids, past_key_values=cache).logits
    torch.testing.assert_close(logits, own_logits(own, ids), atol=1e-4, rtol=0)
    wanted = own.generate(ids, max_new_tokens=5, do_sample=False)
    with paged(model) as cache, pytest.warns(FutureWarning, match="past_key_values"):
        found = model.generate(ids, past_key_values=cache, max_new_tokens=5, do_sample=False)
    assert found.tolist() == wanted.tolist()


def test_one_cache_serves_batches_of_any_size_after_a_reset() -> None:
    model, own = tiny.pair("llama")
    with paged(model, SMALL, rows=3) as cache:
        for rows in (1, 3, 2):
            ids = tiny.tokens(20, rows=rows)
            torch.testing.assert_close(
                model(ids, cache=cache).logits, own(ids, cache=DynamicCache()).logits, atol=1e-4, rtol=0
            )
            cache.reset()
            assert isinstance(cache, PagerCache)
            assert cache.get_seq_length() == 0
