"""Two real servers over a real Redis: one is killed, stopped or asked to hand over, and clients get the rest."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpager.replication.entries import read_entry
from kvpager.replication.keys import Keys
from kvpager.replication.limits import Limits
from tests.redis_rig import RedisServer
from tests.replication.pair import KVPAGER, Pair, Reader, Served, asked, readers, until
from tests.small_llm import save_folder

pytestmark = pytest.mark.slow
TOKENS = 300
KEYS = Keys("kvpager")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def undisturbed(model: str, tmp_path_factory: pytest.TempPathFactory) -> list[Reader]:
    """What a single server without a journal answers to the same requests."""
    with Served(model, tmp_path_factory.mktemp("alone") / "log") as alone:
        until(lambda: alone.ready, "it is not ready")
        return [reader.join() for reader in readers([alone.url], asked(TOKENS), "alone")]


@pytest.fixture
def pair(model: str, redis_server: RedisServer, tmp_path: Path) -> Iterator[Pair]:
    with Pair(model, tmp_path, redis_server.url) as both:
        yield both


def under_way(reading: list[Reader], tokens: int = 20) -> None:
    """Wait until every client has had so much."""
    until(lambda: all(reader.count >= tokens or reader.done for reader in reading), "the streams do not run")


def require_same(reading: list[Reader], undisturbed: list[Reader]) -> None:
    """All have ended as they would have: no token twice, none missing, the same text."""
    for reader, expected in zip(reading, undisturbed, strict=True):
        reader.join()
        assert reader.text == expected.text
        assert reader.tokens == expected.tokens
        assert reader.count == expected.count == TOKENS
        counts = [int(event.id.rstrip(".")) for event in reader.events]
        assert counts == sorted(counts)
        assert reader.events[-1].finish == expected.events[-1].finish == "length"


def test_killed_primary(pair: Pair, undisturbed: list[Reader]) -> None:
    primary, standby = pair.settled()
    assert standby.client.get("/ready").status_code == 503
    assert standby.client.get("/ready").headers["retry-after"]
    health = standby.health()["replication"]
    assert health["primary"] == primary.health()["replication"]["node"]
    refused = standby.client.post("/v1/completions", json={"prompt": "x"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_standby")
    reading = readers([primary.url, standby.url], asked(TOKENS), "killed")
    under_way(reading)
    primary.kill()
    require_same(reading, undisturbed)
    assert all(reader.connections[-1] == standby.url for reader in reading)
    now = standby.health()["replication"]
    assert (now["role"], now["degraded"]) == ("primary", False)
    assert now["epoch"] > health["epoch"]
    primary.start()  # back again, it waits its turn
    until(lambda: primary.role == "standby", "it is not on standby")


def test_stopped_primary_writes_nothing_when_it_wakes(
    pair: Pair, redis_server: RedisServer, undisturbed: list[Reader]
) -> None:
    primary, standby = pair.settled()
    reading = readers([primary.url, standby.url], asked(TOKENS), "stopped")
    under_way(reading)
    primary.send(signal.SIGSTOP)
    until(lambda: standby.role == "primary", "nobody takes over")
    epoch = standby.health()["replication"]["epoch"]
    primary.send(signal.SIGCONT)
    until(lambda: primary.role == "standby", "it does not step down")
    require_same(reading, undisturbed)
    entries = redis_server.client().xrange(KEYS.stream)
    assert entries
    for id, fields in entries:
        assert int(id.split(b"-")[0]) == epoch
        assert read_entry(fields[b"entry"], fields[b"slots"], Limits()).beginning.startswith(str(epoch))
    assert int(redis_server.client().get(KEYS.lease)) == epoch


def test_asked_to_hand_over(pair: Pair, redis_server: RedisServer, undisturbed: list[Reader]) -> None:
    primary, standby = pair.settled()
    reading = readers([primary.url, standby.url], asked(TOKENS), "asked")
    under_way(reading)
    command = [*KVPAGER, "failover", "--peer", redis_server.url]
    told = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60, check=True)
    said = json.loads(told.stdout)
    assert said["changed"]
    require_same(reading, undisturbed)
    assert standby.health()["replication"]["node"] == said["primary"]
    assert any("stepped_down" in reader.refusals for reader in reading)
    until(lambda: primary.role == "standby", "it does not step down")
    status = subprocess.run([*command, "--status"], capture_output=True, text=True, timeout=60, check=True)
    assert said["primary"] in status.stdout


def test_primary_that_is_ended_hands_over(
    model: str, redis_server: RedisServer, tmp_path: Path, undisturbed: list[Reader]
) -> None:
    with Pair(model, tmp_path, redis_server.url, "--grace", "0") as pair:
        primary, standby = pair.settled()
        reading = readers([primary.url, standby.url], asked(TOKENS), "ended")
        under_way(reading)
        primary.send(signal.SIGTERM)
        require_same(reading, undisturbed)
        assert standby.role == "primary"
        assert primary.process is not None
        assert primary.process.wait(60) == 0


def test_standby_dies_and_redis_dies(pair: Pair, redis_server: RedisServer, undisturbed: list[Reader]) -> None:
    primary, standby = pair.settled()
    reading = readers([primary.url], asked(TOKENS), "alone")
    under_way(reading, 5)
    standby.kill()
    under_way(reading, 20)
    redis_server.kill()
    require_same(reading, undisturbed)
    assert all(reader.connections == [primary.url] for reader in reading)
    assert primary.health()["replication"]["degraded"]
    assert all(": resumable false" in reader.comments for reader in reading)
    late = Reader(*asked(4)[0], "late", [primary.url]).start().join()
    assert late.resumable == ["false"]
    redis_server.start()
    until(lambda: not primary.health()["replication"]["degraded"], "the journal does not begin anew")
    again = Reader(*asked(4)[0], "again", [primary.url]).start().join()
    assert again.resumable == ["true"]
    assert again.text == late.text


def test_two_that_want_to_be_the_primary(model: str, redis_server: RedisServer, tmp_path: Path) -> None:
    options = ("--role", "primary", "--peer", redis_server.url, "--node-name")
    with Served(model, tmp_path / "a", *options, "a") as one, Served(model, tmp_path / "b", *options, "b") as other:
        nodes = {"a": one, "b": other}
        until(lambda: {node.role for node in nodes.values()} == {"primary", "standby"}, "they do not agree")
        until(lambda: any(node.ready for node in nodes.values()), "nobody is ready")
        assert sum(node.ready for node in nodes.values()) == 1
        assert len({node.health()["replication"]["primary"] for node in nodes.values()}) == 1
