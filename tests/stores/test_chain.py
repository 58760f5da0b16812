"""The chain over tiers in memory, where all goes well."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from kvpager.errors import ConfigError, MissingDependency
from kvpager.ports import Bytes
from kvpager.stored import BlockStore, Scores, StoredBlock
from kvpager.stores.backlog import size_of
from kvpager.stores.chain import Chain
from kvpager.stores.limits import Limits
from kvpager.stores.tier import Tier
from tests.stores.fake import NOBODY, SETTLED, Clock, FakeTier, Gate, block, key_of

MINE = b"mine".ljust(16, b"\0")
SIZE = size_of(block(0))
Make = Callable[..., Chain]


@pytest.fixture
def tier() -> FakeTier:
    return FakeTier()


@pytest.fixture
def make(tier: FakeTier) -> Iterator[Make]:
    made: list[Chain] = []

    def build(*tiers: Tier, **limits: float) -> Chain:
        openers = [lambda one=one: one for one in tiers or (tier,)]
        chain = Chain(openers, Limits(**limits), Clock())  # type: ignore[arg-type]
        made.append(chain)
        return chain

    yield build
    for chain in made:
        chain.close()


def same(found: Sequence[Bytes | None], expected: Sequence[StoredBlock | None]) -> bool:
    assert len(found) == len(expected)
    for payload, held in zip(found, expected, strict=True):
        if (payload is None) != (held is None):
            return False
        if payload is not None and held is not None and not np.array_equal(payload, held.payload):
            return False
    return True


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
    assert chain.erase(MINE) == 6
    assert chain.contains([key_of(i) for i in range(1, 7)]) == [False, False, True, False, False, True]
    assert [chain.load_record(key_of(i)) for i in (100, 101, 102)] == [None, b"another's", None]
    assert chain.flush(SETTLED)
    assert set(tier.blocks) == {key_of(3), key_of(6)}
    assert set(tier.records) == {key_of(101)}
    assert chain.erase(MINE) == 0
    chain.put([block(1, tenant=MINE)])
    assert chain.flush(SETTLED)
    assert key_of(1) in tier.blocks


def test_erasing_that_takes_long_goes_on_behind_and_hides_what_it_is_about(make: Make, tier: FakeTier) -> None:
    chain = make(erase_s=0.01)
    chain.put([block(1, tenant=MINE), block(2)])
    assert chain.flush(SETTLED)
    gate = Gate(tier, "erase")
    assert chain.erase(MINE) == 0
    assert chain.heads([key_of(1), key_of(2)]) == [None, block(2).head]
    gate.open()
    assert chain.flush(SETTLED)
    assert set(tier.blocks) == {key_of(2)}


def test_what_a_farther_tier_has_is_put_into_the_nearer_one(make: Make, tier: FakeTier) -> None:
    far = FakeTier()
    far.put([block(i) for i in range(20)])
    far.save_record(key_of(100), MINE, b"far")
    chain = make(tier, far)
    keys = [key_of(i) for i in range(20)]
    assert chain.contains([*keys, key_of(50)]) == [True] * 20 + [False]
    assert chain.heads(keys) == [block(i).head for i in range(20)]
    assert same(chain.get([*keys, key_of(50)]), [*(block(i) for i in range(20)), None])
    assert chain.load_record(key_of(100)) == b"far"
    assert chain.flush(SETTLED)
    assert set(tier.blocks) == set(keys)
    far.calls.clear()
    assert same(chain.get(keys), [block(i) for i in range(20)])
    assert far.calls == []


def test_all_tiers_are_written_to_and_claimed(make: Make, tier: FakeTier) -> None:
    far = FakeTier()
    chain = make(tier, far)
    chain.put([block(1)])
    chain.save_record(key_of(100), MINE, b"record")
    chain.update([Scores(key_of(1), b"new", 1)], 4)
    assert chain.claim(key_of(100))
    assert chain.flush(SETTLED)
    for one in (tier, far):
        assert one.blocks[key_of(1)].head.scores == b"new"
        assert one.records[key_of(100)] == (MINE, b"record")
        assert one.claimed == {key_of(100)}
    chain.release(key_of(100))
    far.claimed.add(key_of(100))
    assert not chain.claim(key_of(100))
    assert tier.claimed == set()
    chain.drop([key_of(1)])
    chain.drop_record(key_of(100))
    assert chain.flush(SETTLED)
    assert (tier.blocks, far.blocks, tier.records, far.records) == ({}, {}, {}, {})


def test_a_farther_tier_that_hangs_holds_nobody_up(make: Make, tier: FakeTier) -> None:
    far = FakeTier()
    gate = Gate(far, "put")
    chain = make(tier, far, waiting_bytes=2 * SIZE)
    for i in range(10):
        assert chain.put([block(i)]) == 1
        assert gate.reached.wait(SETTLED)
        chain._levels[0].writer.flush(SETTLED)
    assert len(tier.blocks) == 10
    gate.open()
    assert chain.flush(SETTLED)
    assert 2 <= len(far.blocks) < 10


def test_what_is_prefetched_is_read_once_and_forgotten_when_it_is_dropped(make: Make, tier: FakeTier) -> None:
    tier.put([block(i) for i in range(6)])
    chain = make()
    gate = Gate(tier, "get")
    chain.prefetch([key_of(i) for i in range(3)])
    assert gate.reached.wait(SETTLED)
    gate.open()
    assert same(chain.get([key_of(i) for i in range(3)]), [block(i) for i in range(3)])
    assert tier.calls.count("get") == 1
    chain.prefetch([key_of(4)])
    chain.drop([key_of(4)])
    assert chain.get([key_of(4)]) == [None]
    chain.prefetch([key_of(5)])
    chain.erase(NOBODY)
    assert chain.get([key_of(5)]) == [None]


def test_close_writes_what_waits_and_takes_nothing_more(make: Make, tier: FakeTier) -> None:
    chain = make(linger_s=1000)
    chain.put([block(i) for i in range(3)])
    chain.save_record(key_of(100), MINE, b"record")
    chain.close()
    chain.close()
    assert tier.closed
    assert set(tier.blocks) == {key_of(i) for i in range(3)}
    assert set(tier.records) == {key_of(100)}
    assert chain.room == 0
    assert chain.put([block(4)]) == 0
    assert not chain.save_record(key_of(1), MINE, b"")
    assert chain.get([key_of(1)]) == [None]
    assert chain.contains([key_of(1)]) == [False]
    assert chain.load_record(key_of(100)) is None
    chain.update([Scores(key_of(1), b"", 1)], 1)
    chain.drop([key_of(1)])
    chain.drop_record(key_of(1))
    chain.prefetch([key_of(1)])
    assert chain.erase(MINE) == 0
    assert chain.stats().stored == 3


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"waiting_bytes: 0 is not above zero"):
        Limits(waiting_bytes=0)
    with pytest.raises(ConfigError, match="at least one tier"):
        Chain([])


def test_a_missing_package_is_told_and_not_counted_as_a_fault() -> None:
    def opener() -> Tier:
        raise MissingDependency("pip install it")

    with pytest.raises(MissingDependency):
        Chain([opener])
