"""Left padding: a row is what it would be alone, whoever shares its batch; pads are never stored, scored or counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hf import tiny
from hf.runs import SMALL, paged
from kvpager import PagerConfig
from kvpager.errors import InputError
from kvpager.hf import PagerCache

LENGTHS = (3, 17, 40)
PROMPTS = [tiny.tokens(length, seed=length) for length in LENGTHS]
BUDGETED = PagerConfig(page_size=8, tile=16, group_pages=2, budget=32)


def generate(model: Any, config: PagerConfig, prompts: list[torch.Tensor]) -> list[list[int]]:
    ids, mask = tiny.padded(prompts)
    with paged(model, config, rows=len(prompts)) as cache:
        seen: list[tuple[int, int]] = []
        cache.pager.observers.append(lambda event: seen.append((event.sequence.id, event.stop)))
        text = model.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=30, do_sample=False)
        lengths = [int(row.sum()) + 29 for row in mask]
        assert [sequence.length for sequence in cache.sequences] == lengths
        assert cache.stats().tokens == sum(lengths)
        for sequence, length in zip(cache.sequences, lengths, strict=True):
            assert max(stop for number, stop in seen if number == sequence.id) == length
    return [row[ids.shape[1] :].tolist() for row in text]


@pytest.mark.promise(2)
@pytest.mark.parametrize("name", ["llama", "qwen3-sliding", "gemma2", "phi3"])
@pytest.mark.parametrize("config", [SMALL, BUDGETED], ids=["no budget", "budget"])
def test_a_prompt_gets_the_same_text_alone_and_in_any_batch(name: str, config: PagerConfig) -> None:
    """G04"""
    model, own = tiny.pair(name)
    alone = [generate(model, config, [prompt])[0] for prompt in PROMPTS]
    assert generate(model, config, PROMPTS) == alone
    assert generate(model, config, PROMPTS[::-1]) == alone[::-1]
    if config.budget is None:
        wanted = [own.generate(prompt, max_new_tokens=30, do_sample=False)[0, prompt.shape[1] :] for prompt in PROMPTS]
        assert alone == [row.tolist() for row in wanted]


def test_what_pads_get_is_zeros_and_what_they_hold_does_not_matter() -> None:
    model, _ = tiny.pair("llama")
    ids, mask = tiny.padded(PROMPTS)
    outputs: list[torch.Tensor] = []
    hook = model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(lambda _, given: outputs.append(given[0]))
    logits = []
    for filler in (0, 77):
        with paged(model, rows=3) as cache:
            logits.append(model(torch.where(mask.bool(), ids, filler), attention_mask=mask, cache=cache).logits)
    hook.remove()
    assert all((output[~mask.bool()] == 0).all() for output in outputs)
    assert torch.equal(logits[0][mask.bool()], logits[1][mask.bool()])


def test_a_row_without_any_token_in_a_forward() -> None:
    model, own = tiny.pair("llama")
    ids = tiny.tokens(24, rows=2)
    mask = torch.ones_like(ids)
    mask[1, :10] = 0
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    with paged(model, rows=2) as cache:
        parts = []
        for start, stop in ((0, 8), (8, 16), (16, 24)):
            parts.append(
                model(
                    ids[:, start:stop],
                    attention_mask=mask[:, :stop],
                    position_ids=positions[:, start:stop],
                    cache=cache,
                ).logits
            )
        assert [sequence.length for sequence in cache.sequences] == [24, 14]
        with paged(model, rows=2) as empty:
            model(ids[:, :8], attention_mask=torch.zeros((2, 8), dtype=torch.long), cache=empty)
            assert empty.get_seq_length() == 8
            assert [sequence.length for sequence in empty.sequences] == [0, 0]
    found = torch.cat(parts, dim=1)
    torch.testing.assert_close(found[0], own(ids[:1]).logits[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(found[1, 10:], own(ids[1:, 10:]).logits[0], atol=1e-4, rtol=0)


def test_pads_with_holes_between_tokens() -> None:
    model, own = tiny.pair("llama")
    ids = tiny.tokens(30)
    mask = torch.ones_like(ids)
    mask[0, [0, 7, 8, 20]] = 0
    with paged(model) as cache:
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        found = model(ids, attention_mask=mask, position_ids=positions, cache=cache).logits
        cache.crop(-12)  # 12 columns, of which one is a pad
        assert cache.sequences[0].length == 15
        cache.crop(-11)
        assert (cache.sequences[0].length, cache.get_seq_length()) == (6, 7)
        assert cache.real_columns is not None
        np.testing.assert_array_equal(cache.real_columns, mask[:, :7].bool().numpy())
    wanted = own(ids[mask.bool()][None]).logits
    torch.testing.assert_close(found[mask.bool()][None], wanted, atol=1e-4, rtol=0)


@pytest.mark.promise(2)
def test_a_row_that_ended_early_goes_on_in_the_next_turn() -> None:
    """What generate() fills up an ended row with counts as tokens; the next turn's mask takes it back."""
    model, own = tiny.pair("llama")
    prompts = [tiny.tokens(12, 1), tiny.tokens(20, 2)]
    wanted: list[list[int]] = []
    first = [own.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :].tolist() for ids in prompts]
    end = next(token for token in first[0] if token not in first[1] and token != 0)
    more = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": end}
    for ids in prompts:
        for seed in (5, 6):
            ids = own.generate(ids, attention_mask=torch.ones_like(ids), **more)
            ids = torch.cat([ids, tiny.tokens(7, seed)], dim=1)
        wanted.append(ids[0].tolist())
    with paged(model, rows=2) as cache:
        ids, mask = tiny.padded(prompts)
        for seed in (5, 6):
            start = ids.shape[1]
            ids = model.generate(ids, attention_mask=mask, cache=cache, **more)
            new = ids[:, start:]
            ended = (new == end).cumsum(dim=1) - (new == end).long()
            mask = torch.cat([mask, (ended == 0).long(), torch.ones((2, 7), dtype=torch.long)], dim=1)
            ids = torch.cat([ids, tiny.tokens(7, seed).expand(2, -1)], dim=1)
        cache.pager.check()
    assert (mask[0, 20:] == 0).any(), "the first row ended before the second"
    assert [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)] == wanted


@pytest.mark.promise(6)
@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.tensor([[0, 1, 1, 1]]), r"shape is \(1, 4\), not \(1, 8\): 1 rows, 6 columns in the cache and 2 new"),
        (torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0]]), "row 0 differs"),
        (torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]]), "row 0 differs"),
        (None, "mask of all columns"),
        (torch.ones((1, 8), dtype=torch.long), "mask of all columns"),
    ],
)
def test_a_mask_that_contradicts_the_cache_is_refused_and_changes_nothing(
    mask: torch.Tensor | None, message: str
) -> None:
    model, _ = tiny.pair("llama")
    first = torch.tensor([[0, 1, 1, 1, 1, 1]])
    good = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1]])
    ids = tiny.tokens(8)
    with paged(model) as cache:
        model(ids[:, :6], attention_mask=first, cache=cache)
        with pytest.raises(InputError, match=message):
            model(ids[:, 6:], attention_mask=mask, cache=cache)
        assert (cache.get_seq_length(), cache.sequences[0].length) == (6, 5)
        found = model(ids[:, 6:], attention_mask=good, cache=cache).logits
    with paged(model) as cache:
        torch.testing.assert_close(found, model(ids, attention_mask=good, cache=cache).logits[:, 6:])


def test_the_callers_mask_may_change_afterwards() -> None:
    model, _ = tiny.pair("llama")
    ids, mask = tiny.padded([tiny.tokens(4), tiny.tokens(9)])
    mask = mask.bool()
    with paged(model, replace(SMALL, policy="lru"), rows=2) as cache:
        model(ids, attention_mask=mask, cache=cache)
        mask[:] = True
        assert isinstance(cache, PagerCache)
        assert cache.real_columns is not None
        assert cache.real_columns.sum() == 13
