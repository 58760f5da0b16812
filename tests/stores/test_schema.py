"""Databases of every earlier version become ones of this version."""

import sqlite3
from pathlib import Path

import pytest

from kvpager.stores.schema import APPLICATION_ID, MIGRATIONS, PAGE_BYTES, VERSION, migrate
from tests.stores.sqlite_rig import chain, found, keys, raw, store


def shape(connection: sqlite3.Connection) -> list[tuple[str, ...]]:
    rows = connection.execute("SELECT type, name, sql FROM sqlite_schema ORDER BY name").fetchall()
    return [row for row in rows if not row[1].startswith("sqlite_")]


@pytest.fixture
def connection() -> sqlite3.Connection:
    return sqlite3.connect(":memory:", isolation_level=None)


@pytest.mark.parametrize("version", range(VERSION + 1))
def test_every_earlier_version_becomes_the_last_one(connection: sqlite3.Connection, version: int) -> None:
    migrate(connection, MIGRATIONS[:version])
    assert connection.execute("PRAGMA user_version").fetchone() == (version,)
    assert migrate(connection) == version
    assert connection.execute("PRAGMA user_version").fetchone() == (VERSION,)
    assert connection.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
    fresh = sqlite3.connect(":memory:", isolation_level=None)
    migrate(fresh)
    assert shape(connection) == shape(fresh)
    fresh.close()
    connection.close()


def test_rows_outlive_a_migration(connection: sqlite3.Connection) -> None:
    migrate(connection)
    connection.execute("INSERT INTO records VALUES (1, x'01', x'02', 3, 4, 5, 6, x'07')")
    later = [*MIGRATIONS, ("ALTER TABLE records ADD COLUMN note TEXT DEFAULT 'new'",)]
    assert migrate(connection, later) == VERSION
    assert connection.execute("SELECT key, record, note FROM records").fetchone() == (b"\1", b"\7", "new")
    assert connection.execute("SELECT tenant, records, bytes FROM tenants").fetchone() == (b"\2", 1, 3)
    connection.close()


def test_a_migration_that_fails_changes_nothing(connection: sqlite3.Connection) -> None:
    migrate(connection)
    before = shape(connection)
    later = [*MIGRATIONS, ("CREATE TABLE more (a)", "CREATE TABLE blocks (a)")]
    with pytest.raises(sqlite3.OperationalError, match="already exists"):
        migrate(connection, later)
    assert not connection.in_transaction
    assert shape(connection) == before
    assert connection.execute("PRAGMA user_version").fetchone() == (VERSION,)
    connection.close()


def test_a_store_of_an_earlier_version_opens(tmp_path: Path) -> None:
    """Version 0 is a database that was marked as ours and has no tables yet."""
    path = tmp_path / "store.db"
    with raw(path) as connection:
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute("VACUUM")
    tier = store(path)
    blocks = chain(3)
    assert tier.put(blocks) == 3
    tier.close()
    assert found(tier, blocks) == [True] * 3
    tier.close()


def test_the_file_says_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    tier = store(path)
    tier.put(chain(3))
    with raw(path) as connection:
        said = {
            name: connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("application_id", "user_version", "page_size", "auto_vacuum", "journal_mode")
        }
    assert said == {
        "application_id": 0x4B565047,
        "user_version": 1,
        "page_size": PAGE_BYTES,
        "auto_vacuum": 2,
        "journal_mode": "wal",
    }
    assert path.read_bytes()[68:72] == b"KVPG"
    tier.close()


def test_keys_do_not_depend_on_the_process(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    tier = store(path)
    tier.put(chain(3))
    tier.close()
    with raw(path) as connection:
        assert [key for (key,) in connection.execute("SELECT key FROM blocks ORDER BY id")] == keys(chain(3))
