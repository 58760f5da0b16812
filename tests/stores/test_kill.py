"""A process that writes is killed at random moments: what it was told is stored is there, and right."""

import json
import os
import random
import signal
import subprocess
from pathlib import Path

import pytest

from kvpager.stores.chain import Chain
from tests.stores.disk import RECORD, opened, there
from tests.stores.fake import key_of
from tests.stores.sqlite_rig import other_process

KILLS = 50
LONGEST_S = 0.05  # between the acknowledgement after which it is killed and the kill

WRITE = """
    import json, random, sys
    from pathlib import Path
    from kvpager.stored import Scores
    from tests.stores.disk import RECORD, blocks, opened
    from tests.stores.fake import NOBODY, SETTLED, key_of
    path, synchronous, first, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    choose = random.Random(seed)
    store = opened(path, synchronous=synchronous)
    while True:
        numbers = range(first, first + choose.randint(1, 12))
        first = numbers.stop
        assert store.put(blocks(numbers)) == len(numbers)
        assert store.save_record(RECORD, NOBODY, b"%d" % first)
        store.update([Scores(key_of(number), b"%d" % first, 1) for number in numbers], first)
        dropped = [number for number in numbers if choose.random() < 0.2]
        if choose.random() < 0.5:
            assert store.flush(SETTLED)
        store.drop([key_of(number) for number in dropped])
        assert store.flush(SETTLED)
        print(json.dumps(dict(stored=list(numbers), dropped=dropped)), flush=True)
"""


@pytest.mark.slow
def test_what_was_acknowledged_survives_kills_at_random_moments(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    choose = random.Random(20)
    stored: dict[int, bytes] = {}  # what must be there: its scores
    dropped: set[int] = set()
    latest = first = 0
    for kill in range(KILLS):
        arguments = [str(path), ("normal", "full")[kill % 2], str(first), str(kill)]
        for line in killed(other_process(WRITE, *arguments), choose):
            said = json.loads(line)
            latest = said["stored"][-1] + 1
            dropped.update(said["dropped"])
            stored.update({number: b"%d" % latest for number in said["stored"] if number not in said["dropped"]})
        store = opened(path)
        first = record(store)
        assert first >= latest  # what was not acknowledged may be there too
        first += 100
        sample = choose.sample(sorted(stored), min(len(stored), 100))
        check(store, sample if kill < KILLS - 1 else sorted(stored), dropped, stored)
        store.close()
    assert len(stored) > KILLS
    assert len(dropped) > 10


def killed(process: subprocess.Popen[str], choose: random.Random) -> list[str]:
    """The whole lines that a process has written before it was killed, some time after one of the first."""
    assert process.stdout is not None
    assert process.stderr is not None
    lines = [process.stdout.readline() for _ in range(choose.randint(1, 5))]
    assert lines[0], process.stderr.read()
    try:
        process.wait(choose.uniform(0, LONGEST_S))
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGKILL)
    rest, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, errors
    return [line for line in [*lines, *rest.splitlines(keepends=True)] if line.endswith("\n")]


def record(store: Chain) -> int:
    found = store.load_record(RECORD)
    assert found is not None
    return int(found)


def check(store: Chain, numbers: list[int], dropped: set[int], scores: dict[int, bytes]) -> None:
    assert there(store, numbers) == numbers
    for head in store.heads([key_of(number) for number in numbers]):
        assert head is not None
        assert (head.scores, head.hits) == (scores[int.from_bytes(head.key, "big")], 1)
    assert there(store, sorted(dropped)) == []
    assert store.tick >= max(int(score) for score in scores.values())
    stats = store.stats()
    assert (stats.state, stats.errors, stats.damaged) == ("ok", {}, 0)
