"""What goes wrong with Redis: streams go on, what is not written is said, and nothing wrong is ever read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from kvpager.replication.journal import Journal
from kvpager.replication.keeper import LeaseKeeper
from kvpager.replication.lease import Lease
from kvpager.replication.limits import Limits
from kvpager.replication.mirror import Mirror
from tests.redis_rig import Proxy, RedisServer, until
from tests.replication.rig import PAGE, SECONDS, Primary, accepted, caught_up, connector, ended, grown, mirror, trying

FAST = Limits(bound_s=0.2, retry_s=0.01, longest_retry_s=0.05, look_s=0.05)


@contextmanager
def kept(primary: Primary) -> Iterator[Primary]:
    """The same with its lease renewed."""
    keeper = LeaseKeeper(primary.lease, primary.journal.lose, lambda: None)
    try:
        yield primary
    finally:
        keeper.close()


def begin(primary: Primary, *ids: str) -> None:
    """Requests whose first token was acknowledged."""
    for id in ids:
        primary.journal.accept(accepted(id))
    primary.told(*[grown(id, 0, 0, 6, 1) for id in ids])


def good(primary: Primary) -> bool:
    return primary.journal.stats().state == "good"


def degraded(primary: Primary) -> bool:
    return primary.journal.stats().degraded


def hung(server: RedisServer, _: Proxy) -> None:
    server.pause()


def killed(server: RedisServer, _: Proxy) -> None:
    server.kill()


def silent(_: RedisServer, proxy: Proxy) -> None:
    proxy.blackhole()


def cut(_: RedisServer, proxy: Proxy) -> None:
    proxy.cut()


def slow(_: RedisServer, proxy: Proxy) -> None:
    proxy.delay(0.4)


def dripping(_: RedisServer, proxy: Proxy) -> None:
    proxy.drip(1, 0.15)


def full(server: RedisServer, _: Proxy) -> None:
    server.client().config_set("maxmemory", 1)


@pytest.mark.parametrize("fault", [hung, killed, silent, cut, slow, dripping, full])
def test_requests_go_on_without_and_new_ones_with_it_again(
    redis_server: RedisServer, fault: Callable[[RedisServer, Proxy], None]
) -> None:
    with Proxy(redis_server.port) as proxy, Primary(proxy.port, FAST) as primary:
        begin(primary, "steps", "rests")
        reader = caught_up(mirror(redis_server.port))
        fault(redis_server, proxy)
        order: list[int] = []
        for number in range(3):
            primary.journal.step([grown("steps", 0, 6 + number, 7 + number, 2)], partial(order.append, number))
        until(lambda: len(order) == 3, "steps are not released")
        assert order == [0, 1, 2]
        assert degraded(primary)
        assert primary.journal.stats().lag_s > 0
        assert not primary.journal.resumable("steps")
        primary.journal.accept(accepted("meanwhile"))
        assert not primary.journal.resumable("meanwhile")
        primary.told(grown("meanwhile", 0, 0, 6, 1))  # at once
        redis_server.resume() if redis_server.alive else None
        if fault is full:
            redis_server.client().config_set("maxmemory", 0)
        proxy.heal()
        if fault is killed:
            redis_server.start()
            until(trying(primary.lease.acquire))  # as its keeper does
        until(lambda: good(primary), "it does not recover")
        assert primary.journal.resumable("rests")
        assert not primary.journal.resumable("steps")
        begin(primary, "new")
        assert primary.journal.resumable("new")
        primary.told(grown("steps", 0, 9, 10, 2), grown("rests", 0, 6, 7, 2))
        for one in (caught_up(reader), caught_up(mirror(redis_server.port))):
            known = one.requests()
            assert known.keys() == {"rests", "new"}
            assert known["rests"].outputs == [[1, 2]]
        assert reader.gone("steps")


def test_a_short_silence_is_waited_for(redis_server: RedisServer) -> None:
    limits = Limits(bound_s=15.0)
    with Primary(redis_server.port, limits) as primary:
        begin(primary, "one")
        redis_server.client().client_kill_filter(_type="normal", skipme=True)
        primary.told(grown("one", 0, 6, 7, 2))
        redis_server.pause()
        done = primary.step(grown("one", 0, 7, 8, 3))
        until(lambda: primary.journal.stats().lag_s > 0.6)
        assert not done.is_set()
        redis_server.resume()
        assert done.wait(SECONDS)
        assert primary.journal.resumable("one")
        assert caught_up(mirror(redis_server.port)).requests()["one"].outputs == [[1, 2, 3]]


def test_redis_restarted_empty_has_everything_again(redis_server: RedisServer) -> None:
    limits = Limits(bound_s=15.0, retry_s=0.01, longest_retry_s=0.05)
    with Primary(redis_server.port, limits, ttl_s=0.3) as primary, kept(primary):
        begin(primary, "one", "two")
        redis_server.restart()
        primary.told(grown("one", 0, 6, 7, 2))
        assert primary.journal.stats().beginnings == 2
        known = caught_up(mirror(redis_server.port)).requests()
        assert known["one"].outputs == [[1, 2]]
        assert known["two"].outputs == [[1]]
        assert not primary.lost.is_set()


@pytest.mark.parametrize("rights", [["+@all", "-evalsha"], ["+@all", "-hkeys"], ["+@all", "-info"], ["+ping"]])
def test_without_rights_it_is_degraded(redis_server: RedisServer, rights: list[str]) -> None:
    primary = Primary(redis_server.port, FAST)
    assert primary.lease.acquire()
    redis_server.client().execute_command("ACL", "SETUSER", "default", "-@all", *rights)
    primary.journal.start()
    primary.journal.accept(accepted("one"))
    primary.told(grown("one", 0, 0, 6, 1))
    assert degraded(primary)
    assert not primary.journal.resumable("one")
    primary.journal.close()


CALLED = "evalsha script|load wait info xread hgetall hmget hkeys"
IN_SCRIPTS = "get set del incr pexpire pttl time xadd xtrim hset hdel"


@pytest.mark.parametrize("protocol", [2, 3])
def test_these_rights_are_enough(redis_server: RedisServer, protocol: int) -> None:
    """What docs/failover.md tells an administrator, with both of Redis's protocols."""
    rights = [f"+{name}" for name in f"{CALLED} {IN_SCRIPTS}".split()]
    user = ["ACL", "SETUSER", "kvpager", "on", ">secret", "~kvpager:{pair}:*", "-@all", *rights]
    redis_server.client().execute_command(*user)
    connect = connector(redis_server.port, username="kvpager", password="secret", protocol=protocol)
    lease = Lease(connect, "pair", "first", 600.0)
    assert lease.acquire()
    assert lease.ask(60.0) == lease.epoch
    assert lease.renew() == "asked"
    assert lease.watch() is not None
    journal = Journal(connect, lease, PAGE, on_lost=lambda: None, limits=Limits(bound_s=15.0))
    journal.start()
    journal.accept(accepted("one"))
    journal.step([ended("one", 0, 5)], lambda: None)
    journal.close(SECONDS)
    assert journal.stats().state == "good"
    one = caught_up(Mirror(connect, "pair"))
    assert one.requests()["one"].outputs == [[5]]
    assert lease.release()


def test_a_wrong_password_is_degraded_and_not_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with RedisServer(tmp_path / "redis", password="secret") as server:
        primary = Primary(server.port, FAST)
        primary.lease.epoch = 1
        primary.journal._writer._link._connect = connector(server.port, password="not-the-secret")
        primary.journal.start()
        primary.journal.accept(accepted("one"))
        primary.told(grown("one", 0, 0, 6, 1))
        assert degraded(primary)
        primary.journal.close()
    assert "secret" not in caplog.text


def test_too_much_that_waits_is_given_up(redis_server: RedisServer) -> None:
    with Primary(redis_server.port, Limits(bound_s=60.0, queue_entries=20)) as primary:
        begin(primary, "one")
        redis_server.pause()
        done = [primary.step(grown("one", 0, 6 + number, 7 + number, 2)) for number in range(40)]
        assert all(one.wait(SECONDS) for one in done)
        assert degraded(primary)
        redis_server.resume()


def test_answers_that_are_corrupted_are_not_believed(redis_server: RedisServer) -> None:
    """Each byte of an answer: the same step is sent again, and is there once."""
    with Proxy(redis_server.port) as proxy, Primary(proxy.port, Limits(bound_s=10.0, retry_s=0.001)) as primary:
        begin(primary, "one")
        for number in range(24):
            proxy.corrupt(number)
            primary.told(grown("one", 0, 6 + number, 7 + number, number))
        proxy.heal()
        assert good(primary)
        assert caught_up(mirror(redis_server.port)).requests()["one"].outputs == [[1, *range(24)]]


def test_a_mirror_reads_again_what_was_corrupted_on_the_way(redis_server: RedisServer) -> None:
    with Proxy(redis_server.port) as proxy, Primary(redis_server.port) as primary:
        begin(primary, "one")
        length = 6
        for place in range(0, 1400, 35):
            reader = mirror(proxy.port)
            proxy.corrupt(place)
            primary.told(grown("one", 0, length, length + 1, length))
            length += 1
            caught_up(reader)
            proxy.heal()
            known = caught_up(reader).requests().get("one")
            if known is not None:  # dropped, or right; and what comes in full repairs it
                assert known.outputs == [[1, *range(6, length)]]


def test_where_there_is_a_replica_it_acknowledges(redis_server: RedisServer, tmp_path: Path) -> None:
    follow = ("--replicaof", "127.0.0.1", str(redis_server.port))
    with RedisServer(tmp_path / "replica", args=follow) as replica, Primary(redis_server.port, FAST) as primary:
        until(lambda: primary.journal.stats().replicas == 1)
        begin(primary, "one")
        assert replica.client().get(primary.lease.keys.tail) == redis_server.client().get(primary.lease.keys.tail)
        replica.pause()
        primary.told(grown("one", 0, 6, 7, 2))
        assert degraded(primary)
        assert not primary.journal.resumable("one")
        replica.resume()
        until(lambda: good(primary))
        begin(primary, "two")
        assert primary.journal.resumable("two")


def test_a_replica_that_hangs_has_not_acknowledged(redis_server: RedisServer, tmp_path: Path) -> None:
    """Also when the same entry is sent again, over the same connection and over another one."""
    follow = ("--replicaof", "127.0.0.1", str(redis_server.port))
    limits = Limits(bound_s=30.0, look_s=0.05)
    with RedisServer(tmp_path / "replica", args=follow) as replica, Primary(redis_server.port, limits) as primary:
        until(lambda: primary.journal.stats().replicas == 1)
        begin(primary, "one")
        replica.pause()
        done = primary.step(grown("one", 0, 6, 7, 2))
        until(lambda: primary.journal.stats().lag_s > 0.4)
        redis_server.client().client_kill_filter(_type="normal", skipme=True)
        until(lambda: primary.journal.stats().lag_s > 0.9)
        assert not done.is_set()
        replica.resume()
        assert done.wait(SECONDS)
        replica.kill()  # one that is gone is not waited for
        primary.told(grown("one", 0, 7, 8, 3))
        assert primary.journal.stats().replicas == 0
        assert primary.journal.resumable("one")


def test_ended_requests_are_kept_for_a_while(redis_server: RedisServer) -> None:
    limits = Limits(ended_s=0.3, look_s=0.05)
    with Primary(redis_server.port, limits) as primary:
        begin(primary, "one")
        long, short = mirror(redis_server.port), mirror(redis_server.port, limits)
        primary.told(ended("one", 0, 5))
        assert redis_server.client().hkeys(primary.lease.keys.requests) == [b"one"]
        for one in (long, short):
            known = caught_up(one).requests()["one"]
            assert known.told[0] is not None
            assert known.outputs == [[1, 5]]
        until(lambda: not redis_server.client().hkeys(primary.lease.keys.requests))
        until(lambda: short.poll(0.0) and not short.requests())
        assert long.poll(0.0)
        assert long.requests()
        assert not primary.journal.resumable("one")


def test_what_can_not_be_written_goes_on_without(redis_server: RedisServer) -> None:
    with Primary(redis_server.port) as primary:
        begin(primary, "one")
        primary.journal.accept(accepted("odd", best=object()))
        primary.told(grown("odd", 0, 0, 6, 1), grown("one", 0, 6, 7, 2))
        until(lambda: not primary.journal.resumable("odd"))


def test_nothing_is_held_back_by_a_journal_that_is_closed(redis_server: RedisServer) -> None:
    with Primary(redis_server.port, Limits(bound_s=3600.0)) as primary:
        begin(primary, "one")
        redis_server.pause()
        done = primary.step(grown("one", 0, 6, 7, 1))
        primary.journal.close(0.05)
        assert done.wait(SECONDS)
        primary.told(grown("one", 0, 7, 8, 1))
        assert not primary.journal.resumable("one")
        redis_server.resume()


def test_calls_never_wait_for_redis(redis_server: RedisServer) -> None:
    """While Redis hangs and the bound is far, a thousand calls return."""
    with Primary(redis_server.port, Limits(bound_s=3600.0)) as primary:
        begin(primary, "one")
        redis_server.pause()
        finished = threading.Event()

        def tell() -> None:
            for length in range(6, 1006):
                primary.journal.step([grown("one", 0, length, length + 1, 1)], lambda: None)
            finished.set()

        threading.Thread(target=tell).start()
        assert finished.wait(SECONDS)
        redis_server.resume()
        primary.told(grown("one", 0, 1006, 1007, 1))
        assert len(caught_up(mirror(redis_server.port)).requests()["one"].outputs[0]) == 1002
