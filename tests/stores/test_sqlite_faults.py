"""What the outside does to the file of a SQLite store: each time an error that says so, and then it goes on."""

import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvpager.errors import (
    StoreDamaged,
    StoreError,
    StoreForeign,
    StoreFull,
    StoreLocked,
    StoreNewer,
    StoreUnavailable,
)
from kvpager.stored import StoredBlock
from kvpager.stores.sqlite import SqliteStore
from tests.stores.fake import Clock, key_of
from tests.stores.sqlite_rig import MIB, MINE, YOURS, chain, found, keys, on_disk, other_process, raw, said, store

BLOCKS = chain(40)
NEW = chain(8, 1)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """Where a store of 40 blocks and a record lies, closed."""
    path = tmp_path / "folder" / "store.db"
    tier = store(path)
    tier.put(BLOCKS)
    tier.save_record(key_of(1), MINE, b"a record")
    tier.close()
    yield path
    left = (
        [name for name in os.listdir(path.parent) if "-wal" in name or "-shm" in name] if path.parent.exists() else []
    )
    assert [name for name in left if "damaged" not in name] == []  # whoever used it has closed it


def goes_on(tier: SqliteStore, more: list[StoredBlock] = NEW) -> None:
    assert tier.put(more) == len(more)
    assert found(tier, more) == [True] * len(more)
    tier.close()
    assert found(tier, more) == [True] * len(more)
    assert tier.verify().damaged == ()
    tier.close()


def flip(path: Path, content: bytes) -> None:
    """Change one bit of the one place in a file that has this content."""
    data = bytearray(path.read_bytes())
    assert data.count(content) == 1
    data[data.index(content) + len(content) // 2] ^= 4
    path.write_bytes(data)


# ---- rows that are not what was written


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
    assert tier.damaged == (value != "NULL")  # what is not there is not damaged
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


def test_while_another_writes_one_waits_a_little_and_says_so(path: Path) -> None:
    tier = store(path)
    with raw(path) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreLocked):
            tier.put(NEW)
        assert found(tier, BLOCKS) == [True] * 40
        other.execute("ROLLBACK")
    goes_on(tier)


def test_a_database_that_another_has_for_itself_is_opened_later(path: Path) -> None:
    tier = store(path)
    with raw(path) as other:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        for call in (tier.open, lambda: tier.contains(keys(BLOCKS)), lambda: tier.put(NEW)):
            with pytest.raises(StoreLocked):
                call()
    assert found(tier, BLOCKS) == [True] * 40
    goes_on(tier)


def test_a_clock_that_jumps_back_stops_nothing(path: Path) -> None:
    clock = Clock()
    tier = store(path, clock=clock, wall=clock)
    assert found(tier, NEW) == [False] * 8
    clock.now -= 900
    other = store(path)
    other.put(NEW)
    other.close()
    assert found(tier, [*BLOCKS, *NEW]) == [True] * 48
    path.unlink()
    with pytest.raises(StoreUnavailable):
        tier.put(chain(1, 3))
    goes_on(tier)


READ_ONLY = """
    import ctypes, json, os, sys
    from pathlib import Path
    if len(sys.argv) == 2:  # root may write anywhere: give that up (CAP_DAC_OVERRIDE), for good with the next exec
        ctypes.CDLL(None).prctl(24, 1, 0, 0, 0)
        os.execv(sys.executable, [*sys.orig_argv, "again"])
    from kvpager.errors import StoreError
    from tests.stores.fake import Clock, key_of
    from tests.stores.sqlite_rig import chain, found, keys, store
    clock = Clock()
    tier = store(Path(sys.argv[1]), clock=clock)
    result = {}
    try:
        result["found"] = sum(found(tier, chain(40)))
        result["readonly"] = tier.readonly
        result["record"] = tier.load_record(key_of(1)).decode()
        result["claim"] = tier.claim(key_of(1))
        result["blocks"] = tier.sizes().blocks
    except StoreError as error:
        result["reading"] = error.kind
    try:
        tier.put(chain(1, 1))
    except StoreError as error:
        result["writing"] = error.kind
    if "again" not in sys.argv[2:]:
        raise SystemExit("the folder can be written")
    clock.now += 10
    if tier.readonly:
        result["later"] = sum(found(tier, chain(40)))
    tier.close()
    print(json.dumps(result))
"""


@pytest.mark.parametrize("log", [False, True])
def test_a_folder_that_can_not_be_written_is_read(path: Path, log: bool) -> None:
    holder = store(path)
    if log:
        holder.open()
    before = sorted(os.listdir(path.parent))
    for file in path.parent.iterdir():
        file.chmod(0o400)
    path.parent.chmod(0o500)
    try:
        result = said(other_process(READ_ONLY, str(path)))
    finally:
        path.parent.chmod(0o700)
    assert [result.pop(name) for name in ("found", "blocks", "later")] == [40, 40, 40]
    assert result == {"readonly": True, "record": "a record", "claim": True, "writing": "readonly"}
    assert sorted(os.listdir(path.parent)) == before
    holder.close()


def test_a_folder_where_no_store_can_be_made_says_so(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        result = said(other_process(READ_ONLY, str(tmp_path / "store.db")))
    finally:
        tmp_path.chmod(0o700)
    assert result == {"reading": "readonly", "writing": "readonly"}


def test_a_path_that_can_not_be_says_so(tmp_path: Path) -> None:
    with pytest.raises(StoreForeign, match="a folder and no file"):
        store(tmp_path).open()
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailable) as raised:
        store(tmp_path / "file" / "store.db").open()
    assert raised.value.kind == "io"


SMALL_DISK = """
    import ctypes, json, os, sys
    from pathlib import Path
    folder, size = Path(sys.argv[1]), int(sys.argv[2])
    if ctypes.CDLL(None, use_errno=True).mount(b"tmpfs", bytes(folder), b"tmpfs", 0, b"size=%d" % size):
        raise SystemExit(os.strerror(ctypes.get_errno()))
    from kvpager.errors import StoreFull
    from tests.stores.sqlite_rig import MINE, chain, found, keys, on_disk, store
    path = folder / "store.db"
    mine = [chain(4, seed, tenant=MINE) for seed in range(0, 200, 2)]
    other = [chain(4, seed) for seed in range(1, 200, 2)]
    tier = store(path, 2**30)
    full = stored = 0
    try:
        for a, b in zip(mine, other):
            stored += tier.put(a) + tier.put(b)
    except StoreFull:
        full += 1
    with open(folder / "rest", "wb", buffering=0) as rest:  # somebody takes what is left
        try:
            while True:
                rest.write(bytes(4096))
        except OSError:
            pass
    try:
        tier.put(chain(4, 1000))
    except StoreFull:
        full += 1
    everything = [block for one in (*mine, *other) for block in one]
    kept = sum(found(tier, everything))
    erased = tier.erase(MINE)
    left = sum(found(tier, everything))
    written = tier.put(chain(4, 1001))
    report = tier.verify()
    tier.close()
    again = sum(found(tier, [*everything, *chain(4, 1001)]))
    tier.close()
    print(json.dumps(dict(full=full, stored=stored, kept=kept, erased=erased, left=left, written=written, again=again,
        damaged=len(report.damaged))))
"""


@pytest.mark.parametrize("size", [4 * MIB, 24 * MIB])
def test_a_full_disk_is_read_and_deleted_from_and_written_to_when_there_is_room(tmp_path: Path, size: int) -> None:
    before = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-Ur", "-m"]
    result = said(other_process(SMALL_DISK, str(tmp_path), str(size), before=before))
    assert result["full"] == 2
    assert result["stored"] >= size / 2**17
    assert result["kept"] in range(result["stored"], result["stored"] + 5)
    assert result["erased"] in (result["kept"] // 2 + extra for extra in range(-4, 5))
    assert result["left"] == result["kept"] - result["erased"]
    assert result["written"] == 4
    assert result["again"] == result["left"] + 4
    assert result["damaged"] == 0


def test_a_transaction_that_does_not_fit_changes_nothing(path: Path) -> None:
    """SQLite's own limit of pages fails as a full disk does."""
    tier = store(path)
    tier.open()
    writer = tier._database._writer
    assert writer is not None
    pages = writer.execute("PRAGMA page_count").fetchone()[0]
    writer.execute(f"PRAGMA max_page_count = {pages + 2}")
    with pytest.raises(StoreFull):
        tier.put(NEW)
    with pytest.raises(StoreFull):
        tier.save_record(key_of(1), MINE, bytes(MIB))
    assert found(tier, [*BLOCKS, *NEW]) == [True] * 40 + [False] * 8
    assert tier.load_record(key_of(1)) == b"a record"
    assert tier.sizes().blocks == 40
    assert tier.erase(YOURS) == 0
    writer.execute("PRAGMA max_page_count = 1000000")
    goes_on(tier)


def test_every_error_has_a_word_for_the_counters() -> None:
    kinds = {error.kind for error in StoreError.__subclasses__() if "kind" in vars(error)}
    assert kinds == {"damaged", "foreign", "newer", "full", "large", "locked"}
