"""Rows of a SQLite store that are not what was written: each is a miss, and the rest stays."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvpager.stores.sqlite import SqliteStore
from tests.stores.disk import flip
from tests.stores.fake import key_of
from tests.stores.sqlite_rig import BLOCKS, MINE, found, goes_on, keys, raw, store


@pytest.fixture
def path(filled: Path) -> Path:
    return filled


def test_a_flipped_bit_of_a_page_is_a_miss_of_its_block(path: Path) -> None:
    flip(path, BLOCKS[3].payload[7, 100:200].tobytes())
    tier = store(path)
    assert [head is not None for head in tier.heads(keys(BLOCKS))] == [True] * 40
    assert [payload is not None for payload in tier.get(keys(BLOCKS))] == [at != 3 for at in range(40)]
    assert tier.damaged == 1
    key = BLOCKS[3].head.key
    assert tier.get_pages(key, [7]) is None
    assert tier.damaged == 2
    assert tier.get_pages(key, [6, 8]) is not None
    tier.drop([key])
    assert tier.put(BLOCKS) == 1
    assert found(tier, BLOCKS) == [True] * 40
    tier.close()


def test_a_flipped_bit_of_a_digest_or_of_scores_is_a_miss(path: Path) -> None:
    flip(path, BLOCKS[3].head.digest)
    flip(path, BLOCKS[5].head.scores)
    tier = store(path)
    assert [head is not None for head in tier.heads(keys(BLOCKS))] == [at not in (3, 5) for at in range(40)]
    assert tier.damaged == 2
    tier.drop(keys([BLOCKS[3], BLOCKS[5]]))
    goes_on(tier)


def test_a_flipped_bit_of_a_record_is_a_miss(path: Path) -> None:
    flip(path, b"a record")
    tier = store(path)
    assert tier.load_record(key_of(1)) is None
    assert tier.damaged == 1
    tier.save_record(key_of(1), MINE, b"new")
    assert tier.load_record(key_of(1)) == b"new"
    tier.close()


SWAPS = [
    ("payloads", "payload", lambda tier, key: tier.get([key])),
    ("heads", "head", lambda tier, key: tier.heads([key])),
    ("scores", "scores", lambda tier, key: tier.heads([key])),
]


@pytest.mark.parametrize(("table", "column", "ask"), SWAPS, ids=[table for table, _, _ in SWAPS])
@pytest.mark.parametrize(
    "value", ["x''", "{0}", "substr({1}, 1, length({1}) / 2)", "CAST({1} || x'00' AS BLOB)", "NULL"]
)
def test_another_s_or_cut_off_bytes_are_a_miss(
    path: Path, table: str, column: str, ask: Callable[[SqliteStore, bytes], list[object]], value: str
) -> None:
    one, two = (f"(SELECT id FROM blocks WHERE key = x'{BLOCKS[at].head.key.hex()}')" for at in (1, 2))
    with raw(path) as connection:
        if value == "NULL":
            connection.execute(f"DELETE FROM {table} WHERE id = {one}")
        else:
            new = value.format(f"(SELECT {column} FROM {table} WHERE id = {two})", column)
            assert connection.execute(f"UPDATE {table} SET {column} = {new} WHERE id = {one}").rowcount == 1
    tier = store(path)
    assert ask(tier, BLOCKS[1].head.key) == [None]
    assert tier.damaged == 1
    assert found(tier, BLOCKS[2:]) == [True] * 38
    tier.close()


def test_a_database_malformed_in_one_block_loses_that_one(path: Path) -> None:
    data = bytearray(path.read_bytes())
    at = data.index(BLOCKS[3].payload[2].tobytes()) // 2**15 * 2**15  # a page of SQLite's in the middle of a row
    data[at : at + 4] = b"\xff" * 4  # names the next one
    path.write_bytes(data)
    tier = store(path)
    assert [payload is not None for payload in tier.get(keys(BLOCKS))] == [at != 3 for at in range(40)]
    assert tier.damaged == 1
    tier.drop(keys(BLOCKS[3:4]))
    assert tier.contains(keys(BLOCKS[3:4])) == [False]
    assert tier.put(BLOCKS[3:4]) == 1
    assert found(tier, BLOCKS) == [True] * 40
    tier.close()
    assert not list(path.parent.glob("*.damaged-*"))


# ---- files that are not what they were
