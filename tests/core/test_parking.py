"""Parking: a sequence gives up its frames and goes on later as if nothing had happened."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpager import KVShape, PageLost, Pager, PagerConfig
from kvpager.config import POLICIES
from kvpager.core.pagetable import ABSENT
from kvpager.errors import ConfigError, PoolExhausted, SequenceError, SwapError, SwapFull
from kvpager.kernels.native import NativeKernel
from kvpager.kernels.reference import ReferenceKernel
from kvpager.swap import MemorySwap
from tests.core.rig import SMALL, Rig, fingerprint

SEQUENCES = 3
SETTINGS = {"page_size": 8, "tile": 16, "group_pages": 4}

events = st.lists(
    st.tuples(
        st.sampled_from(["step", "step", "step", "park", "unpark", "look", "crop", "fork"]),
        st.integers(0, SEQUENCES - 1),
        st.integers(1, 20),
    ),
    min_size=4,
    max_size=16,
)


def answers(history, parks, shape=SMALL, kernel=ReferenceKernel, **config):
    """All that a history of (what, sequence, number) gives; without parking where `parks` is False."""
    pager = Pager(shape, PagerConfig(**SETTINGS, **config), kernel=kernel())
    rng = np.random.default_rng(3)
    sequences = [pager.open() for _ in range(SEQUENCES)]
    found = []
    for what, index, number in [("step", 0, 30), ("step", 1, 13), ("step", 2, 40), *history]:
        sequence = sequences[index]
        if what == "park":
            if parks:
                pager.park(sequence)
                pager.check()
            continue
        pager.unpark(sequence)
        if what == "step":
            pager.begin([sequence], [number])
            for layer in range(shape.layers):
                numbers = rng.standard_normal((3, shape.query_heads, number, shape.head_dim)).astype(np.float32)
                pager.append(sequence, layer, numbers[0, : shape.kv_heads], numbers[1, : shape.kv_heads])
                found.append(pager.attend(sequence, layer, numbers[2]).output)
            pager.commit()
        elif what == "look" and sequence.length:
            queries = rng.standard_normal((shape.query_heads, 1, shape.head_dim)).astype(np.float32)
            found.append(pager.attend(sequence, 1, queries).output)
        elif what == "crop":
            pager.crop(sequence, max(1, sequence.length - number))
        elif what == "fork":
            pager.close(sequences[(index + 1) % SEQUENCES])
            sequences[(index + 1) % SEQUENCES] = pager.fork(sequence)
        pager.check()
    for sequence in sequences:
        pager.unpark(sequence)
        found += pager.read(sequence, 0)
        pager.close(sequence)
    pager.check()
    assert pager.stats().frames_used == pager._state.swap.used == 0
    pager.shutdown()
    return found


def same(found, wanted):
    return len(found) == len(wanted) and all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.promise(1)
@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=6, deadline=None)
@given(history=events, budget=st.sampled_from([None, 32]), pool=st.sampled_from([28, 36, 200]))
def test_answers_are_the_same_with_and_without_parking(policy, history, budget, pool):
    wanted = answers(history, False, pool=200, budget=budget)
    assert same(answers(history, True, pool=pool, budget=budget, policy=policy), wanted)


@pytest.mark.promise(1)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("kernel", [ReferenceKernel, NativeKernel])
@settings(max_examples=10, deadline=None)
@given(history=events)
def test_open_pages_keep_their_bits_in_every_dtype(kernel, dtype, history):
    shape = KVShape(layers=2, kv_heads=2, query_heads=4, head_dim=8, dtype=dtype)
    wanted = answers(history, False, shape, kernel, pool=200)
    assert same(answers(history, True, shape, kernel, pool=28), wanted)


@pytest.mark.parametrize("kernel", [ReferenceKernel, NativeKernel])
def test_an_int8_page_that_was_cut_is_attended_to_as_codes_after_parking_too(kernel):
    shape = KVShape(layers=2, kv_heads=2, query_heads=4, head_dim=8, dtype="int8")
    history = [("crop", 2, 5), ("park", 2, 1), ("look", 2, 1), ("step", 2, 1), ("park", 2, 1), ("step", 2, 9)]
    wanted = answers(history, False, shape, kernel, pool=200)
    assert same(answers(history, True, shape, kernel, pool=28), wanted)


def test_parked_pages_leave_the_pool_and_come_back_when_wanted():
    rig = Rig(pool=64)
    one, two = rig.open(), rig.open()
    rig.feed([one, two], [21, 16])
    before = rig.pager.stats()
    rig.pager.park(one)
    stats = rig.pager.stats()
    assert one.parked
    assert not two.parked
    assert "parked" in repr(one)
    assert (rig.pager.page_table(one) == ABSENT).all()
    assert before.frames_used - stats.frames_used == 3 * 4
    assert stats.parked_sequences == 1
    assert stats.parked_bytes == 3 * 4 * SMALL.page_bytes(8)
    rig.pager.park(one)  # again: nothing to do
    rig.feed([two], [3])
    rig.pager.unpark(one)
    table = rig.pager.page_table(one)
    assert (table[2] != ABSENT).all()
    assert (table[:2] == ABSENT).all()
    assert rig.pager.stats().parked_sequences == rig.pager.stats().parked_bytes == 0
    rig.feed([one, two], [8, 8])
    rig.check_reads(one)
    rig.pager.unpark(one)
    rig.pager.check()


def test_pages_that_a_running_sequence_shares_stay_until_it_parks_too():
    rig = Rig(pool=64)
    one = rig.open()
    rig.feed([one], [20])
    two = rig.fork(one)
    rig.pager.park(one)
    assert (rig.pager.page_table(two) != ABSENT).all()
    rig.pager.check()
    rig.pager.park(two)
    assert rig.pager.stats().frames_used == 0
    assert rig.pager.stats().parked_bytes == (2 + 2) * 4 * SMALL.page_bytes(8)
    rig.pager.unpark(two)
    rig.feed([two], [9])
    rig.pager.close(one)
    rig.check_reads(two)
    rig.pager.check()


def test_what_is_parked_needs_no_frames_and_more_sequences_fit():
    smallest = Pager(SMALL, PagerConfig(pool=1, **SETTINGS)).minimum_frames(2)
    rig = Rig(pool=smallest)
    sequences = []
    for _ in range(6):
        sequence = rig.open()
        rig.feed([sequence], [20])
        rig.pager.park(sequence)
        sequences.append(sequence)
    rig.pager.check()
    first, second, third = sequences[:3]
    block = SMALL.layers * SMALL.kv_heads
    group = rig.pager.step_frames({})
    assert rig.pager.step_frames({first: 0}) == block + group + 4  # its pages fill a whole group
    assert rig.pager.step_frames({first: 5, second: 0}) == 3 * block + 4
    for sequence in (first, second):
        rig.pager.unpark(sequence)
    rig.feed([first, second], [3, 6])
    for sequence in (third, sequences[3]):
        rig.pager.unpark(sequence)  # four open blocks and a group are the smallest pool for two that grow
    before = fingerprint(rig.pager)
    with pytest.raises(PoolExhausted, match="parked"):
        rig.pager.unpark(sequences[4])
    assert sequences[4].parked
    assert fingerprint(rig.pager) == before
    rig.check_reads(first)
    rig.pager.check()


def test_calls_with_a_parked_sequence_say_that_it_is_parked():
    rig = Rig(pool=64)
    one, two = rig.open(), rig.open()
    rig.feed([one, two], [20, 5])
    rig.pager.park(one)
    keys, queries = rig.random(2, 3), rig.random(4, 3)
    before = fingerprint(rig.pager)
    calls = [
        lambda: rig.pager.begin([two, one], [1, 1]),
        lambda: rig.pager.append(one, 0, keys, keys),
        lambda: rig.pager.attend(one, 0, queries),
        lambda: rig.pager.fork(one),
        lambda: rig.pager.crop(one, 5),
        lambda: rig.pager.read(one, 0),
    ]
    for call in calls:
        with pytest.raises(SequenceError, match=r"is parked; unpark it first"):
            call()
    assert fingerprint(rig.pager) == before
    rig.pager.close(one)
    rig.pager.check()
    assert rig.pager._state.swap.used == 0
    with pytest.raises(SequenceError, match="closed"):
        rig.pager.park(one)


def test_parking_rolls_back_an_open_step():
    rig = Rig(pool=64)
    sequence = rig.open()
    rig.feed([sequence], [20])
    rig.pager.begin([sequence], [9])
    rig.pager.append(sequence, 0, rig.random(2, 9), rig.random(2, 9))
    rig.pager.park(sequence)
    assert sequence.length == 20
    rig.pager.check()
    rig.pager.unpark(sequence)
    rig.check_reads(sequence)
    rig.feed([sequence], [9])


def test_discard_mode_refuses_to_park():
    pager = Pager(SMALL, PagerConfig(pool=200, mode="discard", budget=32, **SETTINGS))
    sequence = pager.open()
    with pytest.raises(ConfigError, match="discard"):
        pager.park(sequence)


class FailingSwap(MemorySwap):
    left = None  # writes that still succeed
    lose = False

    def write(self, pages, rows=None):
        if self.left is not None:
            if not self.left:
                raise SwapError("the disk is on fire")
            self.left -= 1
        return super().write(pages, rows)

    def read(self, slots, into=None, rows=None):
        if self.lose:
            raise PageLost(f"slot {int(slots[0])}: gone")
        return super().read(slots, into, rows)


@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_swap_that_fails_while_parking_changes_nothing(left, monkeypatch):
    monkeypatch.setattr("kvpager.core.residency.WRITE_BATCH", 3)
    place = FailingSwap(SMALL.page_bytes(8), 2**20)
    rig = Rig(pool=64)
    rig.pager = Pager(SMALL, rig.pager.config, swap=place)
    rig.pager.observers.append(rig.events.append)
    sequence = rig.open()
    rig.feed([sequence], [30])
    before = fingerprint(rig.pager)
    place.left = left
    with pytest.raises(SwapError, match="on fire"):
        rig.pager.park(sequence)
    after = fingerprint(rig.pager)
    grown = {"swap_bytes": 0, "table_bytes": 0, "resident_bytes": 0}  # slabs that were added for it stay
    assert after[-1] | grown == before[-1] | grown
    assert after[:-1] == before[:-1]
    rig.pager.check()
    place.left = None
    rig.pager.park(sequence)
    place.lose = True
    before = fingerprint(rig.pager)
    with pytest.raises(PageLost, match="gone"):
        rig.pager.unpark(sequence)
    assert fingerprint(rig.pager) == before
    place.lose = False
    rig.pager.unpark(sequence)
    rig.check_reads(sequence)


def test_a_full_swap_lets_go_of_what_is_only_kept_for_reuse_before_it_refuses_to_park():
    rig = Rig(pool=64, prefix_tokens=64, swap_limit=20 * SMALL.page_bytes(8))
    first = rig.open(range(33))
    rig.feed([first], [33], token_ids=[list(range(33))])
    rig.pager.park(first)
    rig.pager.close(first)
    assert rig.pager.stats().cached_blocks == 4
    second = rig.open(range(100, 120))
    rig.feed([second], [20], token_ids=[list(range(100, 120))])
    rig.pager.park(second)
    assert rig.pager.stats().cached_blocks < 4
    third = rig.open()
    rig.feed([third], [30])
    with pytest.raises(SwapFull):
        rig.pager.park(third)
    assert not third.parked
    rig.check_reads(third)
    rig.pager.check()
