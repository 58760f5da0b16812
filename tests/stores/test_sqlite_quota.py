"""What makes way when the SQLite store is full, and that it stays within its limits whatever happens."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpager.errors import InputError, StoreLocked, StoreTooLarge
from kvpager.stored import Scores, StoredBlock
from kvpager.stores.sqlite import SqliteStore
from tests.stores.fake import Clock, key_of
from tests.stores.sqlite_rig import MIB, MINE, YOURS, chain, found, keys, on_disk, raw, store

LIMIT = 5 * MIB
BATCH = 2**18  # four blocks of 64 KiB


def put(tier: SqliteStore, path: Path, blocks: list[StoredBlock]) -> int:
    """In batches of four; the limit holds after each of them."""
    written = 0
    for at in range(0, len(blocks), 4):
        written += tier.put(blocks[at : at + 4])
        assert on_disk(path) <= tier.sizes().limit_bytes + BATCH
        assert tier.sizes().bytes == on_disk(path)
    return written


def chains(count: int, length: int = 4, first: int = 0) -> list[list[StoredBlock]]:
    return [chain(length, seed) for seed in range(first, first + count)]


def test_four_times_the_limit_before_a_restart_and_after_it_stays_within_it(path: Path) -> None:
    kept = 0
    for turn in range(2):
        tier = store(path, LIMIT)
        assert put(tier, path, [block for one in chains(80, first=100 * turn) for block in one]) == 320
        assert tier.sizes().dropped >= 250
        assert 30 <= tier.sizes().blocks == kept + 320 - tier.sizes().dropped
        kept = tier.sizes().blocks
        assert found(tier, chain(4, 100 * turn + 79)) == [True] * 4  # the latest
        assert found(tier, chain(4, 100 * turn)) == [False] * 4  # the first
        tier.close()
        assert on_disk(path) <= LIMIT


def test_a_lower_limit_is_met_with_the_next_block(path: Path) -> None:
    tier = store(path, 64 * MIB)
    put(tier, path, [block for one in chains(100) for block in one])
    assert on_disk(path) > 5 * LIMIT
    tier.close()
    again = store(path, LIMIT)
    assert again.sizes().blocks == 400
    assert again.put(chain(1, 200)) == 1
    assert on_disk(path) <= LIMIT + BATCH
    assert found(again, chain(4, 99)) == [True] * 4
    assert found(again, chain(1, 200)) == [True]
    again.close()


def test_a_reader_that_stays_stops_writing_before_the_log_outgrows_the_limit(path: Path) -> None:
    tier = store(path, LIMIT)
    tier.put(chain(4))
    with raw(path) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM blocks").fetchone()
        with pytest.raises(StoreLocked, match="somebody reads it"):
            put(tier, path, [block for one in chains(80, first=1) for block in one])
        assert on_disk(path) <= LIMIT + BATCH
        assert found(tier, chain(4)) == [True] * 4
    put(tier, path, [block for one in chains(80, first=100) for block in one])
    tier.close()


def test_what_was_used_least_recently_goes_first(path: Path) -> None:
    tier = store(path, LIMIT)
    put(tier, path, [block for one in chains(8) for block in one])
    for seed in (0, 3):
        tier.heads(keys(chain(4, seed)))  # noted with the next transaction
    put(tier, path, [block for one in chains(7, first=10) for block in one])
    assert [all(found(tier, one)) for one in chains(8)][:4] == [True, False, False, True]
    tier.close()


def test_uses_are_noted_by_a_store_that_only_reads(path: Path) -> None:
    tier = store(path, LIMIT)
    put(tier, path, [block for one in chains(8) for block in one])
    tier.close()
    reader = store(path, LIMIT)
    reader.heads(keys(chain(4, 0)))
    reader.close()
    again = store(path, LIMIT)
    put(again, path, [block for one in chains(6, first=10) for block in one])
    assert [all(found(again, one)) for one in chains(3)] == [True, False, False]
    again.close()


def test_what_was_used_often_outlasts_what_came_later_but_not_for_ever(path: Path) -> None:
    tier = store(path, LIMIT)
    often, once = chain(4, 0), chain(4, 1)
    tier.put(often)
    tier.put(once)
    tier.update([Scores(key, b"", 7) for key in keys(often)], tick=1)
    gone_after = None
    for turn in range(200):
        tier.put(chain(4, 10 + turn))
        if turn == 30:
            assert tier.sizes().dropped > 60
            assert (tier.contains(keys(often)), tier.contains(keys(once))) == ([True] * 4, [False] * 4)
        if not any(tier.contains(keys(often))):
            gone_after = turn
            break
    assert gone_after is not None
    assert gone_after > 40  # more than three times what it holds
    tier.close()


def test_a_block_never_goes_before_those_that_follow_it(path: Path) -> None:
    tier = store(path, LIMIT)
    trunk = chain(4, 0)
    tier.put(trunk)
    branch = [replace(block, head=replace(block.head, parent=trunk[1].head.key, depth=2)) for block in chain(1, 1)]
    tier.put(branch)
    tier.update([Scores(keys(branch)[0], b"", 1000)], tick=1)  # only what is last was ever told of
    put(tier, path, [block for one in chains(30, first=10) for block in one])
    assert found(tier, [*trunk, *branch]) == [True, True, False, False, True]
    tier.close()


def test_one_long_row_does_not_push_out_its_own_beginning(path: Path) -> None:
    tier = store(path, LIMIT)
    blocks = chain(200)
    written = put(tier, path, blocks)
    assert 30 <= written < 100
    assert found(tier, blocks) == [True] * written + [False] * (200 - written)
    assert put(tier, path, chain(8, 1)) == 8  # what is new still finds room
    assert found(tier, chain(8, 1)) == [True] * 8
    left = found(tier, blocks)
    assert left == sorted(left, reverse=True)
    tier.close()


def test_a_block_larger_than_the_store_is_left_out_and_a_record_is_refused(path: Path) -> None:
    tier = store(path, LIMIT)
    (small,), (large,) = chain(1), chain(1, 1, pages=90, page_bytes=65536)
    assert tier.put([large, small]) == 1
    assert found(tier, [large, small]) == [False, True]
    with pytest.raises(StoreTooLarge, match="no room for a record of 6291456 bytes"):
        tier.save_record(key_of(1), MINE, bytes(6 * MIB))
    tier.save_record(key_of(1), MINE, b"old")
    with pytest.raises(StoreTooLarge):
        tier.save_record(key_of(1), MINE, bytes(6 * MIB))
    assert tier.load_record(key_of(1)) == b"old"
    tier.close()


def test_records_make_way_too(path: Path) -> None:
    tier = store(path, LIMIT)
    for number in range(60):
        tier.save_record(key_of(number), MINE, bytes(2**17))
        assert on_disk(path) <= LIMIT + BATCH
    there = [tier.load_record(key_of(number)) is not None for number in range(60)]
    assert there == sorted(there)
    assert 15 <= sum(there) < 60
    tier.close()


def test_a_tenant_over_its_limit_makes_way_for_itself_alone(path: Path) -> None:
    tier = store(path, 64 * MIB, tenant_limit_bytes=2 * MIB)
    yours = chain(8, 0, tenant=YOURS)
    nobody_s = [block for seed in range(1, 16) for block in chain(4, seed)]
    tier.put(yours)
    put(tier, path, nobody_s)
    mine = [chain(4, seed, tenant=MINE) for seed in range(20, 40)]
    put(tier, path, [block for one in mine for block in one])
    tier.save_record(key_of(1), MINE, bytes(2**17))
    assert found(tier, yours) == [True] * 8
    assert found(tier, nobody_s) == [True] * 60  # what is nobody's has no limit but the store's
    assert [all(found(tier, one)) for one in mine[-6:]] == [True] * 6
    assert sum(sum(found(tier, one)) for one in mine) in range(24, 31)
    with raw(path) as connection:
        (size,) = connection.execute("SELECT bytes FROM tenants WHERE tenant = ?", (MINE,)).fetchone()
    assert size <= 2 * MIB
    assert tier.put(chain(1, 50, pages=90, page_bytes=32768, tenant=MINE)) == 0
    assert sum(sum(found(tier, one)) for one in mine) >= 24  # which cost nobody anything
    tier.close()


def test_pruning_makes_the_file_smaller(path: Path) -> None:
    tier = store(path, 64 * MIB)
    put(tier, path, [block for one in chains(100) for block in one])
    tier.heads(keys(chain(4, 5)))
    count = tier.prune(to_bytes=20 * MIB)
    assert on_disk(path) <= 20 * MIB
    assert 100 < count < 390
    assert tier.sizes().blocks == 400 - count
    assert found(tier, chain(4, 5)) == found(tier, chain(4, 99)) == [True] * 4
    assert tier.prune(to_bytes=0) == 400 - count
    assert tier.sizes().blocks == 0
    tier.close()


def test_pruning_by_age_goes_by_the_last_use(path: Path) -> None:
    wall = Clock()
    tier = store(path, wall=wall)
    tier.put(chain(4, 0))
    tier.put(chain(4, 1, tenant=MINE))
    tier.save_record(key_of(1), MINE, b"one")
    wall.now += 1000
    tier.put(chain(4, 2))
    tier.heads(keys(chain(2, 0)))
    assert tier.prune(older_seconds=500, tenant=YOURS) == 0
    assert tier.prune(older_seconds=500) == 2 + 4 + 1
    assert found(tier, [*chain(4, 0), *chain(4, 2)]) == [True] * 2 + [False] * 2 + [True] * 4
    assert tier.prune(older_seconds=500) == 0
    wall.now -= 10**6  # a clock that was set back makes nothing older
    assert tier.prune(older_seconds=1) == 0
    tier.close()


def test_pruning_a_tenant_erases_it(path: Path) -> None:
    tier = store(path)
    tier.put(chain(3, 0, tenant=MINE))
    tier.put(chain(3, 1))
    assert tier.prune(tenant=MINE) == 3
    assert tier.prune() == 0
    assert found(tier, chain(3, 1)) == [True] * 3
    with pytest.raises(InputError, match="to_bytes"):
        tier.prune(tenant=MINE, to_bytes=1)
    tier.close()


@given(
    st.lists(
        st.tuples(st.integers(0, 15), st.integers(0, 12), st.sampled_from(["put", "heads", "told", "restart"])),
        min_size=20,
        max_size=60,
    )
)
@settings(max_examples=10, deadline=None, derandomize=True)
def test_whatever_is_used_the_limit_holds_and_no_block_loses_its_parent(
    tmp_path_factory: pytest.TempPathFactory, calls: list[tuple[int, int, str]]
) -> None:
    path = tmp_path_factory.mktemp("quota") / "store.db"
    tier = store(path, LIMIT, tenant_limit_bytes=2 * MIB)
    all_chains = [chain(12, seed, tenant=(MINE, YOURS, bytes(16))[seed % 3]) for seed in range(16)]
    for seed, length, what in calls:
        some = all_chains[seed][:length]
        if what == "put":
            put(tier, path, some)
        elif what == "heads":
            tier.heads(keys(some))
        elif what == "told":
            tier.update([Scores(key, b"", 3) for key in keys(some[-2:])], 1)
        else:
            tier.close()
            tier = store(path, LIMIT, tenant_limit_bytes=2 * MIB)
        for one in all_chains:
            there = tier.contains(keys(one))
            assert there == sorted(there, reverse=True)
    assert sum(sum(found(tier, one)) for one in all_chains) == tier.sizes().blocks
    assert tier.damaged == 0
    assert tier.verify().damaged == ()
    tier.close()


@pytest.mark.parametrize("page_bytes", [2048, 20480, 369664])
@pytest.mark.parametrize("length", [1, 8])
def test_blocks_of_any_size_stay_within_the_limit_and_one_batch(path: Path, page_bytes: int, length: int) -> None:
    limit = 4 * MIB
    batch = max(limit // 16, page_bytes)
    tier = store(path, limit)
    blocks = [
        block
        for seed in range(1 + 3 * limit // 2 // page_bytes // length)
        for block in chain(length, seed, pages=1, page_bytes=page_bytes)
    ]
    step = batch // page_bytes
    for at in range(0, len(blocks), step):
        tier.put(blocks[at : at + step])
        if at % (3 * step) == 0:  # some are used again, here and there
            some = keys(blocks[at // 2 : at // 2 + length])
            tier.heads(some)
            tier.update([Scores(key, b"scores", 1) for key in some], at)
        assert on_disk(path) <= limit + batch
    assert tier.sizes().payload_bytes > limit // 4
    tier.close()
