"""The table of faults in docs/stores.md: a database that somebody has edited. Never raised, and never off for good."""

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from kvpager.stores.chain import Chain
from tests.stores import disk
from tests.stores.disk import RECORD, blocks, fill, goes_on, opened, there, told
from tests.stores.fake import SETTLED, Clock, key_of
from tests.stores.sqlite_rig import MIB, MINE, chain, found, keys, on_disk, raw, store

pytestmark = pytest.mark.promise(4)

ROW = "id = (SELECT id FROM blocks WHERE key = :one)"
EDITS = [
    f"UPDATE blocks SET key = CAST(key AS TEXT) WHERE {ROW}",
    f"UPDATE blocks SET key = 'block 1' WHERE {ROW}",
    f"UPDATE blocks SET key = 17 WHERE {ROW}",
    f"UPDATE blocks SET key = x'00ff' WHERE {ROW}",
    f"UPDATE blocks SET parent = 'none' WHERE {ROW}",
    f"UPDATE blocks SET tenant = 'mine' WHERE {ROW}",
    f"UPDATE blocks SET hits = 'often' WHERE {ROW}",
    f"UPDATE blocks SET hits = -1 WHERE {ROW}",
    f"UPDATE blocks SET hits = 9223372036854775808 WHERE {ROW}",
    f"UPDATE blocks SET bytes = 9223372036854775807 WHERE {ROW}",
    f"UPDATE blocks SET bytes = 'few' WHERE {ROW}",
    f"UPDATE blocks SET bytes = -9223372036854775808 WHERE {ROW}",
    f"UPDATE blocks SET payload_bytes = 1e300 WHERE {ROW}",
    f"UPDATE blocks SET id = 9223372036854775807 WHERE {ROW}",
    f"UPDATE blocks SET id = -5 WHERE {ROW}",
]
PARTS = [
    f"UPDATE heads SET head = 'text' WHERE {ROW}",
    f"UPDATE heads SET head = CAST(head AS TEXT) WHERE {ROW}",
    f"UPDATE heads SET head = 5 WHERE {ROW}",
    f"UPDATE scores SET scores = 1.5 WHERE {ROW}",
    f"UPDATE scores SET scores = 'text' WHERE {ROW}",
    f"DELETE FROM heads WHERE {ROW}",
    f"DELETE FROM scores WHERE {ROW}",
    f"UPDATE payloads SET payload = 'text' WHERE {ROW}",
    f"UPDATE payloads SET payload = 7 WHERE {ROW}",
    f"DELETE FROM payloads WHERE {ROW}",
]
ORDERS = [
    f"UPDATE blocks SET {column} = {value}"
    for column in ("used", "worth", "depth", "seen")
    for value in ("9223372036854775807", "-9223372036854775808", "'long ago'", "1e300", "x'00'")
]
COUNTERS = [
    "DELETE FROM counters",
    "DELETE FROM counters WHERE name = 'use'",
    "UPDATE counters SET value = 'text'",
    "UPDATE counters SET value = 9223372036854775807",
    "UPDATE counters SET value = -9223372036854775808",
    "UPDATE counters SET value = 2.5 WHERE name = 'tick'",
    "DELETE FROM tenants",
    "UPDATE tenants SET bytes = 9223372036854775807, blocks = -4",
    "UPDATE tenants SET bytes = 'many', blocks = 1e300, records = x'00', payload_bytes = 'all'",
    "INSERT INTO tenants VALUES ('nobody', 1, 1, 1, 1)",
    "UPDATE sqlite_sequence SET seq = 9223372036854775807",
    "UPDATE sqlite_sequence SET seq = 'last'",
    "DELETE FROM sqlite_sequence",
    "INSERT INTO doomed VALUES (1000000)",
]
SCHEMAS = [
    "DROP TABLE payloads",
    "DROP TABLE counters",
    "DROP TABLE doomed",
    "DROP TRIGGER blocks_insert",
    "DROP INDEX blocks_parent",
    "ALTER TABLE blocks RENAME COLUMN worth TO value",
    "ALTER TABLE blocks ADD COLUMN note TEXT",
    "CREATE TRIGGER mine BEFORE INSERT ON blocks BEGIN SELECT RAISE(ABORT, 'no'); END",
    "PRAGMA user_version = 0",
    "PRAGMA user_version = -7",
]


def edit(path: Path, statement: str) -> None:
    with raw(path) as connection:
        connection.execute(statement, {"one": key_of(1)})


def is_well(store: Chain) -> None:
    stats = store.stats()
    assert stats.state == "ok"
    goes_on(store)
    assert store.stats().state == "ok"
    assert store.stats().blocks >= 0
    store.close()


@pytest.mark.parametrize("statement", EDITS)
def test_a_row_that_is_none_of_ours_is_forgotten_at_the_start(
    path: Path, caplog: pytest.LogCaptureFixture, statement: str
) -> None:
    fill(path, 4)
    edit(path, statement)
    store = opened(path)
    assert there(store, range(4)) == [0, 2, 3]
    assert store.load_record(RECORD) == b"a record"
    assert (store.stats().damaged, store.stats().blocks, store.stats().payload_bytes) == (1, 3, 3 * 65536)
    assert len(caplog.records) == 1
    assert "rows of 1 blocks or sessions are damaged" in caplog.text
    assert store.put(blocks([1])) == 1
    assert store.flush(SETTLED)
    assert there(store, range(4)) == [0, 1, 2, 3]
    is_well(store)
    again = opened(path)
    assert there(again, range(4)) == [0, 1, 2, 3]
    assert again.stats().damaged == 0
    again.close()


@pytest.mark.parametrize("statement", PARTS)
def test_a_block_with_a_part_that_is_none_of_ours_is_a_miss_and_is_dropped(
    path: Path, caplog: pytest.LogCaptureFixture, statement: str
) -> None:
    fill(path, 4)
    edit(path, statement)
    store = opened(path)
    keys = [key_of(number) for number in range(4)]
    both = [
        head is not None and pages is not None for head, pages in zip(store.heads(keys), store.get(keys), strict=True)
    ]
    assert both == [True, False, True, True]
    assert store.stats().damaged == 1
    assert len(caplog.records) == 1
    assert store.put(blocks([1])) == 1
    assert store.flush(SETTLED)
    assert there(store, range(4)) == [0, 1, 2, 3]
    is_well(store)


@pytest.mark.parametrize(
    "change",
    ["record = 'text'", "record = 5", "key = CAST(key AS TEXT)", "tenant = 'mine'", "bytes = -1", "bytes = 'few'"],
)
def test_a_session_s_row_that_is_none_of_ours_is_a_miss(
    path: Path, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    fill(path, 2)
    edit(path, f"UPDATE records SET {change}")
    store = opened(path)
    assert store.load_record(RECORD) is None
    assert (store.stats().damaged, store.stats().records) == (1, 0)
    assert len(caplog.records) == 1
    assert store.save_record(RECORD, disk.fake.NOBODY, b"new")
    assert store.flush(SETTLED)
    assert store.load_record(RECORD) == b"new"
    is_well(store)


@pytest.mark.parametrize("statement", ORDERS + COUNTERS)
def test_counters_and_the_order_of_use_are_put_right_and_lose_nothing(path: Path, statement: str) -> None:
    fill(path, 4)
    edit(path, statement)
    store = opened(path)
    assert store.tick == 0
    assert there(store, range(4)) == [0, 1, 2, 3]
    assert (store.stats().blocks, store.stats().records, store.stats().payload_bytes) == (4, 1, 4 * 65536)
    is_well(store)


@pytest.mark.parametrize("statement", [*EDITS, *PARTS, *ORDERS, *COUNTERS])
def test_whatever_is_edited_while_it_is_open_is_a_miss_at_most(path: Path, statement: str) -> None:
    fill(path, 4)
    clock = Clock()
    store = opened(path, clock)
    assert there(store, range(4)) == [0, 1, 2, 3]
    edit(path, statement)
    clock.now += 10
    store.heads([key_of(number) for number in range(4)])
    assert {0, 2, 3} <= set(there(store, range(4)))
    assert store.stats().state == "ok"
    if "seq = 9" in statement:  # SQLite says that the disk is full where no id is left; the next try finds some
        store.put(blocks([5]))
        assert store.flush(SETTLED)
        assert store.stats().errors == {"full": 1}
        clock.now += 10
        store.put(blocks([5]))
        assert store.flush(SETTLED)
    is_well(store)
    again = opened(path)
    assert {0, 2, 3} <= set(there(again, range(4)))
    is_well(again)


@pytest.mark.parametrize("statement", SCHEMAS)
def test_other_tables_than_ours_are_put_aside(path: Path, caplog: pytest.LogCaptureFixture, statement: str) -> None:
    fill(path, 4)
    edit(path, statement)
    store = opened(path)
    assert there(store, range(4)) == []
    assert store.stats().errors == {"damaged": 1}
    assert told(caplog, "damaged") == 1
    assert path.with_name("store.db.damaged-1").exists()
    is_well(store)


@pytest.mark.parametrize("table", ["payloads", "heads", "blocks", "counters", "records", "tenants"])
def test_a_table_that_is_dropped_while_it_is_open_is_put_aside_with_the_rest(path: Path, table: str) -> None:
    fill(path, 4)
    clock = Clock()
    store = opened(path, clock)
    assert there(store, range(4)) == [0, 1, 2, 3]
    edit(path, f"DROP TABLE {table}")
    for number in (100, 101, 102):
        clock.now += 10
        store.heads([key_of(0)])
        there(store, range(4))
        store.load_record(RECORD)
        store.put(blocks([number]))
        assert store.flush(SETTLED)
    assert set(store.stats().errors) == {"damaged"}
    is_well(store)


def test_tables_that_others_have_added_are_left_alone(path: Path) -> None:
    fill(path, 4)
    edit(path, "CREATE TABLE notes (text)")
    edit(path, "ANALYZE")
    store = opened(path)
    assert there(store, range(4)) == [0, 1, 2, 3]
    assert store.stats().errors == {}
    is_well(store)


# ---- what makes way


def circle(connection: sqlite3.Connection) -> None:
    connection.execute("UPDATE blocks SET parent = (SELECT key FROM blocks AS b WHERE b.id = 1 + blocks.id % 8)")


def own_parent(connection: sqlite3.Connection) -> None:
    connection.execute("UPDATE blocks SET parent = key")


def upside_down(connection: sqlite3.Connection) -> None:
    connection.execute("UPDATE blocks SET depth = 9223372036854775807 - depth, used = 9223372036854775807")


def sizes(connection: sqlite3.Connection) -> None:
    connection.execute(
        "UPDATE blocks SET bytes = CASE id % 3 WHEN 0 THEN 9223372036854775807 WHEN 1 THEN -5 ELSE 'x' END"
    )


NONSENSE: list[Callable[[sqlite3.Connection], object]] = [
    *(lambda connection, statement=statement: connection.execute(statement) for statement in ORDERS),
    circle,
    own_parent,
    upside_down,
    sizes,
]


@pytest.mark.parametrize("nonsense", NONSENSE)
@pytest.mark.parametrize("while_open", [False, True])
def test_nonsense_in_a_row_keeps_nobody_from_making_way(
    path: Path, nonsense: Callable[[sqlite3.Connection], object], while_open: bool
) -> None:
    limit = 5 * MIB
    tier = store(path, limit, tenant_limit_bytes=3 * MIB)
    old = chain(40, tenant=MINE)
    for at in range(0, 40, 4):
        tier.put(old[at : at + 4])
    if not while_open:
        tier.close()
    with raw(path) as connection:
        nonsense(connection)
    for seed in range(1, 20):
        new = chain(4, seed, tenant=MINE if seed % 2 else bytes(16))
        assert tier.put(new) == 4
        assert found(tier, new) == [True] * 4
        assert on_disk(path) <= limit + limit // 16
    assert not any(tier.contains(keys(old)))
    tier.close()
