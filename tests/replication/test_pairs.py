"""Pairs that meet in a single Redis, one behind sentinels, or a cluster: from a URL to nodes."""

from __future__ import annotations

import threading

import pytest

from kvpager.errors import ConfigError
from kvpager.pairs import PairOptions
from tests.redis_rig import RedisCluster, RedisSentinel, RedisServer, until
from tests.replication.rig import SECONDS, accepted, grown
from tests.replication.test_node import FakeHost


def take_over(url: str) -> None:
    """A request is told to one node, and known to the other when that one has ended."""
    first, second = (PairOptions(url, "two", 2.0, eager=True).node(name) for name in ("first", "second"))
    hosts = FakeHost(), FakeHost()
    try:
        first.start(hosts[0])
        until(lambda: first.state()["role"] == "primary")
        second.start(hosts[1])
        until(lambda: second.state()["primary"] == "first")
        first.relay.accept(accepted("a"))
        done = threading.Event()
        first.relay.step((grown("a", 0, 0, 6, 11),), done.set)
        assert done.wait(SECONDS)
        first.close()
        until(lambda: second.state()["role"] == "primary")
        assert [one.outputs for one in hosts[1].known[-1]] == [[[11]]]
    finally:
        first.close()
        second.close()


def test_a_single_redis(redis_server: RedisServer) -> None:
    take_over(redis_server.url)


def test_a_redis_behind_sentinels(redis_sentinel: RedisSentinel) -> None:
    take_over(redis_sentinel.url)


def test_a_cluster(redis_cluster: RedisCluster) -> None:
    take_over(redis_cluster.url)


def test_a_password_is_never_shown() -> None:
    options = PairOptions("redis://me:hush@there:7000/2")
    assert "hush" not in f"{options!r} {options.place}"
    assert options.place == "redis://there:7000/2"
    with pytest.raises(ConfigError, match="peer: ") as caught:
        PairOptions("redis://me:hush@there:0")
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "same"),
    [
        ("redis://other@there:7000/2?prefix=mine", True),
        ("redis://there:7000/1", False),
        ("redis://there:7001/2", False),
        ("redis+sentinel://there:7000/name/2", False),
        (None, False),
    ],
)
def test_whether_a_store_can_look_at_the_lease(url: str | None, same: bool) -> None:
    assert PairOptions("redis://there:7000/2").meets_at(url) is same
