"""Sequences that are saved and go on in another pager, as if they had never left."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpager.errors import InputError, PoolExhausted, SequenceError
from kvpager.kernels.native import NativeKernel
from kvpager.kernels.reference import ReferenceKernel
from tests.core.fed import SMALL, Fed, text
from tests.memory_store import MemoryStore

PROMPT = text(75)
ANSWERED = PROMPT + text(30, seed=1)  # read one by one, as an answer is written
NEXT = ANSWERED + text(50, seed=2)


def answered(store=None, length=105, **config):
    """A pager and a sequence that has read a prompt and written an answer."""
    fed = Fed(store, **config)
    sequence = fed.open(PROMPT)
    fed.run(sequence, PROMPT)
    fed.run(sequence, ANSWERED[:length], singly=True)
    return fed, sequence


@pytest.mark.parametrize("kernel", [ReferenceKernel, NativeKernel])
@pytest.mark.parametrize("budget", [None, 48])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("length", [96, 97, 103, 104, 105])
def test_a_saved_sequence_goes_on_as_it_would_have(kernel, budget, dtype, length):
    kind = {"kernel": kernel, "budget": budget, "shape": replace(SMALL, dtype=dtype)}
    whole, undisturbed = answered(length=length, **kind)
    wanted = whole.run(undisturbed, NEXT)

    store = MemoryStore()
    fed, sequence = answered(store, length, **kind)
    saved = fed.pager.save(sequence)
    fed.pager.shutdown()
    again = Fed(store.reopened(), **kind)
    restored = again.pager.restore(saved, NEXT)
    again.pager.check()
    assert restored.length == length
    assert restored.tokens == ANSWERED[:length]
    np.testing.assert_array_equal(again.run(restored, NEXT), wanted)
    for layer in range(SMALL.layers):
        again.pager.read(restored, layer)
        whole.pager.read(undisturbed, layer)
    assert again.order(restored) == whole.order(undisturbed)
    assert again.pager.stats().store_lost == 0


def test_what_only_its_own_sequence_goes_on_with_is_found_by_no_prompt():
    store = MemoryStore()
    fed, sequence = answered(store, budget=48)
    assert len(store.shelf.blocks) == 8  # whole tiles of the prompt
    fed.pager.save(sequence)
    assert len(store.shelf.blocks) == 13
    assert fed.open(NEXT).length == 64
    fed.pager.shutdown()
    again = Fed(store.reopened(), budget=48)
    assert again.open(NEXT).length == 64


def test_saved_twice_is_stored_once():
    store = MemoryStore()
    fed, sequence = answered(store, budget=48)
    first = fed.pager.save(sequence)
    puts = store.calls["put"]
    second = fed.pager.save(sequence)
    assert store.calls["put"] == puts
    np.testing.assert_array_equal(first.arrays["keys"], second.arrays["keys"])


@pytest.mark.parametrize("budget", [None, 48])
@pytest.mark.parametrize(("same", "kept"), [(0, 0), (15, 0), (16, 16), (70, 64), (90, 80), (104, 96), (105, 105)])
def test_another_continuation_goes_on_from_the_last_common_tile(budget, same, kept):
    store = MemoryStore()
    fed, sequence = answered(store, budget=budget)
    saved = fed.pager.save(sequence)
    prompt = ANSWERED[:same] + text(40, seed=5)
    restored = fed.pager.restore(saved, prompt)
    assert restored.length == kept
    fed.run(restored, prompt)
    fed.pager.close(restored)
    fed.pager.check()


def test_the_prompts_last_token_is_always_left_to_compute():
    store = MemoryStore()
    fed, sequence = answered(store)
    saved = fed.pager.save(sequence)
    assert fed.pager.restore(saved, ANSWERED).length == 96
    assert fed.pager.restore(saved, [*ANSWERED, 1]).length == 105
    assert fed.pager.restore(saved, ANSWERED[:1]).length == 0
    with pytest.raises(InputError, match="token_ids"):
        fed.pager.restore(saved, [])


@pytest.mark.parametrize(("depth", "kept"), [(0, 0), (1, 0), (2, 16), (9, 64), (12, 96)])
def test_a_block_that_is_gone_cuts_it_short(depth, kept):
    store = MemoryStore()
    fed, sequence = answered(store, budget=48)
    saved = fed.pager.save(sequence)
    fed.pager.shutdown()
    del store.shelf.blocks[saved.arrays["keys"][depth].tobytes()]
    again = Fed(store.reopened(), budget=48)
    restored = again.pager.restore(saved, NEXT)
    assert restored.length == kept
    again.run(restored, NEXT)
    again.pager.check()


def test_a_parked_sequence_can_be_saved():
    store = MemoryStore()
    fed, sequence = answered(store, pool=60)
    expected = fed.pager.save(sequence)
    fed.pager.park(sequence)
    saved = fed.pager.save(sequence)
    for name, array in expected.arrays.items():
        np.testing.assert_array_equal(array, saved.arrays[name])


@pytest.mark.promise(5)
@pytest.mark.parametrize("kernel", [ReferenceKernel, NativeKernel])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("parked", [False, True])
def test_nothing_of_what_others_had_in_its_frames_is_in_a_saved_sequence(kernel, dtype, parked):
    """A frame keeps its bytes until they are written over, and a record outlives what others have erased."""
    saved = []
    for others in (False, True):
        fed = Fed(MemoryStore(), pool=60, kernel=kernel, shape=replace(SMALL, dtype=dtype), prefix_tokens=0)
        if others:
            for seed in range(3):
                sequence = fed.open(text(100, seed), b"others")
                fed.run(sequence, text(100, seed))
                fed.pager.close(sequence)
        sequence = fed.open(PROMPT)
        fed.run(sequence, PROMPT)
        if parked:
            fed.pager.park(sequence)
        saved.append(fed.pager.save(sequence))
    assert len(PROMPT) % 8
    for name in set(saved[0].arrays) - {"open_scores"}:
        np.testing.assert_array_equal(saved[0].arrays[name], saved[1].arrays[name])


def test_what_another_model_saved_is_nothing():
    store = MemoryStore()
    fed, sequence = answered(store)
    saved = fed.pager.save(sequence)
    other = Fed(store.reopened(), namespace="another model")
    assert other.pager.restore(saved, NEXT) is None
    assert fed.pager.restore(replace(saved, header={**saved.header, "format": 1}), NEXT) is None


def test_a_salt_goes_with_a_saved_sequence():
    store = MemoryStore()
    fed = Fed(store)
    sequence = fed.open(PROMPT, b"a")
    fed.run(sequence, PROMPT)
    saved = fed.pager.save(sequence)
    restored = fed.pager.restore(saved, NEXT, b"a")
    assert restored.length == 75
    fed.run(restored, NEXT)
    fed.pager.close(restored)
    assert fed.open(NEXT, b"a").length == 152
    assert fed.open(NEXT, b"").length == 0


def test_what_can_not_be_saved_is_none():
    fed, sequence = answered()
    assert fed.pager.store is None
    assert fed.pager.save(sequence) is None
    fed = Fed(MemoryStore())
    anonymous = fed.pager.open()
    numbers = np.zeros((4, 3, 8), np.float32)
    fed.pager.begin([anonymous], [3])
    for layer in range(2):
        fed.pager.attend_step(layer, numbers, numbers[:2], numbers[:2])
    fed.pager.commit()
    assert fed.pager.save(anonymous) is None
    fed.pager.close(anonymous)
    with pytest.raises(SequenceError, match="closed"):
        fed.pager.save(anonymous)


def test_too_small_a_pool_changes_nothing():
    store = MemoryStore()
    fed, sequence = answered(store)
    saved = fed.pager.save(sequence)
    fed.pager.shutdown()
    small = Fed(store.reopened(), pool=3)
    with pytest.raises(PoolExhausted):
        small.pager.restore(saved, NEXT)
    small.pager.check()
    assert small.pager.stats().sequences == 0


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.booleans(), st.booleans()), min_size=1, max_size=5), st.booleans())
def test_random_turns_are_the_same_with_and_without_restarts(turns, budget):
    """Promise 1 over restarts: a conversation whose server stops between its turns."""
    config = {"budget": 48 if budget else None, "pool": 40}
    whole, store = Fed(**config), MemoryStore()
    fed = Fed(store, **config)
    undisturbed, sequence = whole.open(NEXT), fed.open(NEXT)
    length = 0
    for count, singly, restart in turns:
        length = min(length + count, len(NEXT) - 1)
        wanted = whole.run(undisturbed, NEXT[:length], singly)
        np.testing.assert_array_equal(fed.run(sequence, NEXT[:length], singly), wanted)
        if restart:
            saved = fed.pager.save(sequence)
            fed.pager.shutdown()
            store = store.reopened()
            fed = Fed(store, **config)
            sequence = fed.pager.restore(saved, NEXT)
            assert sequence.length == length
    assert fed.pager.stats().store_lost == 0
