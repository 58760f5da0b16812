"""What others and the disk do to a SQLite store: each time an error that says so, and then it goes on."""

import os
from pathlib import Path

import pytest

from kvpager.errors import (
    StoreError,
    StoreForeign,
    StoreFull,
    StoreLocked,
    StoreUnavailable,
)
from tests.stores.fake import Clock, key_of
from tests.stores.sqlite_rig import (
    BLOCKS,
    MIB,
    MINE,
    NEW,
    YOURS,
    chain,
    found,
    goes_on,
    keys,
    other_process,
    raw,
    said,
    store,
)


@pytest.fixture
def path(filled: Path) -> Path:
    return filled


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
    with pytest.raises(StoreUnavailable, match="a file stands where its folder should be") as raised:
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
