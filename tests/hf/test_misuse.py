"""A model used in ways of its own: gradients, torch.compile, threads, pagers that several caches share."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from tests.hf import tiny
from tests.hf.runs import SMALL, own_logits, paged

from kvpager import Pager, PagerConfig
from kvpager.errors import InputError, StepError, ThreadError
from kvpager.hf import PagerCache, kv_shape

IDS = tiny.tokens(40)


@pytest.mark.promise(6)
def test_a_gradient_through_the_pager_is_refused() -> None:
    model = tiny.build(tiny.llama())
    with torch.enable_grad(), paged(model) as cache:
        logits = model(IDS, cache=cache).logits
        with pytest.raises(InputError, match="no gradient"):
            logits.sum().backward()
        assert all(weight.grad is None for weight in model.model.layers[0].parameters())


@pytest.mark.slow
def test_a_compiled_model_gives_its_own_answers() -> None:
    model, own = tiny.build(tiny.llama()), tiny.build(tiny.llama(), "sdpa")
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, backend="eager")
    with torch.no_grad(), paged(model) as cache:
        found = [compiled(IDS[:, :30], cache=cache).logits] + [
            compiled(IDS[:, place : place + 1], cache=cache).logits for place in range(30, 40)
        ]
    torch.testing.assert_close(torch.cat(found, dim=1), own_logits(own, IDS), atol=1e-4, rtol=0)
    torch._dynamo.reset()


@pytest.mark.promise(6)
def test_a_forward_in_the_middle_of_another_on_one_pager_undoes_the_first() -> None:
    model, own = tiny.build(tiny.llama()), tiny.pair("llama")[1]
    with torch.no_grad(), Pager(kv_shape(model.config), PagerConfig(group_pages=4)) as pager:
        first, second = (PagerCache(model.config, pager=pager) for _ in range(2))

        def intrude(*_: Any) -> None:
            hook.remove()
            model(IDS[:, :5], cache=second)

        hook = model.model.layers[1].register_forward_pre_hook(intrude)
        with pytest.raises(StepError, match="in the middle of this forward"):
            model(IDS, cache=first)
        assert (first.get_seq_length(), second.get_seq_length()) == (0, 5)
        pager.check()
        for cache, past in ((first, 0), (second, 5)):
            torch.testing.assert_close(
                model(IDS[:, past:], cache=cache).logits, own_logits(own, IDS)[:, past:], atol=1e-4, rtol=0
            )


def test_a_crop_that_one_row_cannot_follow_changes_no_row() -> None:
    model, _ = tiny.pair("llama")
    ids, mask = tiny.padded([tiny.tokens(50), tiny.tokens(300, 1)])
    with paged(model, PagerConfig(mode="discard", budget=64, tile=16, pool=2000), least=False) as cache:
        model(ids, cache=cache, attention_mask=mask)
        view = cache.sequences[1].view
        assert view is not None
        block = int((~view.all(axis=(1, 2))).nonzero()[0][-1])
        with pytest.raises(InputError, match="were discarded"):
            cache.crop(block * 16 + 5)
        assert [sequence.length for sequence in cache.sequences] == [50, 300]
        assert cache.get_seq_length() == 300


def test_caches_are_closed_in_any_order() -> None:
    model, _ = tiny.pair("llama")
    cache = PagerCache(model.config, SMALL)
    model(IDS, cache=cache)
    other = copy.deepcopy(cache)
    cache.close()
    other.close()
    with Pager(kv_shape(model.config), SMALL) as pager:
        third = PagerCache(model.config, pager=pager)
        model(IDS, cache=third)
    third.close()
    assert not third.sequences


def test_a_thread_that_adopts_the_pager_may_generate() -> None:
    model, own = tiny.pair("llama")
    texts: list[list[int]] = []

    def work() -> None:
        cache.pager.adopt()
        texts.append(model.generate(IDS, cache=cache, max_new_tokens=5, do_sample=False)[0].tolist())

    with paged(model) as cache:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        with pytest.raises(ThreadError, match="adopt"):
            cache.crop(3)
        cache.pager.adopt()
    assert texts == [own.generate(IDS, max_new_tokens=5, do_sample=False)[0].tolist()]


@pytest.mark.promise(6)
def test_a_mask_that_reuse_was_not_given_is_refused() -> None:
    model, own = tiny.pair("llama")
    ids, mask = tiny.padded([tiny.tokens(44, 1), tiny.tokens(64, 2)])
    with paged(model, PagerConfig(group_pages=4, prefix_tokens=1000), rows=2) as cache:
        cache.reuse(ids)
        with pytest.raises(InputError, match=r"differs from the one that reuse\(\) was given"):
            model(ids, cache=cache, attention_mask=mask)
        assert cache.get_seq_length() == 0
        for _ in range(2):
            cache.reset()
            found = min(cache.reuse(ids, mask))
            past = cache.get_seq_length()
            logits = model(ids[:, past:], cache=cache, attention_mask=mask).logits
            torch.testing.assert_close(logits[1], own_logits(own, ids[1:])[0, past:], atol=1e-4, rtol=0)
            model(ids[:, :3], cache=cache, attention_mask=torch.nn.functional.pad(mask, (0, 3), value=1))
        assert found > 0
