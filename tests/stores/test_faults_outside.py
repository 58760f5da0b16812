"""Faults of docs/stores.md's table, as in test_faults: what the disk, other processes and clocks do."""

import os
import shutil
import sqlite3
import subprocess
from pathlib import Path

import pytest

from kvpager.stores.chain import Chain
from kvpager.stores.limits import Limits
from kvpager.stores.sqlite import SqliteStore
from tests.stores.disk import LIMIT, blocks, fill, goes_on, opened, quiet, run, there, told
from tests.stores.fake import NOBODY, SETTLED, Clock, key_of
from tests.stores.sqlite_rig import other_process

pytestmark = pytest.mark.promise(4)

READ_ONLY = """
    import ctypes, json, os, sys
    from pathlib import Path
    if len(sys.argv) == 2:  # root may write anywhere: give that up (CAP_DAC_OVERRIDE), for good with the next exec
        ctypes.CDLL(None).prctl(24, 1, 0, 0, 0)
        os.execv(sys.executable, [*sys.orig_argv, "again"])
    import logging
    from tests.stores.disk import RECORD, block, opened, there
    from tests.stores.fake import NOBODY, SETTLED, Clock
    lines = []
    logging.getLogger("kvpager.stores").addHandler(logging.NullHandler())
    logging.getLogger("kvpager.stores").addFilter(lambda record: lines.append(record.getMessage()) or True)
    try:
        open(Path(sys.argv[1]).parent / "new", "w")
    except PermissionError:
        pass
    else:
        raise SystemExit("the folder can be written")
    clock = Clock()
    store = opened(Path(sys.argv[1]), clock)
    found = there(store, range(5))
    record = store.load_record(RECORD)
    for number in (20, 21, 22):
        store.put([block(number)])
        assert store.flush(SETTLED)
    clock.now += 1
    after = there(store, range(5))
    refused = store.put([block(23)])
    claimed = store.claim(RECORD)
    stats = store.stats()
    store.close()
    print(json.dumps(dict(found=found, after=after, record=record and record.decode(), refused=refused, claimed=claimed,
        state=stats.state, errors=stats.errors, skipped=stats.skipped, lines=lines)))
"""


@pytest.mark.parametrize("exists", [True, False])
def test_a_folder_that_can_not_be_written_is_read(path: Path, exists: bool) -> None:
    if exists:
        fill(path, 5)
        os.chmod(path, 0o400)
    else:
        path.parent.mkdir()
    names = sorted(os.listdir(path.parent))
    os.chmod(path.parent, 0o500)
    try:
        result = run(READ_ONLY, str(path))
    finally:
        os.chmod(path.parent, 0o700)
    assert result["found"] == result["after"] == (list(range(5)) if exists else [])
    assert result["record"] == ("a record" if exists else None)
    assert result["refused"] == 0
    assert result["claimed"]
    assert result["state"] == "readonly"
    assert result["errors"] == {"readonly": 1}
    assert sum("readonly" in line for line in result["lines"]) == 1
    assert sorted(os.listdir(path.parent)) == names


FULL_DISK = """
    import ctypes, json, logging, os, resource, sys
    from pathlib import Path
    folder, way, size = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    if way == "rlimit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * size, resource.RLIM_INFINITY))
    elif ctypes.CDLL(None, use_errno=True).mount(b"tmpfs", bytes(folder), b"tmpfs", 0, b"size=%d" % size):
        raise SystemExit(os.strerror(ctypes.get_errno()))
    from tests.stores.disk import block, blocks, goes_on, opened, there
    from tests.stores.fake import NOBODY, SETTLED, Clock
    MINE = b"mine".ljust(16, b"\\0")
    lines = []
    logging.getLogger("kvpager.stores").addHandler(logging.NullHandler())
    logging.getLogger("kvpager.stores").addFilter(lambda record: lines.append(record.getMessage()) or True)
    clock = Clock()
    path = folder / "store.db"
    store = opened(path, clock)
    taken = 0
    while store.stats().state == "ok" and taken < 2000:
        taken += store.put([block(taken, tenant=MINE if taken % 2 else NOBODY)])
        assert store.flush(SETTLED)
    full = store.stats()
    kept = there(store, range(taken))
    refused = store.put([block(5000)])
    told = len(lines)
    if way == "rlimit":  # a file that may not grow is not helped by what is deleted
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        clock.now += 1000
    erased = store.erase(MINE).wait()
    after = there(store, range(taken))
    clock.now += 1000
    goes_on(store, 6000)
    state = store.stats().state
    store.close()
    store = opened(path)
    again = there(store, [*range(taken), 6001])
    store.close()
    print(json.dumps(dict(state=full.state, errors=full.errors, stored=full.stored, skipped=full.skipped, taken=taken,
        kept=kept, refused=refused, told=told, erased=erased, after=after, end=state, again=again, lines=lines)))
"""

WAYS = [("tmpfs", ["unshare", "-m"]), ("tmpfs", ["unshare", "-Ur", "-m"]), ("rlimit", [])]


def test_a_full_disk_stops_writing_and_nothing_else(tmp_path: Path) -> None:
    way, before = next((way, before) for way, before in WAYS if allowed(tmp_path, way, before))
    result = run(FULL_DISK, str(tmp_path), way, str(24 * 2**20), before=before)
    kinds = {"full"} if way == "tmpfs" else {"full", "io"}
    assert result["state"] in kinds
    assert set(result["errors"]) <= kinds
    assert result["stored"] + result["skipped"] == result["taken"]
    assert 50 < result["stored"] < 1500
    assert len(result["kept"]) == result["stored"]
    assert result["refused"] == 0
    assert result["told"] == (1 if result["state"] == "full" else 2)  # "io" is told, and then that it is out of use
    mine = [number for number in result["kept"] if number % 2]
    assert result["erased"] == len(mine)
    assert result["after"] == [number for number in result["kept"] if number % 2 == 0]
    assert result["end"] == "ok"
    assert result["again"] == [*result["after"], 6001]


def allowed(folder: Path, way: str, before: list[str]) -> bool:
    """Whether a small disk can be made in this way here: not everywhere may one mount something."""
    if way == "rlimit":
        return True
    mount = [*before, "mount", "-t", "tmpfs", "tmpfs", str(folder)]
    return shutil.which("unshare") is not None and subprocess.run(mount, capture_output=True).returncode == 0


LOCKED = """
    import sqlite3, sys
    connection = sqlite3.connect(sys.argv[1], isolation_level=None)
    connection.execute(sys.argv[2])
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_store_that_another_process_locks_is_read_and_written_to_later(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(path, 3)
    clock = Clock()
    store = opened(path, clock)
    other = other_process(LOCKED, str(path), "BEGIN IMMEDIATE")
    assert other.stdout is not None
    assert other.stdout.readline() == "locked\n"
    assert store.put(blocks([20, 21])) == 2
    assert store.save_record(key_of(22), NOBODY, b"waits")
    assert not store.flush(0.5)
    assert store.stats().state == "locked"
    assert there(store, [0, 1, 2, 20, 21]) == [0, 1, 2, 20, 21]
    assert store.load_record(key_of(22)) == b"waits"
    other.communicate("")
    clock.now += 100
    assert store.flush(SETTLED)
    assert store.stats().state == "ok"
    assert set(store.stats().errors) == {"locked"}
    assert told(caplog, "locked") <= 2  # the first time, and when it was out of use
    goes_on(store)
    store.close()
    again = opened(path)
    assert there(again, [20, 21]) == [20, 21]
    assert again.load_record(key_of(22)) == b"waits"
    again.close()


def test_a_store_that_is_locked_when_it_is_opened_is_opened_later(path: Path) -> None:
    fill(path, 3)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("PRAGMA locking_mode = EXCLUSIVE")
    holder.execute("BEGIN EXCLUSIVE")
    clock = Clock()
    store = opened(path, clock)
    assert there(store, range(3)) == []
    assert store.stats().state == "locked"
    store.put(blocks([20]))
    assert there(store, [20]) == [20]
    holder.execute("ROLLBACK")
    holder.close()
    clock.now += 100
    assert store.flush(SETTLED)
    assert there(store, [0, 1, 2, 20]) == [0, 1, 2, 20]
    assert store.stats().state == "ok"
    store.close()


class SlowStore(SqliteStore):
    """Each read takes two seconds of its clock, while `slow`."""

    slow = True
    reads = 0

    def __init__(self, path: Path, clock: Clock) -> None:
        super().__init__(path, limit_bytes=LIMIT, clock=clock)
        self._time = clock

    def get(self, keys):  # type: ignore[no-untyped-def]
        self.reads += 1
        self._time.now += 2 * self.slow
        return super().get(keys)


def test_a_slow_disk_is_left_alone(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(path, 100)
    clock = Clock()
    tier = SlowStore(path, clock)
    store = Chain([lambda: tier], Limits(slow_s=1, failures=3, pause_s=60), clock)
    found = there(store, range(100))
    assert found == list(range(24))  # three reads of eight blocks
    assert clock.now == Clock().now + 6
    assert there(store, range(100)) == []
    assert tier.reads == 3
    assert (store.stats().state, store.stats().errors) == ("slow", {"slow": 3})
    assert told(caplog, "slow") <= 2
    tier.slow = False
    clock.now += 61
    assert there(store, range(100)) == list(range(100))
    goes_on(store)
    assert store.stats().state == "ok"
    store.close()


def test_clocks_that_jump_back_change_nothing(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(path, 3)
    clock, wall = Clock(), Clock()
    store = Chain([lambda: SqliteStore(path, limit_bytes=LIMIT, clock=clock, wall=wall)], Limits(pause_s=5), clock)
    store.put(blocks([3]))
    assert store.flush(SETTLED)
    clock.now -= 900
    wall.now -= 10**9
    assert there(store, range(4)) == list(range(4))
    other = opened(path)
    other.put(blocks([4]))
    other.close()
    clock.now += 1
    assert store.heads([key_of(4)])[0] is not None  # what others write is found as soon as ever
    assert there(store, range(5)) == list(range(5))
    goes_on(store)
    assert (store.stats().state, store.stats().errors) == ("ok", {})
    assert quiet(caplog)
    store.close()
    again = opened(path)
    assert there(again, range(5)) == list(range(5))
    again.close()
