"""Faults of docs/stores.md's table, a test a row, with real files: pages and files that are not what they were.

Each time: nothing is raised, what is found is right, the fault is counted, the log has one line for it, nothing that
was acknowledged is lost (but with its file), and the store goes on where that is possible.
"""

import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.stores.disk import RECORD, block, blocks, fill, flip, goes_on, opened, quiet, there, told
from tests.stores.fake import NOBODY, SETTLED, Clock, key_of

pytestmark = pytest.mark.promise(4)


def test_a_damaged_page_is_a_miss_of_its_block_alone(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(path, 10)
    flip(path, block(3).payload[7, 100:200].tobytes())
    store = opened(path)
    assert [head is not None for head in store.heads([key_of(i) for i in range(10)])] == [True] * 10
    assert there(store, range(10)) == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert store.stats().damaged == 1
    assert len(caplog.records) == 1
    assert store.contains([key_of(3)]) == [False]  # it can be stored again
    assert store.put([block(3)]) == 1
    goes_on(store)
    store.close()
    again = opened(path)
    assert there(again, range(10)) == list(range(10))
    assert (again.stats().damaged, again.stats().state) == (0, "ok")
    again.close()


PAYLOAD = "(SELECT payload FROM payloads WHERE id = (SELECT id FROM blocks WHERE key = :two))"


@pytest.mark.parametrize(
    "value",
    ["x''", "substr(payload, 1, length(payload) / 2)", PAYLOAD, "zeroblob(length(payload))"],
    ids=["emptied", "cut in half", "wrong key", "zeros"],
)
def test_a_block_that_is_cut_off_or_another_s_is_a_miss(
    path: Path, caplog: pytest.LogCaptureFixture, value: str
) -> None:
    fill(path, 4)
    change = f"UPDATE payloads SET payload = {value} WHERE id = (SELECT id FROM blocks WHERE key = :one)"
    connection = sqlite3.connect(path)
    with connection:
        assert connection.execute(change, {"one": key_of(1), "two": key_of(2)}).rowcount == 1
    connection.close()
    store = opened(path)
    assert there(store, range(4)) == [0, 2, 3]
    assert store.stats().damaged == 1
    assert len(caplog.records) == 1
    assert store.put([block(1)]) == 1
    assert store.flush(SETTLED)
    assert there(store, range(4)) == [0, 1, 2, 3]
    store.close()


def test_a_damaged_record_is_a_miss(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(path, 2)
    flip(path, b"a record")
    store = opened(path)
    assert store.load_record(RECORD) is None
    assert store.stats().damaged == 1
    assert len(caplog.records) == 1
    assert there(store, range(2)) == [0, 1]
    assert store.flush(SETTLED)
    assert store.stats().records == 0
    store.close()


# ---- files that are not what they were


@pytest.mark.parametrize("size", [50, 100, 40000, 300000])
def test_a_truncated_file_is_put_aside_and_begun_anew(path: Path, caplog: pytest.LogCaptureFixture, size: int) -> None:
    fill(path, 10)
    os.truncate(path, size)
    store = opened(path)
    there(store, range(10))
    store.put(blocks([20]))
    assert store.flush(SETTLED)
    there(store, range(10))
    goes_on(store)
    stats = store.stats()
    assert stats.state == "ok"
    assert stats.damaged + sum(stats.errors.values()) >= 1
    assert told(caplog, "damaged") + told(caplog, "lost") <= 2  # one for reading, one for writing
    store.close()
    again = opened(path)
    assert there(again, [20, 1001]) == [20, 1001]
    again.close()


def test_a_file_that_is_truncated_while_it_is_open_is_begun_anew(path: Path) -> None:
    store = opened(path)
    store.put(blocks(range(300)))  # more than the log holds
    assert store.flush(SETTLED)
    os.truncate(path, 100000)
    there(store, range(300))
    for number in (400, 401, 402):
        store.put(blocks([number]))
        assert store.flush(SETTLED)
    goes_on(store)
    assert store.stats().state == "ok"
    store.close()
    again = opened(path)
    assert there(again, [1001]) == [1001]
    again.close()


def test_a_file_of_no_length_is_a_new_store(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.parent.mkdir(mode=0o700)
    path.touch()
    store = opened(path)
    assert there(store, range(3)) == []
    goes_on(store)
    assert store.stats().errors == {}
    assert quiet(caplog)
    store.close()


def test_a_store_that_was_emptied_is_begun_anew_and_told(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(path, 3)
    os.truncate(path, 0)
    store = opened(path)
    assert there(store, range(3)) == []
    goes_on(store)
    assert store.stats().errors == {"lost": 1}
    assert told(caplog, "lost") == 1
    store.close()


def other_text(path: Path) -> None:
    path.write_text("Dear diary, this is no database.\n" * 100)


def other_database(path: Path) -> None:
    connection = sqlite3.connect(path)
    with connection:
        connection.execute("CREATE TABLE recipes (name TEXT)")
        connection.execute("INSERT INTO recipes VALUES ('soup')")
    connection.close()


@pytest.mark.parametrize("make", [other_text, other_database])
def test_another_application_s_file_is_left_as_it_is(
    path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[Path], None]
) -> None:
    path.parent.mkdir()
    make(path)
    left_alone(path, caplog, "foreign")


def test_what_is_no_file_is_left_as_it_is(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.parent.mkdir()
    os.mkfifo(path, 0o644)
    store = opened(path)
    assert store.put([block(1)]) == 0
    assert (store.stats().state, store.stats().errors) == ("off", {"foreign": 1})
    store.close()
    assert told(caplog, "foreign") == 1
    assert path.stat().st_mode & 0o777 == 0o644
    assert os.listdir(path.parent) == [path.name]


def test_files_of_others_beside_it_are_left_as_they_are(path: Path) -> None:
    path.parent.mkdir()
    lock, theirs = path.with_name(path.name + ".lock"), path.parent / "theirs"
    lock.write_text("packages = 3\n")
    store = opened(path)
    assert (store.stats().state, store.stats().errors) == ("off", {"foreign": 1})
    store.close()
    assert lock.read_text() == "packages = 3\n"
    lock.unlink()
    theirs.write_text("a diary")
    lock.symlink_to(theirs)
    path.with_name(path.name + ".reserve").symlink_to(theirs)
    store = opened(path)
    assert store.stats().state == "io"
    store.close()
    lock.unlink()
    store = opened(path)
    goes_on(store)
    store.close()
    assert theirs.read_text() == "a diary"


def test_a_store_of_a_newer_version_is_left_as_it_is(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(path, 3)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    left_alone(path, caplog, "newer")


def left_alone(path: Path, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    before, names = path.read_bytes(), sorted(os.listdir(path.parent))
    store = opened(path)
    assert there(store, range(3)) == []
    assert store.heads([key_of(1)]) == [None]
    assert store.load_record(RECORD) is None
    assert store.put([block(1)]) == 0
    assert store.room == 0
    assert not store.save_record(RECORD, NOBODY, b"")
    assert store.claim(RECORD)
    assert store.erase(NOBODY).wait() == 0
    assert (store.stats().state, store.stats().errors) == ("off", {kind: 1})
    store.close()
    assert len(caplog.records) == 1
    assert told(caplog, kind) == 1
    assert path.read_bytes() == before
    assert sorted(os.listdir(path.parent)) == names


@pytest.mark.parametrize("how", ["deleted", "folder", "replaced"])
def test_a_file_that_is_deleted_under_us_is_begun_anew(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    fill(path, 10)
    clock = Clock()
    store = opened(path, clock)
    assert there(store, range(10)) == list(range(10))
    if how == "replaced":
        other = tmp_path / "other.db"
        fill(other, 2)
        os.replace(other, path)
    elif how == "folder":
        shutil.rmtree(path.parent)
    else:
        path.unlink()
    clock.now += 2  # it is looked at once a second
    there(store, range(10))  # misses, or what is still open
    store.put(blocks([20, 21]))
    assert store.flush(SETTLED)
    assert there(store, [20, 21]) == [20, 21]
    assert there(store, range(10)) == ([0, 1] if how == "replaced" else [])
    goes_on(store)
    assert store.stats().state == "ok"
    assert set(store.stats().errors) == {"lost"}
    assert told(caplog, "lost") <= 2  # one for reading, one for writing
    store.close()
    again = opened(path)
    assert there(again, [20, 21, 1001]) == [20, 21, 1001]
    again.close()


def test_a_store_stays_within_its_limit_over_restarts_and_after_it_was_deleted(path: Path) -> None:
    limit, written = 5 * 10**6, 0
    for _ in range(3):
        store = opened(path, limit_bytes=limit)
        for _ in range(8):
            assert store.put(blocks(range(written, written + 40))) == 40
            written += 40
            assert store.flush(SETTLED)
            on_disk = sum(file.stat().st_size for file in path.parent.iterdir())
            assert on_disk <= limit + limit // 8  # a batch beside it
            assert store.stats().bytes == on_disk
            assert there(store, [written - 1]) == [written - 1]
        assert store.stats().dropped > 200
        assert 20 < store.stats().blocks < 80
        store.close()
    path.unlink()
    store = opened(path, limit_bytes=limit)
    goes_on(store)
    store.close()


# ---- what the disk and others do


def test_a_file_that_is_deleted_is_noticed_by_who_asks_for_the_state_alone(path: Path) -> None:
    fill(path, 3)
    clock = Clock()
    store = opened(path, clock)
    assert store.states == {"local": "ok"}
    path.unlink()
    clock.now += 1
    assert store.states == {"local": "ok"}  # begun anew, and counted
    assert store.stats().errors == {"lost": 1}
    goes_on(store)
    store.close()


def test_the_first_line_of_the_log_says_what_is_known(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.parent.mkdir()
    other_text(path)
    opened(path).close()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"store: not opened: foreign: {path} is no store of kvpager's")
    assert line.endswith("is left as it is; it is off for good")
