"""``kvpager failover``, and what ``serve`` says about options of a pair that don't fit."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest

from kvpager.cli.main import main
from kvpager.pairs import PairOptions
from kvpager.replication.lease import Lease
from tests.redis_rig import RedisServer


@pytest.fixture
def secret(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis"), password="hush") as server:
        yield server


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["serve", "--role", "primary"], "needs both"),
        (["serve", "--peer", "redis://localhost"], "needs both"),
        (["serve", "--role", "standby", "--peer", "http://me:hush@there"], "peer: URLs begin with"),
        (["failover", "--peer", "redis://me:hush@there:x"], "peer: the URL names no host"),
        (["failover", "--peer", "redis://:hush@there", "--cluster-name", "a b"], "name: 'a b'"),
    ],
)
def test_what_is_wrong_is_told_in_a_line(capsys: pytest.CaptureFixture[str], options: list[str], said: str) -> None:
    assert main(options) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "hush" not in error


def test_a_redis_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["failover", "--peer", "redis://:hush@127.0.0.1:1"]) == 1
    error = capsys.readouterr().err
    assert "redis://127.0.0.1:1 can't be asked" in error
    assert "hush" not in error


def test_who_is_the_primary(capsys: pytest.CaptureFixture[str], secret: RedisServer) -> None:
    command = ["failover", "--peer", secret.url, "--status"]
    assert main(command) == 1
    assert "no node is the primary" in capsys.readouterr().out
    lease = Lease(PairOptions(secret.url).connect(), "kvpager", "one", 60.0)
    assert lease.acquire()
    assert main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["primary"], told["epoch"], told["changed"]) == ("one", lease.epoch, False)
    lease.close()


def test_another_takes_over_or_nobody_does(capsys: pytest.CaptureFixture[str], secret: RedisServer) -> None:
    connect = PairOptions(secret.url).connect()
    one, other = (Lease(connect, "kvpager", name, 60.0) for name in ("one", "other"))
    assert one.acquire()
    assert main(["failover", "--peer", secret.url, "--wait", "0.2"]) == 1
    assert "no other node took over" in capsys.readouterr().out

    def hand_over() -> None:
        while one.renew() != "asked":
            pass
        one.release()
        assert other.acquire()

    working = threading.Thread(target=hand_over)
    working.start()
    assert main(["failover", "--peer", secret.url]) == 0
    working.join()
    assert "other is the primary" in capsys.readouterr().out
    one.close()
    other.close()
