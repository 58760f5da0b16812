"""A pager over a store of blocks: what was computed is found again, bit for bit, and nothing that is not its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpager import PageLost, Pager, PagerConfig
from kvpager.config import POLICIES
from kvpager.errors import ConfigError
from kvpager.kernels.native import NativeKernel
from kvpager.kernels.reference import ReferenceKernel
from tests.core.fed import SMALL, Fed, text
from tests.memory_store import MemoryStore

KERNELS = [ReferenceKernel, NativeKernel]
PROMPT = text(100)
LONGER = PROMPT + text(60, seed=1)


def restarted(store, tokens=PROMPT, **config):
    """A store in which a pager has left these tokens, and that pager, shut down."""
    fed = Fed(store, **config)
    sequence = fed.open(tokens)
    fed.run(sequence, tokens)
    fed.pager.close(sequence)
    fed.pager.shutdown()
    store.close()
    return store.reopened()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("budget", [None, 48])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("pool", [36, 60, 400])
def test_after_a_restart_a_prompt_goes_on_as_if_nothing_had_happened(kernel, budget, dtype, pool):
    kind = {"kernel": kernel, "budget": budget, "shape": replace(SMALL, dtype=dtype), "pool": pool}
    whole = Fed(**kind)
    undisturbed = whole.open(PROMPT)
    whole.run(undisturbed, PROMPT)
    whole.pager.close(undisturbed)
    again = whole.open(LONGER)
    wanted = whole.run(again, LONGER)

    store = restarted(MemoryStore(), **kind)
    fed = Fed(store, **kind)
    sequence = fed.open(LONGER)
    assert sequence.length == 96  # whole blocks, and whole tiles with a budget
    assert not store.calls["get"], "a page was read to find the prompt"
    np.testing.assert_array_equal(fed.run(sequence, LONGER), wanted)
    assert store.calls["get"]
    stats = fed.pager.stats()
    assert stats.store_tokens_hit == stats.prefix_tokens_hit == 96
    assert stats.store_lost == 0


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "random"])
def test_scores_come_back_so_the_next_victims_are_the_same(policy):
    config = {"policy": policy, "budget": 48}
    whole = Fed(**config)
    first = whole.open(PROMPT)
    whole.run(first, PROMPT)
    whole.pager.close(first)
    first = whole.open(LONGER)
    whole.run(first, LONGER)

    fed = Fed(restarted(MemoryStore(), **config), **config)
    second = fed.open(LONGER)
    fed.run(second, LONGER)
    for layer in range(SMALL.layers):  # all pages back: which of them are in the pool is not what is compared
        fed.pager.read(second, layer)
        whole.pager.read(first, layer)
    assert fed.order(second) == whole.order(first)


def test_the_clock_goes_on_from_where_the_store_was_told_it_was():
    store = restarted(MemoryStore())
    assert store.tick > 0
    fed = Fed(store)
    sequence = fed.open(LONGER)
    fed.run(sequence, LONGER)
    fed.pager.close(sequence)  # the store asserts that ticks don't go back
    assert store.tick > 7


def test_blocks_are_stored_once_and_with_what_is_known_of_them():
    store = restarted(MemoryStore(), budget=48)
    assert len(store.shelf.blocks) == 12
    heads = [block.head for block in store.shelf.blocks.values()]
    assert sorted(head.depth for head in heads) == list(range(12))
    assert {head.approximate for head in heads} == {False, True}
    assert all(head.digest and head.scores for head in heads)
    assert [head.parent for head in heads if head.depth == 0] == [b""]
    before = dict(store.shelf.blocks)
    fed = Fed(store, budget=48)
    sequence = fed.open(PROMPT)
    fed.run(sequence, PROMPT)
    assert not store.calls["put"]
    fed.pager.close(sequence)
    assert {key: block.head.hits for key, block in store.shelf.blocks.items()} == dict.fromkeys(before, 1)


def test_another_salt_never_finds_them_and_the_same_one_does():
    store = MemoryStore()
    fed = Fed(store)
    for salt in (b"a", b"b", b""):
        sequence = fed.open(PROMPT, salt)
        assert sequence.length == 0
        fed.run(sequence, PROMPT)
        fed.pager.close(sequence)
    fed.pager.shutdown()
    assert len({block.head.tenant for block in store.shelf.blocks.values()}) == 3
    fed = Fed(store.reopened())
    assert fed.open(PROMPT, b"c").length == 0
    assert fed.pager.store.calls["heads"] == 0, "blocks of others were looked at"
    assert fed.open(PROMPT, b"a").length == 96
    store.erase(next(block.head.tenant for block in store.shelf.blocks.values()))  # a's
    assert fed.pager.forget(b"a") == 12
    assert fed.open(PROMPT, b"a").length == 0
    assert fed.open(PROMPT, b"b").length == 96


@pytest.mark.parametrize(
    "changed",
    [
        {"namespace": "another model"},
        {"shape": replace(SMALL, dtype="float16")},
        {"shape": replace(SMALL, head_dim=16)},
        {"shape": replace(SMALL, scale=0.5)},
        {"page_size": 16},
        {"group_pages": 8},
        {"kernel": NativeKernel},
    ],
)
def test_what_the_bytes_depend_on_is_in_the_key(changed):
    store = restarted(MemoryStore())
    fed = Fed(store, **changed)
    assert fed.open(PROMPT).length == 0
    assert not store.calls["heads"]


@pytest.mark.parametrize(
    "changed", [{"budget": 64}, {"tile": 32}, {"sample": 4}, {"recent_pages": 3}, {"sink_pages": 2}]
)
def test_approximate_blocks_are_found_under_the_same_settings_alone(changed):
    store = restarted(MemoryStore(), budget=48)
    exact = sum(not block.head.approximate for block in store.shelf.blocks.values())
    fed = Fed(store, **{"budget": 48, **changed})
    assert fed.open(PROMPT).length == exact * 8 // fed.pager.config.tile * fed.pager.config.tile


def test_blocks_of_a_pager_without_a_budget_serve_one_with_a_budget():
    """They have no digests: these are made from their pages."""
    store = restarted(MemoryStore())
    whole = Fed(budget=64)
    first = whole.open(PROMPT[:65])
    whole.run(first, PROMPT[:65])
    whole.pager.close(first)
    wanted = whole.run(whole.open(PROMPT[:65] + LONGER), PROMPT[:65] + LONGER)
    fed = Fed(store, budget=64)
    sequence = fed.open(PROMPT[:65] + LONGER)
    assert sequence.length == 64
    np.testing.assert_array_equal(fed.run(sequence, PROMPT[:65] + LONGER), wanted)


def test_scores_of_another_policy_are_left_alone():
    store = restarted(MemoryStore(), policy="attention")
    fed = Fed(store, policy="h2o")
    sequence = fed.open(LONGER)
    assert sequence.length == 96
    fed.run(sequence, LONGER)


@pytest.mark.parametrize("budget", [None, 48])
def test_a_block_that_the_store_has_lost_is_told_once(budget):
    store = restarted(MemoryStore(), budget=budget)
    wanted = Fed(budget=budget)
    outputs = wanted.run(wanted.open(LONGER), LONGER)
    lost = [key for key, block in store.shelf.blocks.items() if block.head.depth in (4, 7)]
    for key in lost:
        store.damage(key)
    fed = Fed(store, budget=budget)
    sequence = fed.open(LONGER)
    with pytest.raises(PageLost) as told:
        fed.run(sequence, LONGER)
    assert told.value.sequences == (sequence.id,)
    fed.pager.rollback()
    fed.pager.close(sequence)
    fed.pager.check()
    for _ in range(3):  # at most one more loss for each damaged block, then it goes through
        sequence = fed.open(LONGER)
        try:
            given = fed.run(sequence, LONGER)
            break
        except PageLost:
            fed.pager.close(sequence)
    np.testing.assert_array_equal(given, outputs[-len(given) :])
    assert 1 <= fed.pager.stats().store_lost <= 2
    asked = [store.asked.count(key) for key in lost]
    assert max(asked) == 1, "a lost block was asked for again"


def test_a_head_that_is_not_of_its_block_is_a_miss():
    store = restarted(MemoryStore())
    for key, block in store.shelf.blocks.items():
        if block.head.depth == 3:
            tokens = np.arange(8).astype("<i8").tobytes()
            store.shelf.blocks[key] = replace(block, head=replace(block.head, tokens=tokens))
    fed = Fed(store)
    sequence = fed.open(PROMPT)
    assert sequence.length == 24
    fed.run(sequence, PROMPT)


def test_blocks_wait_while_the_store_has_no_room_and_are_counted_when_they_have_to_go():
    store = MemoryStore(room=1)
    fed = Fed(store, prefix_tokens=0)
    sequence = fed.open(PROMPT)
    fed.run(sequence, PROMPT)
    assert not store.shelf.blocks
    store._room = 2**20
    fed.step(sequence, LONGER, 101)
    assert len(store.shelf.blocks) == 12
    store._room = 1
    fed.run(sequence, LONGER)
    fed.pager.close(sequence)
    assert len(store.shelf.blocks) == 12
    assert fed.pager.stats().store_skipped == 8
    fed.pager.check()


def test_blocks_that_left_the_pool_are_stored_from_swap():
    store = MemoryStore(room=1)
    fed = Fed(store, pool=24)
    sequence = fed.open(PROMPT)
    fed.run(sequence, PROMPT)
    assert fed.pager.stats().evictions
    store._room = 2**20
    fed.pager.close(sequence)
    fed.pager.shutdown()
    assert len(store.shelf.blocks) == 12
    again = Fed(store.reopened(), pool=24)
    whole = Fed(pool=24)
    wanted = whole.run(whole.open(LONGER), LONGER)
    sequence = again.open(LONGER)
    assert sequence.length == 96
    np.testing.assert_array_equal(again.run(sequence, LONGER), wanted[96:])


def test_an_unreachable_store_costs_nothing_but_the_hits():
    store = MemoryStore()
    store.broken = True
    fed = Fed(store)
    whole = Fed()
    wanted = whole.run(whole.open(LONGER), LONGER)
    sequence = fed.open(LONGER)
    np.testing.assert_array_equal(fed.run(sequence, LONGER), wanted)
    fed.pager.close(sequence)
    fed.pager.shutdown()


def test_a_store_is_refused_where_pages_are_dropped_for_good():
    with pytest.raises(ConfigError, match="discard"):
        Pager(SMALL, PagerConfig(pool=100, mode="discard", budget=64), store=MemoryStore())


class Choosy(MemoryStore):
    """A store that takes what was found again or is to be shared, as one that nodes share does."""

    chosen: set[bytes]

    def __init__(self) -> None:
        super().__init__()
        self.chosen = set()

    def wants(self, keys):
        return [key in self.chosen and key not in self.shelf.blocks for key in keys]

    def publish(self, keys):
        self.chosen.update(keys)

    def update(self, news, tick):
        super().update(news, tick)
        new = {one.key for one in news if one.hits} - self.chosen
        self.chosen |= new
        return list(new)


def test_what_a_store_wants_later_is_offered_again():
    store = Choosy()
    fed = Fed(store)
    for hits in range(3):
        sequence = fed.open(PROMPT)
        fed.run(sequence, PROMPT)
        fed.pager.close(sequence)
        assert len(store.shelf.blocks) == (12 if hits else 0)


def test_what_is_to_be_shared_is_offered_again_though_it_was_not_wanted():
    store = Choosy()
    fed = Fed(store)
    sequence = fed.open(PROMPT)
    fed.run(sequence, PROMPT)
    keys = list(sequence.keys)
    fed.pager._state.keeper.publish([*keys[:4], bytes(32)])
    assert set(store.shelf.blocks) == set(keys[:4])


def test_prefetch_names_what_a_prompt_will_want():
    store = restarted(MemoryStore())
    fed = Fed(store)
    fed.pager.prefetch(PROMPT)
    assert [store.shelf.blocks[key].head.depth for key in store.prefetched] == list(range(12))
    fed.open(PROMPT)
    store.prefetched.clear()
    fed.pager.prefetch(PROMPT)
    assert not store.prefetched


events = st.lists(
    st.tuples(
        st.sampled_from(["open", "run", "close", "restart", "park", "forget", "lose"]),
        st.integers(0, 2),
        st.integers(1, 90),
        st.sampled_from([b"", b"t"]),
    ),
    min_size=4,
    max_size=14,
)


@settings(max_examples=60, deadline=None)
@given(events, st.sampled_from([None, 48]), st.sampled_from([26, 40, 64, 400]), st.sampled_from([2**20, 3000]))
def test_random_histories_give_what_a_pager_without_a_store_gives(history, budget, pool, room):
    """Promise 1 over every state of the store: outputs are those of one sequence alone, computed from nothing."""
    store = MemoryStore(room=room)
    config = {"budget": budget, "pool": pool, "prefix_tokens": 64}
    fed, live = Fed(store, **config), {}
    texts = [LONGER, PROMPT[:40] + text(80, seed=2), text(120, seed=3)]
    alone = Fed(budget=budget, prefix_tokens=0)
    wanted = [alone.run(alone.pager.open(), one) for one in texts]
    for what, index, count, salt in history:
        if what == "open" and index not in live:
            live[index] = fed.open(texts[index], salt)
        elif what == "run" and index in live:
            sequence = live[index]
            fed.pager.unpark(sequence)
            start = sequence.length
            stop = min(start + count, len(texts[index])) // 16 * 16
            try:
                while sequence.length < stop:
                    given = fed.step(sequence, texts[index], sequence.length // 16 * 16 + 16)
                    end = sequence.length
                    np.testing.assert_array_equal(given, wanted[index][end - len(given) : end])
            except PageLost as error:
                fed.pager.rollback()
                for one in [place for place, held in live.items() if held.id in error.sequences]:
                    fed.pager.close(live.pop(one))
        elif what == "close" and index in live:
            fed.pager.close(live.pop(index))
        elif what == "park" and index in live:
            fed.pager.park(live[index])
        elif what == "restart":
            live.clear()
            fed.pager.shutdown()
            store = store.reopened()
            fed = Fed(store, **config)
        elif what == "forget":
            fed.pager.forget(salt)
        elif what == "lose" and store.shelf.blocks:
            keys = list(store.shelf.blocks)
            store.damage(keys[count % len(keys)])
        fed.pager.check()
