"""Files of a SQLite store that are not what they were, or are gone: an error that says so, and then it goes on."""

import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from kvpager.errors import (
    StoreDamaged,
    StoreForeign,
    StoreNewer,
    StoreUnavailable,
)
from tests.stores.fake import Clock, key_of
from tests.stores.sqlite_rig import (
    BLOCKS,
    MIB,
    NEW,
    chain,
    found,
    goes_on,
    keys,
    on_disk,
    raw,
    store,
)


@pytest.fixture
def path(filled: Path) -> Path:
    return filled


@pytest.mark.parametrize("size", [1, 50, 99, 100, 4096, 32768, 50000, 1000000])
def test_a_file_that_was_cut_off_is_put_aside(path: Path, size: int) -> None:
    os.truncate(path, size)
    tier = store(path)
    with pytest.raises(StoreDamaged):
        tier.open()
    assert (path.parent / "store.db.damaged-1").stat().st_size == size
    assert found(tier, BLOCKS) == [False] * 40
    goes_on(tier)


def test_a_file_of_garbage_where_a_store_was_is_put_aside_and_the_last_one_is_kept(path: Path) -> None:
    for turn in (1, 2, 3):
        path.write_bytes(b"\xa5" * (turn * 10000))
        tier = store(path)
        with pytest.raises(StoreDamaged):
            tier.contains(keys(BLOCKS))
        aside = list(path.parent.glob("*.damaged-*"))
        assert [file.name for file in aside] == [f"store.db.damaged-{turn}"]
        assert aside[0].stat().st_size == turn * 10000
        goes_on(tier)


def test_what_was_put_aside_counts_and_makes_way_first(path: Path) -> None:
    path.write_bytes(b"\xa5" * 3 * MIB)
    tier = store(path, 5 * MIB)
    with pytest.raises(StoreDamaged):
        tier.open()
    assert tier.sizes().bytes == on_disk(path) > 3 * MIB
    more = chain(32, 2)
    for at in range(0, 32, 4):
        tier.put(more[at : at + 4])
        assert on_disk(path) <= 5 * MIB + 2**18
    assert not list(path.parent.glob("*.damaged-*"))
    assert found(tier, more) == [True] * 32
    tier.close()


def test_who_only_looks_puts_nothing_aside(path: Path) -> None:
    os.truncate(path, 50000)
    before = path.read_bytes()
    tier = store(path, mend=False)
    for _ in range(2):
        with pytest.raises(StoreDamaged):
            tier.open()
    tier.close()
    assert path.read_bytes() == before


def test_a_file_that_is_cut_off_while_it_is_open_is_put_aside(path: Path) -> None:
    tier = store(path)
    assert found(tier, BLOCKS[:2]) == [True, True]
    os.truncate(path, 100000)
    with pytest.raises(StoreDamaged):  # not a miss of some blocks: what is written now would be lost as well
        tier.get(keys(BLOCKS))
    goes_on(tier)
    assert list(path.parent.glob("*.damaged-1"))


def test_a_file_of_no_length_is_a_new_store(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    path.touch(0o644)
    tier = store(path)
    assert found(tier, NEW) == [False] * 8
    goes_on(tier)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_store_that_was_emptied_is_told_and_begun_anew(path: Path) -> None:
    os.truncate(path, 0)
    tier = store(path)
    with pytest.raises(StoreUnavailable, match="was emptied") as raised:
        tier.open()
    assert raised.value.kind == "lost"
    assert found(tier, BLOCKS) == [False] * 40
    goes_on(tier)


def text(path: Path) -> None:
    path.write_text("Dear diary, this is no database.\n" * 100)


def short(path: Path) -> None:
    path.write_bytes(b"SQLite")


def database(path: Path) -> None:
    with raw(path) as connection:
        connection.execute("CREATE TABLE recipes (name TEXT)")


def logged_database(path: Path) -> None:
    """One that is in use, with a log."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA application_id = 77")
    connection.execute("CREATE TABLE recipes (name TEXT)")
    shutil.copytree(path.parent, path.parent.parent / "copy")
    connection.close()
    shutil.rmtree(path.parent)
    os.rename(path.parent.parent / "copy", path.parent)


@pytest.mark.parametrize("make", [text, short, database, logged_database])
def test_another_application_s_file_is_left_as_it_is(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "folder" / "store.db"
    path.parent.mkdir()
    make(path)
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    tier = store(path)
    for call in (tier.open, lambda: tier.put(NEW), lambda: tier.heads(keys(NEW)), lambda: tier.claim(key_of(1))):
        with pytest.raises(StoreForeign, match="is left as it is"):
            call()
    tier.close()
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == before


def test_another_application_s_database_in_the_place_of_a_store_is_left_as_it_is(path: Path) -> None:
    path.unlink()
    database(path)
    before = path.read_bytes()
    with pytest.raises(StoreForeign):
        store(path).open()
    assert path.read_bytes() == before


def test_a_newer_version_is_left_as_it_is(path: Path) -> None:
    with raw(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    tier = store(path)
    for _ in range(2):
        with pytest.raises(StoreNewer, match="version 99, and this kvpager reads up to"):
            tier.get(keys(BLOCKS))
    tier.close()
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == before


# ---- files that go away


def delete(path: Path) -> None:
    path.unlink()


def delete_all(path: Path) -> None:
    for file in path.parent.iterdir():
        file.unlink()


def delete_folder(path: Path) -> None:
    shutil.rmtree(path.parent)


def replace(path: Path) -> None:
    other = path.parent.parent / "other" / "store.db"
    tier = store(other)
    tier.put(BLOCKS[:2])
    tier.close()
    os.replace(other, path)


@pytest.mark.parametrize("away", [delete, delete_all, delete_folder, replace])
def test_what_is_written_to_a_file_that_was_deleted_or_replaced_is_not_acknowledged(
    path: Path, away: Callable[[Path], None]
) -> None:
    tier = store(path)
    assert found(tier, BLOCKS) == [True] * 40
    away(path)
    with pytest.raises(StoreUnavailable, match="deleted or replaced") as raised:
        tier.put(NEW)
    assert raised.value.kind == "lost"
    goes_on(tier)
    assert found(tier, BLOCKS) == [away is replace] * 2 + [False] * 38
    tier.close()


@pytest.mark.parametrize("away", [delete, delete_all, delete_folder, replace])
def test_readers_see_within_a_second_that_the_file_is_gone(path: Path, away: Callable[[Path], None]) -> None:
    clock = Clock()
    tier = store(path, clock=clock)
    assert found(tier, BLOCKS) == [True] * 40
    away(path)
    assert found(tier, BLOCKS) == [True] * 40
    clock.now += 1
    with pytest.raises(StoreUnavailable, match="deleted or replaced"):
        tier.heads(keys(BLOCKS))
    assert tier.contains(keys(BLOCKS)) == [away is replace] * 2 + [False] * 38
    goes_on(tier)


def test_claims_are_kept_when_the_files_are_deleted(path: Path) -> None:
    one, two = store(path), store(path)
    assert one.claim(key_of(1))
    delete_all(path)
    with pytest.raises(StoreUnavailable):
        one.put(NEW)
    one.open()
    assert not two.claim(key_of(1)) or two.path  # the other one still has the old file open
    three = store(path)
    assert not three.claim(key_of(1))
    one.release(key_of(1))
    assert three.claim(key_of(1))
    for tier in (one, two, three):
        tier.close()


def test_a_log_that_was_deleted_loses_nothing(path: Path) -> None:
    tier = store(path)
    tier.put(NEW[:4])
    (path.parent / "store.db-wal").unlink()
    tier.put(NEW[4:])
    assert found(tier, [*BLOCKS, *NEW]) == [True] * 48
    other = store(path)
    assert found(other, [*BLOCKS, *NEW]) == [True] * 48
    other.close()
    tier.close()
    goes_on(store(path), chain(4, 5))


def test_the_log_of_a_database_that_is_gone_is_not_taken_for_the_new_one_s(path: Path) -> None:
    tier = store(path)
    tier.put(NEW)
    shutil.copy(path.parent / "store.db-wal", path.parent / "old")
    tier.close()
    path.unlink()
    (path.parent / "old").rename(path.parent / "store.db-wal")
    tier = store(path)
    assert found(tier, [*BLOCKS, *NEW]) == [False] * 48
    goes_on(tier)


# ---- others, and the disk
