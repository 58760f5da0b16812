"""Several processes on one store."""

import os
import signal
from pathlib import Path

import pytest

from tests.stores.disk import RECORD, fill, opened, run, there
from tests.stores.sqlite_rig import other_process, said

PROCESSES = 3
EACH = 40

WRITE_AND_READ = """
    import json, sys
    from pathlib import Path
    from tests.stores.disk import blocks, opened, there
    from tests.stores.fake import NOBODY, SETTLED, Clock, key_of
    path, mine, processes, each = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    clock = Clock()
    store = opened(path, clock, busy_ms=1000)
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(mine, processes * each, processes):  # every so many
        assert store.put(blocks([number])) == 1
        assert store.save_record(key_of(10**6 + mine), NOBODY, b"%d" % number)
        there(store, range(0, processes * each, 7))
        clock.now += 0.01  # much less than what counts as slow for a call of another thread
    assert store.flush(SETTLED)
    print("written", flush=True)
    sys.stdin.readline()
    clock.now += 10
    stats = store.stats()
    print(json.dumps(dict(found=there(store, range(processes * each)), stored=stats.stored, damaged=stats.damaged,
        errors=stats.errors, state=stats.state)))
    store.close()
"""


def test_processes_write_to_one_store_at_once_and_find_what_the_others_wrote(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    children = [
        other_process(
            WRITE_AND_READ, str(path), str(i), str(PROCESSES), str(EACH), before=["env", f"PYTHONHASHSEED={i + 1}"]
        )
        for i in range(PROCESSES)
    ]
    for word in ("ready", "written"):
        for child in children:
            assert child.stdout is not None
            assert child.stdin is not None
            line = child.stdout.readline()
            assert line == word + "\n", child.communicate()[1]
        for child in children:
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()
    everything = list(range(PROCESSES * EACH))
    results = [said(child) for child in children]
    for result in results:
        assert result["found"] == everything
        assert (result["stored"], result["damaged"], result["state"]) == (EACH, 0, "ok")
        assert set(result["errors"]) <= {"locked"}  # waited for
    store = opened(path)
    assert there(store, everything) == everything
    assert store.stats().records == PROCESSES
    store.close()


READ = """
    import json, sys
    from pathlib import Path
    from tests.stores.disk import RECORD, opened, there
    store = opened(Path(sys.argv[1]))
    print(json.dumps(dict(found=there(store, range(5)), record=store.load_record(RECORD).decode(), seed=hash("a"))))
    store.close()
"""


def test_a_process_with_another_seed_of_hashes_finds_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    fill(path, 5)
    results = [run(READ, str(path), before=["env", f"PYTHONHASHSEED={seed}"]) for seed in (1, 2)]
    assert results[0].pop("seed") != results[1].pop("seed")
    assert results[0] == results[1] == {"found": [0, 1, 2, 3, 4], "record": "a record"}


CLAIM = """
    import sys
    from pathlib import Path
    from tests.stores.disk import RECORD, opened
    store = opened(Path(sys.argv[1]))
    print(store.claim(RECORD), flush=True)
    sys.stdin.readline()
    store.release(RECORD)
    print("released", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["released", "killed"])
def test_a_record_is_claimed_by_one_process_at_a_time(tmp_path: Path, how: str) -> None:
    path = tmp_path / "store.db"
    fill(path, 1)
    other = other_process(CLAIM, str(path))
    assert other.stdout is not None
    assert other.stdin is not None
    assert other.stdout.readline() == "True\n"
    store = opened(path)
    assert not store.claim(RECORD)
    if how == "killed":
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
    else:
        other.stdin.write("\n")
        other.stdin.flush()
        assert other.stdout.readline() == "released\n"
    assert store.claim(RECORD)
    assert not store.claim(RECORD)
    other.kill()
    other.communicate()
    store.close()
