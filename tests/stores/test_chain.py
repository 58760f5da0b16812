"""The chain over a tier in memory, where all goes well."""

from collections.abc import Sequence

import pytest

from kvpager.stored import BlockStore, Scores
from tests.stores.chain_rig import MINE, SIZE, Make, same
from tests.stores.fake import NOBODY, SETTLED, FakeTier, Gate, block, key_of


def test_it_is_a_store_of_blocks(make: Make) -> None:
    store: BlockStore = make()
    assert store.tick == 0


def test_what_is_put_is_found_before_and_after_it_is_written(make: Make, tier: FakeTier) -> None:
    chain = make()
    gate = Gate(tier, "put")
    blocks = [block(i) for i in range(3)]
    keys = [held.head.key for held in blocks]
    assert chain.put(blocks) == 3
    assert gate.reached.wait(SETTLED)
    assert tier.blocks == {}
    for written in (False, True):
        assert chain.contains([*keys, key_of(9)]) == [True, True, True, False]
        assert chain.heads([*keys, key_of(9)]) == [*(held.head for held in blocks), None]
        assert same(chain.get([*keys, key_of(9)]), [*blocks, None])
        if not written:
            stats = chain.stats()
            assert (stats.waiting, stats.waiting_bytes, stats.stored) == (3, 3 * SIZE, 0)
            gate.open()
            assert chain.flush(SETTLED)
    stats = chain.stats()
    assert (stats.waiting, stats.waiting_bytes, stats.stored, stats.stored_bytes) == (0, 0, 3, 3 * 128)
    assert (stats.blocks, stats.payload_bytes, stats.limit_bytes) == (3, 3 * 128, 10**9)
    assert (stats.hits, stats.misses, stats.read_bytes) == (6, 4, 6 * 128)
    assert (stats.state, stats.errors, stats.skipped) == ("ok", {}, 0)


def test_a_record_is_written_after_the_blocks_that_came_before_it(make: Make, tier: FakeTier) -> None:
    chain = make(batch_bytes=2 * SIZE)
    gate = Gate(tier, "put")
    chain.put([block(i) for i in range(5)])
    assert chain.save_record(key_of(100), MINE, b"record")
    chain.put([block(5)])
    assert chain.load_record(key_of(100)) == b"record"
    gate.open()
    assert chain.flush(SETTLED)
    assert [key for _, key in tier.log] == [key_of(i) for i in (0, 1, 2, 3, 4, 100, 5)]
    assert max(tier.batches) == 2
    assert chain.load_record(key_of(100)) == b"record"
    assert chain.load_record(key_of(101)) is None


def test_a_newer_record_is_read_while_the_older_one_is_being_written(make: Make, tier: FakeTier) -> None:
    chain = make()
    gate = Gate(tier, "save_record")
    chain.save_record(key_of(1), MINE, b"older")
    assert gate.reached.wait(SETTLED)
    chain.save_record(key_of(1), MINE, b"newer")
    assert chain.load_record(key_of(1)) == b"newer"
    gate.open()
    assert chain.flush(SETTLED)
    assert chain.load_record(key_of(1)) == b"newer"
    chain.drop_record(key_of(1))
    assert chain.load_record(key_of(1)) is None
    assert chain.flush(SETTLED)
    assert tier.records == {}


def test_a_record_that_is_dropped_while_it_is_written_is_gone_then(make: Make, tier: FakeTier) -> None:
    chain = make()
    gate = Gate(tier, "save_record")
    chain.save_record(key_of(1), MINE, b"one")
    assert gate.reached.wait(SETTLED)
    chain.drop_record(key_of(1))
    assert chain.load_record(key_of(1)) is None
    gate.open()
    assert chain.flush(SETTLED)
    assert tier.records == {}
    assert chain.stats().waiting_bytes == 0


def test_what_is_there_or_waits_counts_as_taken_and_is_not_written_again(make: Make, tier: FakeTier) -> None:
    chain = make()
    chain.put([block(1)])
    assert chain.flush(SETTLED)
    gate = Gate(tier, "put")
    assert chain.put([block(1), block(2), block(1), block(2)]) == 4
    assert chain.put([block(2)]) == 1
    gate.open()
    assert chain.flush(SETTLED)
    assert [key for _, key in tier.log] == [key_of(1), key_of(2)]
    assert chain.stats().stored == 2


def test_no_more_is_taken_than_there_is_room_for(make: Make, tier: FakeTier) -> None:
    chain = make(waiting_bytes=3 * SIZE + 1, batch_bytes=SIZE)
    gate = Gate(tier, "put")
    assert chain.room == 3 * SIZE + 1
    assert chain.put([block(i) for i in range(5)]) == 3
    assert chain.room == 1
    assert chain.put([block(0), block(3)]) == 1  # there already; no room
    assert not chain.contains([key_of(3)])[0]
    gate.open()
    assert chain.flush(SETTLED)
    assert chain.put([block(3), block(4)]) == 2


def test_a_block_larger_than_all_the_room_is_taken_alone(make: Make) -> None:
    chain = make(waiting_bytes=10)
    assert chain.put([block(1)]) == 1
    assert chain.flush(SETTLED)
    assert chain.stats().stored == 1


def test_records_have_some_room_of_their_own(make: Make, tier: FakeTier) -> None:
    chain = make(waiting_bytes=1000)
    gate = Gate(tier, "put")
    chain.put([block(i) for i in range(20)])
    assert chain.room < SIZE
    assert chain.save_record(key_of(100), MINE, bytes(200))
    assert not chain.save_record(key_of(101), MINE, bytes(200))
    gate.open()


def test_scores_are_seen_at_once_and_hits_add_up(make: Make, tier: FakeTier) -> None:
    chain = make()
    chain.put([block(1)])
    assert chain.flush(SETTLED)
    gate = Gate(tier, "put")
    chain.put([block(2)])
    assert gate.reached.wait(SETTLED)
    for hits, tick in ((1, 7), (2, 9)):
        chain.update([Scores(key_of(i), bytes([tick]), hits) for i in (1, 2, 3)], tick)
    assert chain.tick == 9
    for written in (False, True):
        one, two, three = chain.heads([key_of(1), key_of(2), key_of(3)])
        assert one is not None
        assert two is not None
        assert three is None
        assert (one.scores, one.hits, two.scores, two.hits) == (b"\x09", 3, b"\x09", 3)
        if not written:
            gate.open()
            assert chain.flush(SETTLED)
    assert tier.tick == 9
    assert tier.blocks[key_of(2)].head.hits == 3


def test_scores_of_a_block_that_waits_are_written_with_it(make: Make, tier: FakeTier) -> None:
    chain = make()
    gate = Gate(tier, "put")
    chain.put([block(1)])
    assert gate.reached.wait(SETTLED)
    chain.put([block(2)])
    chain.update([Scores(key_of(2), b"new", 5)], 3)
    gate.open()
    assert chain.flush(SETTLED)
    assert (tier.blocks[key_of(2)].head.scores, tier.blocks[key_of(2)].head.hits) == (b"new", 5)


def test_many_scores_do_not_wait_for_all_blocks(make: Make, tier: FakeTier) -> None:
    chain = make(batch_bytes=SIZE)
    gate = Gate(tier, "put")
    chain.put([block(i) for i in range(3)])
    assert gate.reached.wait(SETTLED)
    chain.update([Scores(key_of(i), b"new", 1) for i in range(100, 1200)], 3)
    gate.open()
    assert chain.flush(SETTLED)
    assert tier.calls.index("update") < len(tier.calls) - 1 - tier.calls[::-1].index("put")


@pytest.mark.parametrize("when", ["waiting", "writing", "written"])
def test_what_is_dropped_is_gone_at_once_and_can_be_put_again(make: Make, tier: FakeTier, when: str) -> None:
    chain = make()
    gate = Gate(tier, "put")
    if when == "waiting":
        chain.put([block(0)])
        assert gate.reached.wait(SETTLED)
    chain.put([block(1), block(2)])
    if when == "writing":
        assert gate.reached.wait(SETTLED)
    if when == "written":
        gate.open()
        assert chain.flush(SETTLED)
    chain.drop([key_of(1)])
    assert chain.contains([key_of(1), key_of(2)]) == [False, True]
    assert chain.heads([key_of(1)]) == [None]
    assert chain.get([key_of(1)]) == [None]
    gate.open()
    assert chain.flush(SETTLED)
    assert set(tier.blocks) == {key_of(2)} | ({key_of(0)} if when == "waiting" else set())
    chain.put([block(1)])
    assert same(chain.get([key_of(1)]), [block(1)])
    assert chain.flush(SETTLED)
    assert key_of(1) in tier.blocks
    assert chain.stats().waiting_bytes == 0


def test_what_is_put_after_it_was_dropped_is_written_after_it(make: Make, tier: FakeTier) -> None:
    chain = make()
    chain.put([block(1)])
    assert chain.flush(SETTLED)
    gate = Gate(tier, "drop")
    chain.drop([key_of(1)])
    assert gate.reached.wait(SETTLED)
    assert chain.put([block(1)]) == 1
    assert chain.contains([key_of(1)]) == [True]
    gate.open()
    assert chain.flush(SETTLED)
    assert tier.log == [("put", key_of(1)), ("drop", key_of(1)), ("put", key_of(1))]


def test_all_of_a_tenant_is_erased_wherever_it_is(make: Make, tier: FakeTier) -> None:
    chain = make()
    chain.put([block(i, tenant=MINE) for i in (1, 2)] + [block(3)])
    chain.save_record(key_of(100), MINE, b"stored")
    chain.save_record(key_of(101), NOBODY, b"another's")
    assert chain.flush(SETTLED)
    gate = Gate(tier, "put")
    chain.put([block(4, tenant=MINE)])
    assert gate.reached.wait(SETTLED)
    chain.put([block(5, tenant=MINE), block(6)])
    chain.save_record(key_of(102), MINE, b"waiting")
    gate.open()
    assert chain.erase(MINE).wait() == 6
    assert chain.contains([key_of(i) for i in range(1, 7)]) == [False, False, True, False, False, True]
    assert [chain.load_record(key_of(i)) for i in (100, 101, 102)] == [None, b"another's", None]
    assert chain.flush(SETTLED)
    assert set(tier.blocks) == {key_of(3), key_of(6)}
    assert set(tier.records) == {key_of(101)}
    assert chain.erase(MINE).wait() == 0
    chain.put([block(1, tenant=MINE)])
    assert chain.flush(SETTLED)
    assert key_of(1) in tier.blocks


def test_erasing_that_takes_long_goes_on_behind_and_hides_what_it_is_about(make: Make, tier: FakeTier) -> None:
    chain = make(erase_s=0.01)
    chain.put([block(1, tenant=MINE), block(2)])
    assert chain.flush(SETTLED)
    gate = Gate(tier, "erase")
    assert chain.erase(MINE).wait() == 0
    assert chain.heads([key_of(1), key_of(2)]) == [None, block(2).head]
    gate.open()
    assert chain.flush(SETTLED)
    assert set(tier.blocks) == {key_of(2)}


@pytest.mark.parametrize("dropped", [False, True])
def test_what_is_done_while_the_tier_answers_is_not_missed(make: Make, tier: FakeTier, dropped: bool) -> None:
    chain = make()
    if dropped:
        chain.put([block(1)])
        assert chain.flush(SETTLED)
    gate = Gate(tier, "drop" if dropped else "put")
    if dropped:
        chain.drop([key_of(1)])
    else:
        chain.put([block(1)])
    assert gate.reached.wait(SETTLED)
    answer = tier.contains

    def answers_late(keys: Sequence[bytes]) -> list[bool]:
        there = answer(keys)
        gate.open()
        assert chain.flush(SETTLED)
        return there

    tier.contains = answers_late  # type: ignore[method-assign]
    assert chain.contains([key_of(1)]) == [not dropped]
