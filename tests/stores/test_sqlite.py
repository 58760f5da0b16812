"""The SQLite store: what is put comes back, bit for bit, also later and elsewhere."""

import shutil
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpager.errors import ConfigError, InputError
from kvpager.stored import Scores, StoredBlock
from kvpager.stores.sqlite import SqliteStore
from tests.stores.fake import key_of
from tests.stores.made import blocks as any_blocks
from tests.stores.made import made_block
from tests.stores.sqlite_rig import MIB, MINE, YOURS, chain, found, keys, raw, store


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_what_is_put_comes_back_after_a_restart(path: Path, compression: str) -> None:
    blocks = chain(20)
    first = store(path, compression=compression)
    assert first.put(blocks[:12]) == 12
    assert first.put(blocks[8:]) == 8  # four are there
    assert found(first, blocks) == [True] * 20
    first.close()
    again = store(path)
    assert again.contains([key_of(1), *keys(blocks)]) == [False, *[True] * 20]
    assert again.heads([key_of(1), *keys(blocks)]) == [None, *[block.head for block in blocks]]
    assert found(again, blocks) == [True] * 20
    again.close()


@given(st.lists(any_blocks(), max_size=6, unique_by=lambda block: block.head.key))
@settings(max_examples=30, deadline=None)
def test_blocks_of_any_shape_come_back(tmp_path_factory: pytest.TempPathFactory, blocks: list[StoredBlock]) -> None:
    folder = tmp_path_factory.mktemp("any")
    tier = store(folder / "store.db")
    assert tier.put(blocks) == len(blocks)
    assert tier.heads(keys(blocks)) == [block.head for block in blocks]
    assert all(np.array_equal(a, b.payload) for a, b in zip(tier.get(keys(blocks)), blocks, strict=True))
    tier.close()
    shutil.rmtree(folder)


def test_no_page_is_read_to_find_blocks_after_a_restart(path: Path) -> None:
    blocks = chain(8)
    first = store(path)
    first.put(blocks)
    first.close()
    with raw(path) as connection:
        connection.execute("UPDATE payloads SET payload = x''")
    again = store(path)
    assert all(again.contains(keys(blocks)))
    assert again.heads(keys(blocks)) == [block.head for block in blocks]
    assert again.damaged == 0
    assert again.get(keys(blocks)) == [None] * 8
    assert again.damaged == 8
    again.close()


def test_some_pages_of_a_block_are_read_alone(path: Path) -> None:
    (block,) = chain(1)
    tier = store(path, compression="zstd")
    tier.put([block])
    pages = tier.get_pages(block.head.key, [15, 0, 3])
    assert pages is not None
    assert [page.tolist() for page in pages] == block.payload[[15, 0, 3]].tolist()
    assert tier.get_pages(block.head.key, []) == []
    assert tier.get_pages(key_of(1), [0]) is None
    tier.close()


def test_scores_hits_and_the_tick_come_back(path: Path) -> None:
    blocks = chain(3)
    tier = store(path)
    tier.put(blocks)
    assert tier.tick == 0
    tier.update([Scores(blocks[0].head.key, b"new", 2), Scores(key_of(1), b"none", 1)], tick=7)
    tier.update([Scores(blocks[0].head.key, b"newer", 1), Scores(blocks[1].head.key, b"", 0)], tick=5)
    tier.close()
    again = store(path)
    assert again.tick == 7
    heads = again.heads(keys(blocks))
    assert [(head.scores, head.hits) for head in heads if head] == [(b"newer", 3), (b"", 0), (blocks[2].head.scores, 0)]
    again.close()


def test_many_scores_are_told_at_once(path: Path) -> None:
    blocks = [made_block(seed, 1, 8, hits=0) for seed in range(1100)]
    tier = store(path)
    tier.put(blocks)
    tier.update([Scores(key, b"s%d" % at, at) for at, key in enumerate(reversed(keys(blocks)))], tick=1)
    heads = tier.heads(keys(blocks))
    assert [(head.scores, head.hits) for head in heads if head] == [(b"s%d" % at, at) for at in reversed(range(1100))]
    tier.close()


def test_dropped_blocks_are_gone_and_can_be_put_again(path: Path) -> None:
    blocks = chain(4)
    tier = store(path)
    tier.put(blocks)
    tier.drop([*keys(blocks[1:3]), key_of(1)])
    assert found(tier, blocks) == [True, False, False, True]
    assert tier.contains(keys(blocks)) == [True, False, False, True]
    assert tier.put(blocks) == 2
    assert found(tier, blocks) == [True] * 4
    tier.close()


def test_records_are_kept_replaced_and_dropped(path: Path) -> None:
    tier = store(path)
    assert tier.load_record(key_of(1)) is None
    tier.save_record(key_of(1), MINE, b"one")
    tier.save_record(key_of(2), MINE, b"two" * MIB)
    tier.save_record(key_of(1), MINE, b"")
    assert tier.sizes().records == 2
    tier.close()
    again = store(path)
    assert again.load_record(key_of(1)) == b""
    assert again.load_record(key_of(2)) == b"two" * MIB
    again.drop_record(key_of(2))
    again.drop_record(key_of(3))
    assert again.load_record(key_of(2)) is None
    assert again.sizes().records == 1
    again.close()


def test_sizes_are_counted_whatever_changes(path: Path) -> None:
    blocks = chain(6, tenant=MINE)
    tier = store(path)
    tier.put(blocks)
    tier.put(blocks[:2])
    tier.save_record(key_of(1), MINE, b"one")
    tier.save_record(key_of(1), MINE, b"two")
    tier.drop(keys(blocks[4:]))
    sizes = tier.sizes()
    assert (sizes.blocks, sizes.records, sizes.payload_bytes) == (4, 1, 4 * 16 * 4096)
    assert sizes.limit_bytes == 64 * MIB
    assert sizes.bytes == sum(file.stat().st_size for file in path.parent.iterdir())
    tier.erase(MINE)
    assert (tier.sizes().blocks, tier.sizes().records, tier.sizes().payload_bytes) == (0, 0, 0)
    tier.close()


def test_a_tenant_is_erased_and_its_bytes_are_nowhere(path: Path) -> None:
    mark = np.frombuffer(b"a secret of mine".ljust(4096, b"."), np.uint8)
    mine = [replace(block, payload=np.tile(mark, (16, 1))) for block in chain(40, 0, tenant=MINE)]
    yours = chain(40, 1, tenant=YOURS)
    tier = store(path)
    for at in range(0, 40, 8):
        tier.put(mine[at : at + 8])
        tier.put(yours[at : at + 8])
    tier.save_record(key_of(1), MINE, b"a secret of mine, too")
    tier.save_record(key_of(2), YOURS, b"none")
    tier.drop(keys(mine[30:]))  # what was dropped before is gone as well
    assert tier.erase(MINE) == 31
    assert tier.erase(MINE) == 0
    assert found(tier, mine) == [False] * 40
    assert found(tier, yours) == [True] * 40
    assert tier.load_record(key_of(1)) is None
    assert tier.load_record(key_of(2)) == b"none"
    for file in path.parent.iterdir():
        assert b"secret" not in file.read_bytes(), file.name
    tier.close()


def test_what_an_ended_process_had_to_erase_is_erased_with_the_next_block(path: Path) -> None:
    blocks = chain(4, tenant=MINE)
    tier = store(path)
    tier.put(blocks)
    tier.close()
    with raw(path) as connection:  # as a process leaves it that is killed between the two steps of `erase`
        connection.execute("INSERT INTO doomed SELECT id FROM blocks WHERE tenant = ?", (MINE,))
        connection.execute("DELETE FROM blocks")
    again = store(path)
    assert found(again, blocks) == [False] * 4
    again.put(chain(1, 1))
    again.close()
    assert not any(block.payload.tobytes()[:4096] in path.read_bytes() for block in blocks)


def test_only_the_owner_may_read_it(path: Path) -> None:
    tier = store(path)
    tier.put(chain(2))
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()} == {0o600}
    assert len(list(path.parent.iterdir())) == 5
    tier.close()
    path.chmod(0o644)
    again = store(path)
    again.open()
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()} == {0o600}
    again.close()


def test_close_can_be_called_again_and_a_closed_store_opens_when_it_is_used(path: Path) -> None:
    blocks = chain(2)
    tier = store(path)
    tier.close()
    assert not path.parent.exists()
    tier.put(blocks)
    tier.close()
    tier.close()
    assert sorted(file.name for file in path.parent.iterdir()) == ["store.db", "store.db.lock", "store.db.reserve"]
    assert found(tier, blocks) == [True] * 2
    tier.close()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"limit_bytes": 4 * MIB - 1}, "4194303"),
        ({"limit_bytes": 8 * MIB, "tenant_limit_bytes": 0}, "tenant is 0"),
        ({"limit_bytes": 8 * MIB, "synchronous": "off"}, "normal, full"),
        ({"limit_bytes": 8 * MIB, "compression": "zip"}, "none, zstd"),
    ],
)
def test_settings_out_of_their_range_are_refused(path: Path, settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SqliteStore(path, **settings)  # type: ignore[arg-type]
    assert not path.parent.exists()


def test_a_block_that_is_not_as_its_head_says_is_refused_and_nothing_is_written(path: Path) -> None:
    good, bad = chain(2)
    tier = store(path)
    with pytest.raises(InputError, match="payload"):
        tier.put([good, replace(bad, payload=bad.payload[1:])])
    assert found(tier, [good]) == [False]
    tier.close()
