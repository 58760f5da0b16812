"""PagerCache by itself: what it says of itself, cropping, choosing rows, failing and closing."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers.cache_utils import Cache

from hf import tiny
from hf.runs import SMALL, cut, forwards, minimum, own_logits, paged, smallest
from kvpager import PageLost, Pager, PagerConfig, PoolExhausted
from kvpager.errors import ConfigError, InputError, SequenceError, ThreadError
from kvpager.hf import PagerCache, kv_shape
from kvpager.ports import IntArray
from kvpager.swap.memory import MemorySwap

IDS = tiny.tokens(100)


def test_columns_are_counted_from_zero_in_sliding_layers_too() -> None:
    model, _ = tiny.pair("qwen3-sliding")
    with paged(model) as cache:
        assert isinstance(cache, Cache)
        assert (len(cache), cache.batch_size, cache.get_seq_length()) == (2, -1, 0)
        assert (cache.is_sliding, cache.is_linear, cache.is_dummy) == ([True, False], [False] * 2, [False] * 2)
        model(IDS, cache=cache)
        for layer in range(2):
            assert cache.get_seq_length(layer) == cache.get_query_offset(layer) == 100
            assert cache.get_mask_sizes(7, layer) == (107, 0)
            assert cache.get_max_length(layer) == -1
        assert cache.is_initialized
        assert cache.is_croppable
        assert not cache.is_compileable
        assert "1 rows, 100 columns" in repr(cache)


@pytest.mark.promise(2)
@pytest.mark.parametrize("name", ["llama", "qwen3-sliding"])
@pytest.mark.parametrize(("amount", "left"), [(-1, 99), (-20, 80), (-37, 63), (-99, 1), (80, 80), (64, 64)])
def test_what_follows_a_crop_is_as_if_the_tokens_never_came(name: str, amount: int, left: int) -> None:
    model, own = tiny.pair(name)
    ids = torch.cat([IDS[:, :left], tiny.tokens(30, seed=9)], dim=1)
    with paged(model) as cache:
        forwards(model, IDS, cache, cut(100, 40, 5))
        cache.crop(amount)
        assert cache.get_seq_length() == cache.sequences[0].length == left
        cache.pager.check()
        found = model(ids[:, left:], cache=cache).logits
    torch.testing.assert_close(found, own_logits(own, ids)[:, left:], atol=1e-4, rtol=0)


@pytest.mark.parametrize(("amount", "left"), [(0, 100), (100, 100), (500, 100), (-100, 0), (-500, 0)])
def test_crops_at_the_ends(amount: int, left: int) -> None:
    model, _ = tiny.pair("llama")
    with paged(model) as cache:
        model(IDS, cache=cache)
        cache.crop(amount)
        assert cache.get_seq_length() == cache.sequences[0].length == left
        assert model(IDS[:, :3], cache=cache).logits.shape[1] == 3


@pytest.mark.promise(1)
def test_a_crop_leaves_no_trace_under_a_budget() -> None:
    """What is selected afterwards depends on the tokens alone, to the last bit."""
    model, _ = tiny.pair("llama")
    config = replace(SMALL, budget=64)
    with paged(model, config) as cache, paged(model, config) as never:
        forwards(model, IDS[:, :90], cache, cut(90, 44))
        forwards(model, IDS[:, :90], never, cut(90, 44))
        for amount in (1, 3, 10):
            forwards(model, tiny.tokens(amount, seed=amount), cache, [1] * amount)
            cache.crop(-amount)
        ones = [1] * 10
        assert torch.equal(forwards(model, IDS[:, 90:], cache, ones), forwards(model, IDS[:, 90:], never, ones))


@pytest.mark.promise(1)
@pytest.mark.parametrize("mode", ["recall", "discard"])
def test_a_fork_goes_on_as_the_original_would(mode: Any) -> None:
    model, _ = tiny.pair("llama")
    config = replace(SMALL, budget=64, mode=mode, pool=400)
    more = tiny.tokens(40, seed=2)
    with paged(model, config, least=False) as plain, paged(model, config, least=False) as cache:
        for one in (plain, cache):
            forwards(model, IDS, one, cut(100, 44))
        wanted = forwards(model, more, plain, [1] * 40)
        branch = cache.fork()
        cache.reset()
        assert torch.equal(forwards(model, more, branch, [1] * 40), wanted)
        branch.close()


@pytest.mark.promise(1)
def test_forks_do_not_disturb_each_other() -> None:
    """Side by side, each goes on through what the other writes, and selects as if it were alone."""
    model, _ = tiny.pair("llama")
    config = replace(SMALL, budget=64)
    more = tiny.tokens(40, seed=2)
    with paged(model, config, rows=2) as cache:
        forwards(model, IDS, cache, cut(100, 44))
        branch = cache.fork()
        parts: list[list[torch.Tensor]] = [[], []]
        for column in range(40):
            for which, one in enumerate((cache, branch)):
                parts[which].append(model(more[:, column : column + 1], cache=one).logits)
        assert torch.equal(torch.cat(parts[0]), torch.cat(parts[1]))
        branch.close()


@pytest.mark.promise(3)
@pytest.mark.parametrize("mode", ["recall", "discard"])
def test_beams_under_a_budget_end_with_balanced_books(mode: Any) -> None:
    model, _ = tiny.pair("llama")
    config = replace(SMALL, budget=64, mode=mode, pool=600)
    with paged(model, config, least=False) as cache:
        text = model.generate(tiny.tokens(90), cache=cache, num_beams=3, max_new_tokens=20, do_sample=False)
        assert text.shape == (1, 110)
        assert [sequence.length for sequence in cache.sequences] == [109] * 3


@pytest.mark.promise(3)
def test_rows_used_again_are_forked_and_rows_not_used_are_closed() -> None:
    model, own = tiny.pair("llama")
    ids = tiny.tokens(37, rows=3)
    more = tiny.tokens(20, seed=4, rows=4)
    with paged(model, rows=8) as cache:
        model(ids, cache=cache)
        first = list(cache.sequences)
        cache.reorder_cache(torch.tensor([2, 0, 2]))
        assert cache.sequences[:2] == [first[2], first[0]]
        assert first[1].closed
        assert not first[0].closed
        cache.pager.check()
        rows = [2, 0, 2]
        cache.batch_repeat_interleave(2)
        rows = [row for row in rows for _ in range(2)]
        cache.batch_select_indices(torch.tensor([5, 0, 2, 3]))
        rows = [rows[row] for row in (5, 0, 2, 3)]
        assert cache.stats().sequences == 4
        cache.pager.check()
        found = model(more, cache=cache).logits
        wanted = own_logits(own, torch.cat([ids[rows], more], dim=1))[:, 37:]
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
        cache.batch_select_indices(torch.tensor([True, False, False, True]))
        assert cache.batch_size == 2


@pytest.mark.promise(6)
def test_rows_that_do_not_exist_are_named() -> None:
    model, _ = tiny.pair("llama")
    with paged(model, rows=2) as cache:
        model(tiny.tokens(10, rows=2), cache=cache)
        with pytest.raises(InputError, match=r"beam_idx: 2 .*0\.\.1"):
            cache.reorder_cache(torch.tensor([0, 2]))
        with pytest.raises(InputError, match="indices: -1"):
            cache.batch_select_indices(torch.tensor([-1]))
        with pytest.raises(InputError, match="repeats: 0"):
            cache.batch_repeat_interleave(0)
        with pytest.raises(InputError, match="3 rows and the cache 2"):
            model(tiny.tokens(10, rows=3), cache=cache)
        assert [sequence.length for sequence in cache.sequences] == [10, 10]


@pytest.mark.promise(6)
def test_a_pool_that_is_too_small_says_so_and_nothing_is_lost() -> None:
    """G13: a batch that never fits is refused at once; one that fits is served by the same cache after."""
    model, own = tiny.pair("llama")
    with paged(model, rows=1) as cache:
        with pytest.raises(PoolExhausted, match=r"\d+ frames"):
            model(tiny.tokens(20, rows=40), cache=cache)
        assert cache.get_seq_length() == 0
        cache.pager.check()
        torch.testing.assert_close(model(IDS, cache=cache).logits, own_logits(own, IDS), atol=1e-4, rtol=0)


@pytest.mark.promise(6)
def test_a_sequence_beyond_max_tokens_is_refused_and_stays_as_it_was() -> None:
    """G13: neither a prompt nor text that grows past the bound."""
    model, own = tiny.pair("llama")
    with paged(model, replace(SMALL, max_tokens=128)) as cache:
        with pytest.raises(PoolExhausted, match="128"):
            model.generate(tiny.tokens(300), cache=cache, max_new_tokens=3)
        cache.reset()
        ids = tiny.tokens(100)
        with pytest.raises(PoolExhausted, match="128"):
            model.generate(ids, cache=cache, max_new_tokens=60, do_sample=False)
        assert cache.get_seq_length() == cache.sequences[0].length == 128
        cache.pager.check()
        cache.reset()
        short = tiny.tokens(20)
        found = model.generate(short, cache=cache, max_new_tokens=8, do_sample=False)
        assert found.tolist() == own.generate(short, max_new_tokens=8, do_sample=False).tolist()


@pytest.mark.promise(2)
def test_a_prompt_longer_than_the_pool_is_served_beside_short_ones() -> None:
    """G13: 300 tokens in a pool of 8 blocks, then three short prompts."""
    model, own = tiny.pair("llama")
    config = replace(SMALL, pool=8 * 2 * 2)
    with paged(model, config, least=False) as cache:
        for ids in (tiny.tokens(300), *(tiny.tokens(20, seed) for seed in (1, 2, 3))):
            found = model.generate(ids, cache=cache, max_new_tokens=10, do_sample=False)
            assert found.tolist() == own.generate(ids, max_new_tokens=10, do_sample=False).tolist()
            cache.reset()


@pytest.mark.promise(2)
def test_two_rows_in_a_pool_of_one_and_a_half_get_their_solo_texts() -> None:
    """G15: 5 tokens in, 100 out."""
    model, own = tiny.pair("llama")
    prompts = [tiny.tokens(5, seed) for seed in (1, 2)]
    blocks = -(-104 // 16)
    config = replace(SMALL, pool=blocks * 4 * 3 // 2)
    assert config.pool is not None
    assert int(config.pool) >= minimum(kv_shape(model.config), config, 2)
    more = {"max_new_tokens": 100, "do_sample": False}
    with paged(model, config, least=False) as cache:
        found = model.generate(torch.cat(prompts), cache=cache, **more).tolist()
        assert cache.stats().recalls > 0
    assert found == [own.generate(ids, **more)[0].tolist() for ids in prompts]


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("place", ["before", "after"])
def test_a_forward_that_fails_is_rolled_back(layer: int, place: str) -> None:
    model, own = tiny.pair("llama")

    def fail(*_: Any) -> None:
        raise RuntimeError("interrupted")

    with paged(model) as cache:
        model(IDS[:, :50], cache=cache)
        module = model.model.layers[layer]
        hook = module.mlp.register_forward_pre_hook(fail) if place == "after" else None
        hook = hook or module.self_attn.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="interrupted"):
            model(IDS[:, 50:80], cache=cache)
        hook.remove()
        complete = layer == 1 and place == "after"  # the last layer had attended: its tokens are in
        assert cache.get_seq_length() == cache.sequences[0].length == (80 if complete else 50)
        cache.crop(50)
        cache.pager.check()
        found = model(IDS[:, 50:], cache=cache).logits
    torch.testing.assert_close(found, own_logits(own, IDS)[:, 50:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("failing", range(3))
def test_a_lost_page_raises_and_the_step_is_undone(failing: int) -> None:
    class Flaky(MemorySwap):
        reads = -1000

        def read(self, slots: IntArray, *into: Any) -> npt.NDArray[np.uint8]:
            self.reads += 1
            if self.reads == failing:
                raise PageLost("slot 3: checksum differs")
            return super().read(slots, *into)

    model, own = tiny.pair("llama")
    shape = kv_shape(model.config)
    swap = Flaky(shape.page_bytes(16), 1 << 30)
    with Pager(shape, smallest(model.config, SMALL), swap=swap) as pager:
        cache = PagerCache(model.config, pager=pager)
        model(IDS[:, :90], cache=cache)
        swap.reads = -1
        with pytest.raises(PageLost, match="slot 3"):
            model(IDS[:, 90:], cache=cache)
        assert cache.get_seq_length() == cache.sequences[0].length == 90
        pager.check()
        found = model(IDS[:, 90:], cache=cache).logits
        torch.testing.assert_close(found, own_logits(own, IDS)[:, 90:], atol=1e-4, rtol=0)
        cache.close()


@pytest.mark.promise(6)
def test_another_thread_is_refused() -> None:
    model, _ = tiny.pair("llama")
    errors: list[BaseException] = []

    def other() -> None:
        with torch.no_grad(), pytest.raises(ThreadError) as caught:
            model(IDS, cache=cache)
        errors.append(caught.value)

    with paged(model) as cache:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert len(errors) == 1
        assert cache.get_seq_length() == 0


def test_closing_twice_is_harmless_and_a_closed_cache_is_refused() -> None:
    model, _ = tiny.pair("llama")
    with PagerCache(model.config, SMALL) as cache:
        model(IDS, cache=cache)
    cache.close()
    with pytest.raises(SequenceError, match="shut down"):
        model(IDS, cache=cache)


def test_a_pager_that_was_given_outlives_the_cache() -> None:
    model, _ = tiny.pair("llama")
    with Pager(kv_shape(model.config), SMALL) as pager:
        for _ in range(2):
            with PagerCache(model.config, pager=pager) as cache:
                model(IDS, cache=cache)
                assert pager.stats().sequences == 1
            assert pager.stats().sequences == 0


@pytest.mark.promise(6)
def test_a_pager_of_another_shape_is_refused() -> None:
    model, _ = tiny.pair("llama")
    with Pager(kv_shape(tiny.CONFIGS["llama-mqa"]()), SMALL) as pager:
        with pytest.raises(ConfigError, match="shape"):
            PagerCache(model.config, pager=pager)
        with pytest.raises(ConfigError, match="not both"):
            PagerCache(tiny.CONFIGS["llama-mqa"](), PagerConfig(), pager=pager)


@pytest.mark.promise(7)
def test_statistics_tell_all_memory() -> None:
    model, _ = tiny.pair("llama")
    with paged(model, replace(SMALL, budget=64)) as cache:
        model(IDS, cache=cache)
        stats = cache.stats()
        assert stats.pool_bytes == stats.frames * cache.pager.shape.page_bytes(16)
        assert stats.full_kv_bytes == 100 * cache.pager.shape.token_bytes
        assert stats.digest_bytes > 0
        assert stats.resident_bytes == stats.pool_bytes + stats.digest_bytes + stats.table_bytes
        assert stats.swap_bytes > 0
        assert stats.peak_rss_bytes > stats.resident_bytes
