from __future__ import annotations

import threading

import numpy as np
import pytest

from kvpager import KVShape, Pager, PagerConfig, PoolExhausted
from kvpager.config import MODES, POLICIES
from kvpager.errors import InputError, SequenceError, StepError, ThreadError
from tests.core.rig import SMALL, Rig, fingerprint

WINDOWED = KVShape(layers=2, kv_heads=2, query_heads=4, head_dim=8, windows=(20, None))
LENGTHS = [50, 30, 1, 1, 16, 7] + [1] * 20


@pytest.mark.promise(2)
@pytest.mark.parametrize("shape", [SMALL, WINDOWED])
@pytest.mark.parametrize("page_size", [8, 16, 32])
@pytest.mark.parametrize("head_dim", [16, 24, 64, 80, 96, 128])
def test_without_a_budget_the_smallest_pool_equals_dense_attention(shape, page_size, head_dim):
    shape = KVShape(2, 2, 4, head_dim, windows=shape.windows)
    smallest = Pager(shape, PagerConfig(page_size=page_size, tile=32, group_pages=4)).minimum_frames()
    rig = Rig(shape, page_size=page_size, tile=32, pool=smallest)
    sequence = rig.open()
    for count in [70, 33, 1, 1, 32, 1]:
        rig.feed([sequence], [count])
        rig.pager.check()
    assert rig.pager.stats().recalls > 0
    assert all(event.selected[:, event.start // page_size :].all() for event in rig.events)


@pytest.mark.promise(1)
@pytest.mark.parametrize("budget", [None, 40])
@pytest.mark.parametrize("policy", POLICIES)
def test_pool_size_policy_and_swap_never_change_a_bit(policy, budget, tmp_path):
    def run(**config):
        rig = Rig(WINDOWED, budget=budget, policy=policy, **config)
        first, second = rig.open(), rig.open()
        outputs = []
        for count in LENGTHS:
            outputs += rig.feed([first, second], [count, max(1, count // 2)])
        third = rig.fork(first)
        rig.crop(first, 37)
        for count in (3, 1, 20):
            outputs += rig.feed([first, third], [count, 1])
        rig.pager.check()
        return np.concatenate([part.ravel() for layers in outputs for part in layers]), rig.pager.stats()

    smallest = Pager(WINDOWED, PagerConfig(page_size=8, tile=16, group_pages=4)).minimum_frames(3)
    plenty, no_pressure = run(pool=2000)
    assert no_pressure.recalls == 0
    for pool, swap in ((smallest, "memory"), (2 * smallest, "memory"), (smallest, tmp_path / "swap")):
        tight, pressure = run(pool=pool, swap=str(swap))
        assert (tight == plenty).all()
        assert pressure.recalls > 0 or pool > smallest


@pytest.mark.promise(3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("chunk", [64, 16, 5, 1])
def test_replaying_the_masks_densely_gives_the_same_output(mode, policy, chunk):
    rig = Rig(budget=40, mode=mode, policy=policy, pool=200)
    sequence = rig.open()
    done = 0
    while done < 120:
        rig.feed([sequence], [min(chunk, 120 - done)])
        done += min(chunk, 120 - done)
        rig.pager.check()
    assert not all(event.selected.all() for event in rig.events)
    stats = rig.pager.stats()
    assert (stats.discards > 0) == (mode == "discard")
    assert (stats.mass_coverage < 1) == (mode == "recall")
    rig.pager.close(sequence)
    rig.pager.check()
    assert rig.pager.stats().frames_used == 0


def test_the_budget_is_kept_by_every_tile():
    for mode in MODES:
        rig = Rig(budget=40, mode=mode, pool=300)
        seen = []
        rig.pager.observers.append(seen.append)
        sequence = rig.open()
        for count in [100, 16, 1, 1, 40]:
            rig.feed([sequence], [count])
        for event in seen:
            own = event.start // 8
            assert event.selected[:, :own].sum() <= 5 * SMALL.kv_heads
            assert event.selected[:, own:].all()
            assert event.selected[:, : min(1, own)].all()
            assert event.selected[:, max(0, own - 2) :].all()


def test_what_another_sequence_does_never_discards_a_page():
    def alone(others):
        rig = Rig(budget=40, mode="discard", policy="attention", pool=2000)
        sequence = rig.open()
        kept = []
        noise = Rig(seed=9, budget=40, mode="discard")
        for count in [60, 16, 1, 1, 1, 30]:
            if others:
                other = rig.pager.open()
                rig.pager.begin([other], [70])
                for layer in range(2):
                    rig.pager.append(other, layer, noise.random(2, 70), noise.random(2, 70))
                    rig.pager.attend(other, layer, noise.random(4, 70))
                rig.pager.commit()
            kept += rig.feed([sequence], [count])
        return np.concatenate([part.ravel() for layers in kept for part in layers])

    assert (alone(False) == alone(True)).all()


@pytest.mark.promise(3)
def test_forks_share_full_blocks_and_copy_the_open_one():
    rig = Rig(pool=64)
    parent = rig.open()
    rig.feed([parent], [29])
    before = rig.pager.stats().frames_used
    child = rig.fork(parent)
    assert rig.pager.stats().frames_used == before + 4
    rig.feed([parent, child], [5, 9])
    rig.check_reads(parent)
    rig.check_reads(child)
    rig.pager.close(parent)
    rig.check_reads(child)
    rig.pager.check()
    rig.pager.close(child)
    rig.pager.check()
    assert rig.pager.stats().frames_used == 0


@pytest.mark.promise(3)
@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 23, 24, 28, 29])
def test_cropping_into_a_shared_block_leaves_the_other_sequence_alone(length):
    rig = Rig(pool=28)
    parent = rig.open()
    rig.feed([parent], [29])
    child = rig.fork(parent)
    rig.crop(parent, length)
    assert parent.length == length
    rig.pager.check()
    if length:
        rig.check_reads(parent)
    rig.check_reads(child)
    rig.feed([parent, child], [10, 3])
    rig.check_reads(parent)
    rig.check_reads(child)
    rig.pager.check()


def held(pager, sequence):
    """All that a sequence holds, scores among them, and the clock."""
    pages = [pager.scores(sequence, layer) for layer in range(2)]
    contents = [] if pager.config.mode == "discard" else [pager.read(sequence, layer) for layer in range(2)]
    state = pager._state
    parts = [
        pages,
        [array.tobytes() for pair in contents for array in pair],
        sequence.view is not None and sequence.view.tolist(),
        [sequence.length, sequence.rows.tolist(), sequence.filled.tolist(), sequence.tokens, sequence.tick],
        [state.residency.clock.tick, state.pool.free_count, sum(state.blocks.references)],
        [state.table.sealed[sequence.rows].tolist(), pager.page_table(sequence).tolist()],
    ]
    return [sorted(map(str, part)) if part is pages else part for part in parts]


@pytest.mark.promise(3)
@pytest.mark.parametrize("mode", MODES)
def test_a_rollback_leaves_everything_as_before(mode):
    rig = Rig(budget=40, mode=mode, pool=400)
    sequence = rig.open()
    rig.feed([sequence], [61])
    rig.feed([sequence], [1])
    before = held(rig.pager, sequence)
    rig.feed([sequence], [37], commit=False)
    assert held(rig.pager, sequence) == before
    rig.pager.check()
    again = Rig(budget=40, mode=mode, pool=400)
    same = again.open()
    again.feed([same], [61])
    again.feed([same], [1])
    rig.rng, again.rng = np.random.default_rng(5), np.random.default_rng(5)
    for one, other in zip(rig.feed([sequence], [20])[0], again.feed([same], [20])[0], strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_new_step_rolls_back_the_one_left_open():
    rig = Rig()
    sequence = rig.open()
    rig.feed([sequence], [20])
    rig.pager.begin([sequence], [9])
    rig.pager.append(sequence, 0, rig.random(2, 9), rig.random(2, 9))
    rig.feed([sequence], [3])
    assert sequence.length == 23
    rig.check_reads(sequence)
    rig.pager.check()


def test_a_sequence_whose_dropped_pages_were_given_up_is_closed_by_a_rollback():
    tight = Pager(SMALL, PagerConfig(pool=1, page_size=8, tile=16, budget=40, mode="discard")).minimum_frames()
    rig = Rig(budget=40, mode="discard", pool=tight + 8)
    sequence = rig.open()
    for _ in range(6):
        rig.feed([sequence], [16])
    rig.feed([sequence], [48], commit=False)
    assert sequence.closed
    rig.pager.check()


def test_each_call_outside_a_step_is_its_own():
    rig = Rig()
    sequence = rig.pager.open()
    keys, values = rig.random(2, 11), rig.random(2, 11)
    rig.pager.append(sequence, 0, keys, values)
    assert sequence.length == 0
    rig.pager.append(sequence, 1, keys, values)
    assert sequence.length == 11
    queries = rig.random(4, 3)
    result = rig.pager.attend(sequence, 0, queries)
    rig.compare(0, queries, (keys, values), result)
    rig.pager.check()


def test_the_lowest_ranked_page_is_the_one_evicted_next():
    rig = Rig(KVShape(1, 2, 4, 8), pool=14, policy="attention", grace=1)
    sequence = rig.open()
    rig.feed([sequence], [39])
    rig.feed([sequence], [1])
    ranked = [page for page in rig.pager.scores(sequence, 0) if page.evict_rank is not None]
    assert [page.evict_rank for page in ranked] == list(range(len(ranked)))
    free = rig.pager.stats().frames - rig.pager.stats().frames_used
    needed = 2 * 3 - free  # three more blocks of two heads
    rig.pager.append(sequence, 0, rig.random(2, 24), rig.random(2, 24))
    gone = {(page.block, page.kv_head) for page in ranked[:needed]}
    table = rig.pager.page_table(sequence)[:5, 0]
    assert {(block, head) for block, head in zip(*np.nonzero(table == -1), strict=True)} == gone


@pytest.mark.promise(3)
def test_a_prompt_seen_before_shares_its_full_blocks():
    rig = Rig(prefix_tokens=200)
    prompt = list(range(100, 140))
    first = rig.open(prompt)
    assert first.length == 0
    rig.feed([first], [40])
    second = rig.pager.open(prompt)
    assert second.length == 32  # the last token is always left to compute
    np.testing.assert_array_equal(rig.pager.read(second, 1)[0], rig.truth[first.id][1][0][:, :32])
    rig.pager.close(first)
    rig.pager.close(second)
    rig.pager.check()
    assert rig.pager.stats().cached_blocks == 5
    other = rig.pager.open([100, *range(500, 540)])
    assert other.length == 0
    third = rig.pager.open([*prompt[:20], 7, 7, 7, 7, 7])
    assert third.length == 16
    assert rig.pager.stats().prefix_tokens_hit == 48


def test_blocks_written_under_a_selection_are_found_only_at_tile_boundaries():
    rig = Rig(budget=32, tile=16, prefix_tokens=400)
    prompt = list(range(90))
    first = rig.open(prompt)
    rig.feed([first], [90])
    second = rig.pager.open(prompt)
    assert second.length == 80
    rig.feed([first], [1], token_ids=[[5]])
    third = rig.pager.open([*prompt, 5, 6, 7, 8, 9, 10])
    assert third.length == 80  # what was written while decoding stays private


def test_reuse_of_rows_never_serves_foreign_blocks():
    rng = np.random.default_rng(3)
    rig = Rig(pool=32, prefix_tokens=64)
    kept = {}
    for _ in range(50):
        name = int(rng.integers(0, 3))
        prompt = [name * 100 + position for position in range(48)]
        sequence = rig.pager.open(prompt)
        if sequence.length:
            np.testing.assert_array_equal(rig.pager.read(sequence, 0)[0], kept[name][:, : sequence.length])
        left = 48 - sequence.length
        keys = rig.random(2, left)
        rig.pager.begin([sequence], [left])
        for layer in range(2):
            rig.pager.append(sequence, layer, keys, keys)
        rig.pager.commit()
        kept[name] = rig.pager.read(sequence, 0)[0]
        rig.pager.close(sequence)
        rig.pager.check()
    assert rig.pager.stats().prefix_tokens_hit > 0


@pytest.mark.promise(7)
def test_memory_is_told_whole():
    rig = Rig(budget=40, pool=36)
    sequence = rig.open()
    rig.feed([sequence], [200])
    stats = rig.pager.stats()
    state = rig.pager._state
    assert stats.pool_bytes == 36 * SMALL.page_bytes(8) == state.residency.storage.nbytes
    assert stats.resident_bytes == stats.pool_bytes + stats.digest_bytes + stats.table_bytes
    assert stats.digest_bytes >= 25 * 4 * state.digest.page_bytes
    tables = [state.table.frame, state.table.slot, state.scorer._pages["last_used"], state.pool.owner]
    assert stats.table_bytes >= sum(array.nbytes for array in tables)
    assert stats.full_kv_bytes == 200 * 2 * 2 * 2 * 8 * 4
    assert stats.swap_bytes >= stats.swap_writes * SMALL.page_bytes(8) > 0
    assert stats.peak_rss_bytes > 2**20


@pytest.mark.promise(7)
@pytest.mark.parametrize("mode", MODES)
def test_a_memory_bound_holds_to_the_last_token(mode):
    bound = 120_000
    config = PagerConfig(memory=bound, max_tokens=400, page_size=8, tile=16, group_pages=4, budget=40, mode=mode)
    pager = Pager(SMALL, config)
    rig = Rig()
    sequence = pager.open(list(range(400)))
    for _ in range(25):
        pager.begin([sequence], [16])
        for layer in range(2):
            pager.append(sequence, layer, rig.random(2, 16), rig.random(2, 16))
            pager.attend(sequence, layer, rig.random(4, 16))
        pager.commit()
        assert pager.stats().resident_bytes <= bound
    assert pager.stats().resident_bytes > 0.9 * bound
    with pytest.raises(PoolExhausted, match="401 tokens would be held and max_tokens is 400"):
        pager.begin([sequence], [1])


@pytest.mark.promise(6)
def test_a_pool_below_the_smallest_is_refused_with_the_number_needed():
    rig = Rig(pool=11)
    sequence = rig.open()
    rig.feed([sequence], [3])
    before = fingerprint(rig.pager)
    with pytest.raises(PoolExhausted, match=r"needs 12 frames .* and the pool has 11"):
        rig.feed([sequence], [30])
    assert fingerprint(rig.pager) == before
    assert issubclass(PoolExhausted, RuntimeError)


@pytest.mark.promise(6)
def test_calls_out_of_order_are_refused():
    rig = Rig()
    sequence, other = rig.open(), rig.open()
    with pytest.raises(StepError, match="no step is open"):
        rig.pager.commit()
    rig.pager.begin([sequence], [4])
    with pytest.raises(StepError, match="append first"):
        rig.pager.attend(sequence, 0, rig.random(4, 4))
    with pytest.raises(StepError, match="not part of the open step"):
        rig.pager.append(other, 0, rig.random(2, 4), rig.random(2, 4))
    with pytest.raises(InputError, match="begun with 4"):
        rig.pager.append(sequence, 0, rig.random(2, 3), rig.random(2, 3))
    rig.pager.append(sequence, 0, rig.random(2, 4), rig.random(2, 4))
    with pytest.raises(StepError, match="has had its keys"):
        rig.pager.append(sequence, 0, rig.random(2, 4), rig.random(2, 4))
    with pytest.raises(StepError, match=r"layers \[1\]"):
        rig.pager.commit()
    rig.pager.append(sequence, 1, rig.random(2, 4), rig.random(2, 4))
    rig.pager.commit()
    assert sequence.length == 4


@pytest.mark.promise(6)
def test_another_thread_is_refused_until_it_adopts_the_pager():
    rig = Rig()
    sequence = rig.open()
    caught = []

    def intrude(adopt):
        try:
            if adopt:
                rig.pager.adopt()
            rig.pager.append(sequence, 0, rig.random(2, 3), rig.random(2, 3))
        except ThreadError as error:
            caught.append(str(error))

    def run(adopt):
        thread = threading.Thread(target=intrude, args=(adopt,))
        thread.start()
        thread.join()

    run(False)
    assert "belongs to another thread" in caught[0]
    rig.pager.begin([sequence], [2])
    run(True)
    assert "a step is open in another thread" in caught[1]
    rig.pager.rollback()
    run(True)
    assert len(caught) == 2


def test_after_shutdown_nothing_works_and_swap_is_gone(tmp_path):
    rig = Rig(pool=14, swap=str(tmp_path))
    sequence = rig.open()
    rig.feed([sequence], [60])
    rig.pager.shutdown()
    rig.pager.shutdown()
    assert not list(tmp_path.iterdir())
    with pytest.raises(SequenceError, match="shut down"):
        rig.pager.open()
    with pytest.raises(SequenceError, match="shut down"):
        rig.pager.fork(sequence)
    rig.pager.close(sequence)  # harmless
    assert sequence.closed


@pytest.mark.promise(7)
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_digests_and_tables_of_a_real_shape_are_small(share):
    shape = KVShape(layers=30, kv_heads=3, query_heads=9, head_dim=64, dtype="bfloat16")
    tokens = 1920
    pool = int(tokens // 16 * 90 * share)
    pager = Pager(shape, PagerConfig(pool=pool, budget=480))
    sequence = pager.open(range(tokens))
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((3, tokens, 64)).astype(np.float32)
    pager.begin([sequence], [tokens])
    for layer in range(30):
        pager.append(sequence, layer, keys, keys)
    pager.commit()
    stats = pager.stats()
    assert stats.full_kv_bytes == tokens * 23_040
    assert stats.digest_bytes <= 0.10 * stats.full_kv_bytes
    assert stats.table_bytes <= 0.01 * stats.full_kv_bytes
