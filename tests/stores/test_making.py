"""A store that another process is just making is waited for, and is never taken for another application's."""

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from kvpager.errors import StoreForeign, StoreLocked
from kvpager.stores import database
from kvpager.stores.database import Database
from kvpager.stores.schema import APPLICATION_ID, PAGE_BYTES
from tests.stores.sqlite_rig import chain, close_processes, found, other_process, raw, store

BLOCKS = chain(3)
HEADER = 100
pytestmark = pytest.mark.promise(4)


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    """The bytes of a store with BLOCKS."""
    path = tmp_path / "elsewhere" / "store.db"
    tier = store(path)
    tier.put(BLOCKS)
    tier.close()
    return path.read_bytes()


@pytest.fixture
def journal(path: Path) -> Path:
    path.parent.mkdir()
    return path.with_name("store.db-journal")


def meanwhile(monkeypatch: pytest.MonkeyPatch, *steps: Callable[[], object]) -> None:
    """What another process does while this one waits for a moment, and for the next ones."""
    left = list(steps)
    monkeypatch.setattr(database.time, "sleep", lambda seconds: left.pop(0)() if left else None)


def test_nobody_ever_sees_a_half_made_store(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []
    connect = Database._connect

    def traced(self: Database, cache: int) -> sqlite3.Connection:
        connection = connect(self, cache)
        connection.set_trace_callback(lambda statement: seen.append(path.read_bytes()[:HEADER]))
        return connection

    monkeypatch.setattr(Database, "_connect", traced)
    tier = store(path)
    tier.put(BLOCKS)
    tier.close()
    assert b"" in seen
    assert {header[68:72] for header in seen} == {b"", APPLICATION_ID.to_bytes(4, "big")}
    assert not path.with_name("store.db-journal").exists()


@pytest.mark.parametrize("begun", [bytes(PAGE_BYTES), bytes(7), b"SQLite"], ids=["zeros", "few zeros", "cut off"])
def test_a_file_whose_journal_lies_beside_it_is_looked_at_again(
    path: Path, journal: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    path.write_bytes(begun)
    journal.write_bytes(b"")
    meanwhile(monkeypatch, lambda: None, lambda: (path.write_bytes(whole), journal.unlink()))
    tier = store(path, busy_ms=20000)
    assert found(tier, BLOCKS) == [True] * 3
    tier.close()


def test_a_file_is_looked_at_once_more_after_its_journal_has_gone(
    path: Path, journal: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_bytes(bytes(PAGE_BYTES))
    journal.write_bytes(b"")
    meanwhile(monkeypatch, journal.unlink, lambda: path.write_bytes(whole))
    tier = store(path, busy_ms=20000)
    assert found(tier, BLOCKS) == [True] * 3
    tier.close()


def test_a_file_that_changes_is_looked_at_again(
    path: Path, journal: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_bytes(bytes(HEADER))
    meanwhile(monkeypatch, lambda: path.write_bytes(bytes(2 * HEADER)), lambda: path.write_bytes(whole))
    tier = store(path, busy_ms=20000)
    assert found(tier, BLOCKS) == [True] * 3
    tier.close()


def test_a_store_that_is_not_made_in_time_is_opened_later(path: Path, journal: Path, whole: bytes) -> None:
    path.write_bytes(bytes(PAGE_BYTES))
    journal.write_bytes(b"")
    tier = store(path)
    for _ in range(2):
        with pytest.raises(StoreLocked, match="another process is making it"):
            tier.open()
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == {
        path.name: bytes(PAGE_BYTES),
        journal.name: b"",
    }
    path.write_bytes(whole)
    journal.unlink()
    assert found(tier, BLOCKS) == [True] * 3
    tier.close()


@pytest.mark.parametrize("content", [b"", b"what another application keeps there"])
def test_another_application_s_file_with_a_journal_is_left_as_it_is(path: Path, journal: Path, content: bytes) -> None:
    with raw(path) as connection:
        connection.execute("CREATE TABLE recipes (name TEXT)")
    journal.write_bytes(content)
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    tier = store(path)
    with pytest.raises(StoreForeign, match="is left as it is"):
        tier.open()
    tier.close()
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == before


@pytest.mark.parametrize("pragma", ["user_version = 0", "user_version = 1", "application_id = 77"])
def test_another_application_that_is_quicker_keeps_its_file(
    path: Path, monkeypatch: pytest.MonkeyPatch, pragma: str
) -> None:
    """It makes its database between the look at an empty file and the first transaction."""
    path.parent.mkdir()
    with raw(path) as connection:
        connection.execute("CREATE TABLE recipes (name TEXT)")
        connection.execute(f"PRAGMA {pragma}")
    before = path.read_bytes()
    monkeypatch.setattr(Database, "_look", lambda self: None)
    tier = store(path)
    with pytest.raises(StoreForeign):
        tier.put(BLOCKS)
    tier.close()
    assert path.read_bytes() == before


def test_processes_that_a_failed_test_leaves_are_ended_and_their_pipes_closed() -> None:
    process = other_process("import sys; sys.stdin.read()")
    close_processes()
    assert process.returncode is not None
    assert all(pipe is not None and pipe.closed for pipe in (process.stdin, process.stdout, process.stderr))
