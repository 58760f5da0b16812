"""Many pages at once: what fits, pages wanted twice, and what a failure leaves."""

from __future__ import annotations

import numpy as np
import pytest

from kvpager import KVShape, Pager, PagerConfig
from kvpager.config import POLICIES
from kvpager.core.pagetable import ABSENT
from kvpager.errors import PageLost, PoolExhausted
from kvpager.kernels.native import NativeKernel
from kvpager.kernels.reference import ReferenceKernel

SHAPE = KVShape(layers=3, kv_heads=2, query_heads=2, head_dim=8, dtype="bfloat16")


def pressed(kernel=NativeKernel, pool=60, policy="attention", tokens=100):
    """A pager of which most pages are in swap, its sequences, and their keys [3 sequences][heads, tokens, dim]."""
    pager = Pager(SHAPE, PagerConfig(pool=pool, page_size=8, tile=16, group_pages=4, policy=policy), kernel=kernel())
    rng = np.random.default_rng(0)
    sequences, keys = [pager.open() for _ in range(3)], []
    for sequence in sequences:
        keys.append(rng.integers(-100, 100, (2, tokens, 8)).astype(np.float32))
        pager.begin([sequence], [tokens])
        for layer in range(SHAPE.layers):
            pager.append(sequence, layer, keys[-1], -keys[-1])
        pager.commit()
    return pager, sequences, keys


def places(pager, sequences, layer, blocks):
    """Flat indices of both heads' pages of the first blocks of all sequences."""
    rows = np.concatenate([sequence.rows[:blocks] for sequence in sequences])
    return pager._state.table.flat(np.repeat(rows, 2), layer, np.tile(np.arange(2), len(rows)))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kernel", [NativeKernel, ReferenceKernel])
def test_all_that_there_is_room_for_comes_in_together(kernel, policy):
    pager, sequences, keys = pressed(kernel, policy=policy)
    residency = pager._state.residency
    for layer in range(SHAPE.layers):
        assert pager._state.pool.room == 60 - 3 * 6  # an open page of each sequence, layer and head
        flat = places(pager, sequences, layer, 7)
        assert len(flat) == pager._state.pool.room
        frames, absent = residency.fault(flat)
        assert len(np.unique(frames)) == len(frames)
        assert len(absent) > 20
        found, negative = residency.storage.read(frames)
        wanted = np.concatenate([one[:, :56].reshape(2, 7, 8, 8).swapaxes(0, 1).reshape(14, 8, 8) for one in keys])
        assert np.array_equal(found, wanted)
        assert np.array_equal(negative, -wanted)
        pager.check()


def test_one_page_more_than_there_is_room_for_is_refused():
    pager, sequences, _ = pressed()
    flat = places(pager, sequences, 1, 8)[: pager._state.pool.room + 1]
    recalls = pager.stats().recalls
    with pytest.raises(PoolExhausted, match="larger pool"):
        pager._state.residency.fault(flat)
    assert pager.stats().recalls == recalls
    pager.check()


def test_a_page_that_is_wanted_twice_comes_once():
    pager, sequences, _ = pressed()
    residency = pager._state.residency
    flat = places(pager, sequences[:1], 0, 5)
    flat = np.concatenate([flat, flat[::-1], flat[3:5]])
    before = pager.stats().recalls
    frames, absent = residency.fault(flat)
    assert np.array_equal(frames[:10], frames[19:9:-1])
    assert np.array_equal(frames[20:], frames[3:5])
    assert pager.stats().recalls - before == len(np.unique(flat[absent]))
    assert len(absent) > pager.stats().recalls - before > 0
    pager.check()


def test_pages_in_the_pool_are_not_taken_for_others_of_the_same_call():
    pager, sequences, _ = pressed(policy="lru")
    residency = pager._state.residency
    first = places(pager, sequences, 0, 3)
    residency.fault(first)
    both = np.concatenate([first, places(pager, sequences, 2, 4)])
    frames, _ = residency.fault(both)
    assert np.array_equal(pager._state.table.frame.reshape(-1)[both], frames)
    assert (frames != ABSENT).all()


def test_frames_go_back_where_a_page_of_many_is_lost():
    pager, sequences, _ = pressed(tokens=200)
    residency, table = pager._state.residency, pager._state.table
    flat = places(pager, sequences, 1, 6)
    slots = table.slot.reshape(-1)[flat[table.frame.reshape(-1)[flat] == ABSENT]]
    pager._state.swap._slabs.arrays[0][slots[-1], 7] ^= 32
    before, used = pager.stats(), pager.stats().frames_used
    for _ in range(3):
        with pytest.raises(PageLost, match=f"{slots[-1]}"):
            residency.fault(flat)
        pager.check()
    assert pager.stats().recalls == before.recalls
    assert pager.stats().frames_used < used
    assert pager.stats().frames_used + pager._state.pool.free_count == pager.stats().frames


@pytest.mark.parametrize("policy", POLICIES)
def test_small_faults_share_one_scoring_and_take_no_page_twice(policy, monkeypatch):
    pager, sequences, _ = pressed(pool=150, policy=policy, tokens=230)
    residency = pager._state.residency
    scored = []
    scores = residency._victims._scores
    monkeypatch.setattr(residency._victims, "_scores", lambda frames: scored.append(len(frames)) or scores(frames))
    residency.clock.layer = 1
    for begin in range(0, 64, 2):
        before = pager.stats().evictions
        flat = places(pager, sequences, 1, 28)[begin : begin + 2]
        frames, absent = residency.fault(flat)
        assert np.array_equal(pager._state.pool.owner[frames], flat)
        assert pager.stats().evictions - before <= len(absent)
    pager.check()
    assert 0 < len(scored) <= 8  # an eighth of 130 pages serves eight faults of two
