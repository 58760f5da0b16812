"""A process is killed inside of what takes long (prune, erase, import, migrate): what had been stored is whole."""

from __future__ import annotations

import random
import shutil
import signal
from pathlib import Path

import pytest

from kvpager.stores.schema import MIGRATIONS, VERSION, migrate
from tests.stores.fake import key_of
from tests.stores.sqlite_rig import MINE, YOURS, chain, found, other_process, raw, store

KILLS = 8
THEIRS = [chain(4, seed, tenant=YOURS) for seed in range(20)]
OWN = [chain(4, seed, tenant=MINE) for seed in range(20, 40)]
ALL = [block for one in (*THEIRS, *OWN) for block in one]
LIMIT = 3 * 2**20  # to which it is pruned: half of it

TASK = """
    import os, signal, sqlite3, sys
    from pathlib import Path
    path, task, last = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    steps, connect = 0, sqlite3.connect

    def step(*_):  # one more statement, or so many more instructions of one
        global steps
        steps += 1
        if steps == last:
            os.kill(os.getpid(), signal.SIGKILL)

    class Counted(sqlite3.Connection):
        def __init__(self, *args, **more):
            super().__init__(*args, **more)
            self.set_trace_callback(step)
            self.set_progress_handler(step, 20)

    sqlite3.connect = lambda *args, **more: connect(*args, factory=Counted, **more)
    from kvpager.stores.schema import MIGRATIONS, migrate
    from tests.stores.sqlite_rig import MINE, store
    from tests.stores.test_kill_tasks import LATER, LIMIT
    if task == "migrate":
        migrate(sqlite3.connect(path, isolation_level=None), LATER)
    else:
        tier = store(path)
        if task == "open":
            tier.open()
        elif task == "prune":
            tier.prune(to_bytes=LIMIT)
        elif task == "erase":
            tier.erase(MINE)
        elif task == "import":
            tier.import_(path.parent / "archive")
        tier.close()
    print(steps)
"""
LATER = [
    *MIGRATIONS,
    (
        "ALTER TABLE records ADD COLUMN note BLOB DEFAULT 'none'",
        "UPDATE records SET note = key",
        "CREATE TABLE copies AS SELECT id, payload FROM payloads",
        "UPDATE blocks SET hits = hits + 1000",
    ),
]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store of two tenants, and an archive of twice as much."""
    folder = tmp_path_factory.mktemp("filled")
    whole = store(folder / "whole.db")
    for one in (*THEIRS, *OWN):
        whole.put(one)
    for number, whose in ((1, MINE), (2, YOURS)):
        whole.save_record(key_of(number), whose, b"record %d" % number)
    whole.export(folder / "archive")
    whole.close()
    (folder / "whole.db").rename(folder / "store.db")
    return folder


def begun(filled: Path, folder: Path, task: str) -> Path:
    """A copy of the store before the task, and the archive beside it."""
    folder.mkdir()
    shutil.copy(filled / "archive", folder)
    if task == "import":  # into a store that has some of it
        tier = store(folder / "store.db")
        tier.put(THEIRS[0])
        tier.save_record(key_of(2), YOURS, b"a later one")
        tier.close()
    else:
        shutil.copy(filled / "store.db", folder)
    return folder / "store.db"


def steps_of(path: Path, task: str, last: int) -> int | None:
    """Do a task, and be killed at its step number `last`: how many steps it took, or None where it was killed."""
    process = other_process(TASK, str(path), task, str(last))
    out, errors = process.communicate(timeout=60)
    assert process.returncode in (0, -signal.SIGKILL), errors
    return int(out) if process.returncode == 0 else None


def places(steps: int) -> list[int]:
    """Where to be killed: spread over all of it but its very end, for there are some steps more or less each time."""
    choose = random.Random(steps)
    part = steps * 0.98 / KILLS
    return [1 + int(place * part + choose.random() * part) for place in range(KILLS)]


def there(path: Path) -> list[bool]:
    """Which blocks are there, whole, in a store that is sound and takes more."""
    tier = store(path)
    before = found(tier, ALL)
    assert tier.verify().damaged == ()
    assert tier.put(chain(1, 99)) == 1
    assert (tier.damaged, found(tier, ALL), found(tier, chain(1, 99))) == (0, before, [True])
    tier.drop([chain(1, 99)[0].head.key])
    tier.close()
    return before


def records(path: Path) -> list[bytes | None]:
    tier = store(path)
    told = [tier.load_record(key_of(number)) for number in (1, 2)]
    tier.close()
    return told


@pytest.mark.slow
@pytest.mark.promise(4)
@pytest.mark.parametrize("task", ["prune", "erase", "import"])
def test_a_task_that_was_killed_has_lost_nothing_and_can_be_done_again(filled: Path, tmp_path: Path, task: str) -> None:
    path = begun(filled, tmp_path / "whole", task)
    before = there(path)
    steps = steps_of(path, task, -1)
    assert steps is not None
    after = there(path)
    assert after != before
    left = records(path)
    for number in places(steps):
        path = begun(filled, tmp_path / str(number), task)
        assert steps_of(path, task, number) is None
        now = there(path)
        if task == "import":
            assert all(have or not had for have, had in zip(now, before, strict=True))
            assert records(path)[1] == b"a later one"
        else:
            assert all(have or not kept for have, kept in zip(now, after, strict=True))
        if task == "erase":  # at once, or not at all
            assert now in (before, after)
            assert records(path) in (left, [b"record 1", b"record 2"])
        assert steps_of(path, task, -1) is not None
        assert (there(path), records(path)) == (after, left)
        if task == "erase":
            data = b"".join(file.read_bytes() for file in path.parent.iterdir() if file.name != "archive")
            assert not any(block.payload[0].tobytes() in data for block in ALL[len(ALL) // 2 :])
        shutil.rmtree(path.parent)


@pytest.mark.slow
def test_a_migration_that_was_killed_is_done_by_who_opens_it_next(filled: Path, tmp_path: Path) -> None:
    path = begun(filled, tmp_path / "whole", "migrate")
    steps = steps_of(path, "migrate", -1)
    assert steps is not None
    done = contents(path)
    for number in places(steps):
        path = begun(filled, tmp_path / str(number), "migrate")
        assert steps_of(path, "migrate", number) is None
        with raw(path) as connection:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            assert version in (VERSION, VERSION + 1)
        with raw(path) as connection:
            migrate(connection, LATER)
            assert connection.execute("PRAGMA user_version").fetchone() == (VERSION + 1,)
        assert contents(path) == done
        shutil.rmtree(path.parent)


def contents(path: Path) -> list[list[tuple[object, ...]]]:
    """All rows but counters, in a database that is sound."""
    with raw(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        tables = ("tenants", "blocks", "heads", "payloads", "records", "copies")
        return [sorted(connection.execute(f"SELECT * FROM {table}").fetchall()) for table in tables]


@pytest.mark.slow
def test_a_store_that_was_killed_while_it_was_made_is_made_by_who_opens_it_next(tmp_path: Path) -> None:
    steps = steps_of(tmp_path / "whole" / "store.db", "open", -1)
    assert steps is not None
    for number in places(steps):
        path = tmp_path / str(number) / "store.db"
        assert steps_of(path, "open", number) is None
        assert not any(there(path))
