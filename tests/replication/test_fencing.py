"""A primary that is stopped, and wakes when another has its place, writes nothing more."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import pytest

from kvpager.replication.keys import Keys
from kvpager.replication.lease import Lease
from kvpager.replication.link import Link, Refused
from kvpager.replication.scripts import APPEND, append_sum
from tests.redis_rig import RedisServer, until
from tests.replication.rig import Primary, accepted, caught_up, connector, grown, mirror, trying

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def holder(redis_server: RedisServer) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.replication.holder", str(redis_server.port)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def lines(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout


def released(process: subprocess.Popen[str], most: int) -> int:
    """Read on until that step was released, or to the end; the last one that was."""
    last = -1
    for line in lines(process):
        word, _, rest = line.strip().partition(" ")
        assert word == "released", line
        assert int(rest) == last + 1, "out of order"
        last = int(rest)
        if last >= most:
            break
    return last


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_what_was_released_is_there_and_a_sleeper_writes_nothing(
    redis_server: RedisServer, holder: subprocess.Popen[str], how: signal.Signals
) -> None:
    client, keys = redis_server.client(), Keys("pair")
    standby = mirror(redis_server.port)
    standby.start()
    last = released(holder, 100)
    os.kill(holder.pid, how)
    second = Primary(redis_server.port, owner="second")
    until(trying(second.lease.acquire), "the lease does not expire")
    known = standby.finish()
    tokens = list(known["one"].outputs[0])
    assert tokens == list(range(len(tokens)))
    assert len(tokens) > last
    second.journal.adopt(known)
    second.journal.start()
    second.told(grown("one", 0, 5 + len(tokens), 6 + len(tokens), 5000))
    before = client.xlen(keys.stream), client.get(keys.tail), client.hgetall(keys.requests)
    if how == signal.SIGSTOP:
        os.kill(holder.pid, signal.SIGCONT)
    rest = lines(holder).read().splitlines()
    numbers = [int(line.partition(" ")[2]) for line in rest if line.startswith("released")]
    assert all(number < len(tokens) for number in numbers), "released what the other does not know"
    if how == signal.SIGSTOP:
        assert rest[-1] == "lost lost False"
    assert (client.xlen(keys.stream), client.get(keys.tail), client.hgetall(keys.requests)) == before
    assert caught_up(mirror(redis_server.port)).requests()["one"].outputs == [[*tokens, 5000]]
    second.journal.close()


def test_every_write_is_refused_once_the_lease_is_anothers(redis_server: RedisServer) -> None:
    client = redis_server.client()
    with Primary(redis_server.port) as primary:
        primary.journal.accept(accepted("one"))
        primary.told(grown("one", 0, 0, 6, 1))
        before = {key: client.dump(key) for key in client.scan_iter()}
        client.set(primary.lease.keys.lease, primary.lease.epoch + 1)
        done = primary.step(grown("one", 0, 6, 7, 2))
        assert primary.lost.wait(20)
        assert not done.is_set()
        assert primary.journal.stats().state == "lost"
        assert not primary.journal.resumable("one")
        late = primary.step(grown("one", 0, 7, 8, 3))
        client.delete(primary.lease.keys.lease)
        after = {key: client.dump(key) for key in client.scan_iter()}
        assert after == {key: value for key, value in before.items() if b"lease" not in key}
        primary.journal.close(0.1)
        assert not done.is_set()
        assert not late.is_set()


def todo(epoch: int, number: int, begin: bool = False, whole: Sequence[str] = ()) -> bytes:
    """What the script is told to do."""
    told = {"epoch": str(epoch), "number": str(number), "begin": begin, "trim": "", "whole": list(whole), "dropped": []}
    return json.dumps(told).encode()


REFUSED = [
    (0, 0, b"entry", "BEHIND"),
    (0, 3, b"entry", "BEHIND"),
    (1, 1, b"entry", "FENCED"),
    (0, 1, b"Entry", "DAMAGED"),
]


@pytest.mark.parametrize(("epoch", "ahead", "entry", "word"), REFUSED)
def test_the_script_itself_refuses(redis_server: RedisServer, epoch: int, ahead: int, entry: bytes, word: str) -> None:
    with Primary(redis_server.port) as primary:
        primary.journal.accept(accepted("one"))
        primary.told(grown("one", 0, 0, 6, 1))
        keys = primary.lease.keys
        all_keys = (keys.lease, keys.tail, keys.stream, keys.requests)
        number = int(redis_server.client().get(keys.tail).partition(b"-")[2]) + (ahead or -1)
        told = todo(primary.lease.epoch + epoch, number)
        link = Link(connector(redis_server.port), keys.stream)
        with pytest.raises(Refused, match=word):
            link.call(APPEND, all_keys, [append_sum(all_keys, told, b"entry", []), told, entry, b"slots"])
        link.close()


def test_an_entry_that_is_sent_twice_is_there_once(redis_server: RedisServer) -> None:
    lease = Lease(connector(redis_server.port), "pair", "first", 60.0)
    assert lease.acquire()
    keys = (lease.keys.lease, lease.keys.tail, lease.keys.stream, lease.keys.requests)
    told = todo(lease.epoch, 1, begin=True, whole=["é"])
    arguments = [append_sum(keys, told, b"entry", [b"whole"]), told, b"entry", b"slots", b"whole"]
    link = Link(connector(redis_server.port), keys[2])
    for _ in range(2):
        assert link.call(APPEND, keys, arguments) == [f"{lease.epoch}-1".encode()]
    client = redis_server.client()
    assert client.xlen(keys[2]) == 1
    assert client.hgetall(keys[3]) == {"é".encode(): b"whole"}
    client.script_flush()  # as a server that was restarted
    assert link.call(APPEND, keys, arguments) == [f"{lease.epoch}-1".encode()]
    link.close()
