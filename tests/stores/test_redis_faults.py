"""What befalls a shared Redis: nothing is raised, no answer is wrong, all is counted, told once, mended by itself."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvpager.stores import RedisSettings, open_store, redis_tier
from kvpager.stores.chain import Chain
from kvpager.stores.limits import Limits
from kvpager.stores.publishing import Publishing
from tests.redis_rig import Proxy, RedisServer, until
from tests.stores.fake import NOBODY, SETTLED, block, key_of

LIMITS = Limits(pause_s=0.05, longest_pause_s=0.2, linger_s=0.001, erase_s=0.5, close_s=0.5)
TIMEOUT_S = 0.2
NUMBERS = range(6)
Open = Callable[..., Chain]

pytestmark = pytest.mark.promise(4)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    made: list[Chain] = []

    def build(url: str, near: bool = False, timeout_s: float = TIMEOUT_S, limits: Limits = LIMITS) -> Chain:
        far = redis_tier(url, RedisSettings(timeout_s=timeout_s), Publishing("all"))
        path = tmp_path / f"near{len(made)}.db" if near else None
        made.append(open_store(path, limit_bytes=64 * 2**20, limits=limits, far=far))
        return made[-1]

    yield build
    for chain in made:
        chain.close()


def url_of(port: int, login: str = "") -> str:
    return f"redis://{login}127.0.0.1:{port}"


def fill(chain: Chain) -> None:
    assert chain.put([block(number) for number in NUMBERS]) == len(NUMBERS)
    assert chain.flush(SETTLED)


def found(chain: Chain) -> int:
    """How many blocks are found; each must be right."""
    keys = [key_of(number) for number in NUMBERS]
    heads = chain.heads(keys)
    payloads = chain.get(keys)
    for number, head, payload in zip(NUMBERS, heads, payloads, strict=True):
        assert head is None or head.rescored(b"", 0) == block(number).head
        assert payload is None or np.array_equal(payload, block(number).payload)
    chain.contains(keys)
    return sum(payload is not None for payload in payloads)


def state(chain: Chain) -> str:
    return chain.stats().tiers["shared"].state


def uses(chain: Chain) -> None:
    """All that a pager and sessions do with a store."""
    chain.prefetch([key_of(1)])
    chain.put([block(100)])
    chain.update([], 3)
    chain.publish([key_of(1)])
    chain.save_record(key_of(50), NOBODY, b"record")
    chain.load_record(key_of(51))
    if chain.claim(key_of(52)):
        chain.release(key_of(52))
    chain.drop([key_of(99)])
    found(chain)


def told(caplog: pytest.LogCaptureFixture, word: str) -> list[str]:
    return [line for record in caplog.records if word in (line := record.getMessage())]


def works_again(chain: Chain) -> None:
    """Writing and reading, without anybody's help."""

    fresh = itertools.count(1000)

    def stored() -> bool:
        chain.put([block(number) for number in (*NUMBERS, next(fresh))])
        chain.flush(1.0)
        return found(chain) == len(NUMBERS) and state(chain) == "ok"

    until(stored, "what is put is not found again", 20)


def test_absent_at_the_start_and_started_later(opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = RedisServer(tmp_path / "redis")
    chain = opened(url_of(server.port))
    uses(chain)
    assert found(chain) == 0
    assert state(chain) == "io"
    assert len(told(caplog, "opening")) == 1
    with server:
        works_again(chain)


def test_killed_and_restarted_empty(opened: Open, redis_server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    chain = opened(redis_server.url)
    fill(chain)
    assert found(chain) == len(NUMBERS)
    redis_server.kill()
    for _ in range(5):
        uses(chain)
    assert found(chain) == 0
    assert state(chain) == "io"
    assert chain.stats().errors["io"] >= 1
    assert len(told(caplog, "reading: io")) == 2  # the first, and that it is out of use
    redis_server.start()
    works_again(chain)


def test_a_hung_redis_costs_one_time_out(opened: Open, redis_server: RedisServer) -> None:
    chain = opened(redis_server.url, limits=Limits(pause_s=30, erase_s=0.5, close_s=0.5))
    fill(chain)
    redis_server.pause()
    begun = time.monotonic()
    assert found(chain) == 0
    took = time.monotonic() - begun
    for _ in range(20):
        uses(chain)
    all_took = time.monotonic() - begun
    redis_server.resume()
    assert took < 2 * TIMEOUT_S + 1  # so much for a machine that does other things as well
    assert all_took < 2 * TIMEOUT_S + 2
    assert state(chain) == "timeout"
    assert chain.stats().tiers["shared"].errors["timeout"] >= 1


def test_a_hung_redis_that_goes_on_is_used_again(opened: Open, redis_server: RedisServer) -> None:
    chain = opened(redis_server.url)
    fill(chain)
    redis_server.pause()
    uses(chain)
    assert state(chain) == "timeout"
    redis_server.resume()
    works_again(chain)


@pytest.mark.parametrize("fault", ["held", "drip", "delay"])
def test_a_network_that_is_slow_or_lets_nothing_pass(opened: Open, redis_server: RedisServer, fault: str) -> None:
    with Proxy(redis_server.port) as proxy:
        chain = opened(url_of(proxy.port))
        fill(chain)
        {"held": proxy.blackhole, "drip": lambda: proxy.drip(1, 0.05), "delay": lambda: proxy.delay(1.0)}[fault]()
        begun = time.monotonic()
        assert found(chain) == 0
        assert time.monotonic() - begun < 2 * TIMEOUT_S + 1
        assert state(chain) == "timeout"
        uses(chain)
        proxy.heal()
        works_again(chain)


def test_cut_connections_are_made_again(opened: Open, redis_server: RedisServer) -> None:
    with Proxy(redis_server.port) as proxy:
        chain = opened(url_of(proxy.port))
        fill(chain)
        for after in (0, 10, 500, 3000):
            proxy.cut(after)
            uses(chain)
            proxy.heal()
            works_again(chain)


def test_corrupted_answers_are_misses(opened: Open, redis_server: RedisServer) -> None:
    fill(opened(redis_server.url))
    with Proxy(redis_server.port) as proxy:
        chain = opened(url_of(proxy.port))
        for at in (3, 30, 150, 700, 1500):
            proxy.corrupt(at)
            found(chain)  # which compares
            uses(chain)
            proxy.heal()
            works_again(chain)


def test_full(opened: Open, redis_server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    chain = opened(redis_server.url)
    fill(chain)
    client = redis_server.client()
    client.config_set("maxmemory", 1)
    chain.put([block(70)])
    until(lambda: chain.stats().errors.get("full"), "it is not said to be full", 10)
    assert found(chain) == len(NUMBERS)  # reading goes on
    assert len(told(caplog, "writing: full")) == 1
    client.config_set("maxmemory", 0)
    works_again(chain)


def test_a_replica_is_read(opened: Open, redis_server: RedisServer, tmp_path: Path) -> None:
    fill(opened(redis_server.url))
    with RedisServer(tmp_path / "replica", args=("--replicaof", "127.0.0.1", str(redis_server.port))) as replica:
        client = replica.client()
        until(lambda: client.info("replication")["master_link_status"] == "up" and client.dbsize() > len(NUMBERS))
        chain = opened(replica.url)
        until(lambda: found(chain) == len(NUMBERS), "a replica is not read", 10)
        chain.put([block(70)])
        until(lambda: chain.stats().errors.get("readonly"), "it is not said to be read-only", 10)
        assert found(chain) == len(NUMBERS)
        client.replicaof("NO", "ONE")
        works_again(chain)


def test_a_wrong_password_and_the_right_one_later(
    opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RedisServer(tmp_path / "locked", password="s3cret") as server:
        chain = opened(url_of(server.port, ":wr0ng@"))
        uses(chain)
        assert state(chain) == "auth"
        assert found(chain) == 0
        server.client().config_set("requirepass", "wr0ng")
        works_again(chain)
    assert "s3cret" not in caplog.text
    assert "wr0ng" not in caplog.text


def test_rights_that_are_taken_away_while_it_runs(
    opened: Open, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    client = redis_server.client()
    rights = ["ACL", "SETUSER", "node", "reset", "on", ">s3cret", "~kvpager:*"]
    client.execute_command(*rights, "+@read", "+@write", "+@scripting", "+@connection")
    chain = opened(url_of(redis_server.port, "node:s3cret@"))
    fill(chain)
    assert found(chain) == len(NUMBERS)
    client.execute_command(*rights, "+ping")
    chain.put([block(70)])
    assert found(chain) == 0
    assert state(chain) == "auth"
    uses(chain)
    client.execute_command(*rights, "+@read", "+@write", "+@scripting", "+@connection")
    works_again(chain)
    client.execute_command("ACL", "DELUSER", "node")  # which ends its connections
    found(chain)
    uses(chain)
    until(lambda: state(chain) == "auth" or found(chain) < 0, "a user that is gone is not told", 10)
    client.execute_command(*rights, "+@read", "+@write", "+@scripting", "+@connection")
    works_again(chain)
    assert "s3cret" not in caplog.text


def test_tls_with_the_right_authority_and_a_wrong_one(opened: Open, tmp_path: Path) -> None:
    with RedisServer(tmp_path / "one", tls=True) as server, RedisServer(tmp_path / "other", tls=True) as other:
        address = f"rediss://127.0.0.1:{server.port}"
        right = opened(f"{address}?ca={server.ca}", timeout_s=5.0)
        fill(right)
        assert found(right) == len(NUMBERS)
        wrong = opened(f"{address}?ca={other.ca}", timeout_s=5.0)
        plain = opened(url_of(server.port))
        for chain in (wrong, plain):
            uses(chain)
            assert found(chain) == 0
            assert state(chain) in ("io", "timeout")


def test_the_near_store_goes_on_without_the_far_one(opened: Open, redis_server: RedisServer) -> None:
    chain = opened(redis_server.url, near=True)
    fill(chain)
    redis_server.pause()
    for _ in range(3):
        assert found(chain) == len(NUMBERS)
        uses(chain)
    stats = chain.stats()
    assert stats.tiers["local"].state == "ok"
    assert stats.tiers["local"].hits == stats.hits
    redis_server.resume()
    works_again(chain)


def test_what_was_damaged_is_dropped_and_stored_anew(opened: Open, redis_server: RedisServer) -> None:
    chain = opened(redis_server.url)
    fill(chain)
    client = redis_server.client()
    (name,) = client.keys(f"kvpager:b:*{key_of(2).hex()}*")
    client.setrange(name, client.strlen(name) - 3, b"???")
    assert found(chain) == len(NUMBERS) - 1
    assert chain.flush(SETTLED)
    assert chain.stats().damaged == 1
    assert not client.exists(name)
    works_again(chain)
