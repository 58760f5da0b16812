"""The lease: one holder at a time, epochs that only grow, and a holder that knows first when its time is over."""

import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvpager.errors import ConfigError
from kvpager.replication.keeper import LeaseKeeper
from kvpager.replication.keys import Keys
from kvpager.replication.lease import Lease
from kvpager.replication.link import Unreachable
from tests.redis_rig import RedisServer, until
from tests.replication.rig import SECONDS, connector, trying


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def lease(server: RedisServer, owner: str, ttl_s: float = 600.0, **more: Any) -> Lease:
    return Lease(connector(server.port), "pair", owner, ttl_s, **more)


def expire(server: RedisServer) -> None:
    """As if the time to live were over."""
    server.client().delete(Keys("pair").lease)


def test_one_holds_it_until_it_is_released(redis_server: RedisServer) -> None:
    first, second = lease(redis_server, "first"), lease(redis_server, "second")
    assert first.watch() is None
    assert first.acquire()
    assert not second.acquire()
    holder = second.watch()
    assert holder is not None
    assert (holder.owner, holder.epoch) == ("first", first.epoch)
    assert 590 < holder.left_s <= 600
    assert first.held
    assert first.renew() == "held"
    assert first.release()
    assert not first.held
    assert second.acquire()
    assert second.epoch > first.epoch
    assert first.renew() == "lost"
    assert not first.release()
    assert second.renew() == "held"


def test_a_holder_counts_it_as_lost_before_redis_gives_it_away(redis_server: RedisServer) -> None:
    clock = Clock()
    first = lease(redis_server, "first", 10.0, clock=clock)
    assert first.acquire()
    clock.now += 8.9
    assert first.held
    clock.now += 0.2  # a second's margin
    assert not first.held
    assert first.renew() == "held"
    assert first.held


def test_time_counts_from_before_it_was_asked_for(redis_server: RedisServer) -> None:
    ticks = iter([100.0, 109.5, 109.6])
    first = lease(redis_server, "first", 10.0, clock=lambda: next(ticks))
    assert first.acquire()  # the answer came 9.5 seconds late
    assert not first.held


def test_it_expires_in_redis_by_itself(redis_server: RedisServer) -> None:
    first, second = lease(redis_server, "first", 0.1), lease(redis_server, "second")
    assert first.acquire()
    until(trying(second.acquire))
    assert not first.held
    assert first.renew() == "lost"


def test_nobody_took_it_and_it_may_be_had_again(redis_server: RedisServer) -> None:
    first = lease(redis_server, "first")
    assert first.acquire()
    before = first.epoch
    expire(redis_server)
    assert first.renew() == "vacant"
    assert not first.held
    assert first.acquire()
    assert first.epoch > before


def test_no_epoch_is_given_twice_by_a_redis_that_forgot(redis_server: RedisServer) -> None:
    first, second = lease(redis_server, "first"), lease(redis_server, "second")
    assert first.acquire()
    redis_server.restart()
    until(trying(second.acquire))
    assert second.epoch > first.epoch
    assert until(trying(first.renew)) == "lost"


def test_who_is_asked_hears_of_it_and_does_not_get_it_back(redis_server: RedisServer) -> None:
    first, second = lease(redis_server, "first"), lease(redis_server, "second")
    assert second.ask(60.0) is None
    assert first.acquire()
    assert second.ask(60.0) == first.epoch
    assert first.renew() == "asked"
    assert first.release()
    assert not first.acquire()
    assert second.acquire()
    assert second.renew() == "held"
    assert second.release()
    assert first.acquire()


def test_asking_is_void_after_its_time(redis_server: RedisServer) -> None:
    first = lease(redis_server, "first")
    assert first.acquire()
    assert first.ask(0.02) == first.epoch
    until(lambda: first.renew() == "held")


@pytest.mark.parametrize("name", ["", "a{b}", "a b", "x" * 65, "ä"])
def test_names_are_checked(name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        Keys(name)


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="ttl_s"):
        Lease(connector(1), "pair", "first", 0.0)
    with pytest.raises(ConfigError, match="owner"):
        Lease(connector(1), "pair", "")
    with pytest.raises(ConfigError, match="within_s"):
        Lease(connector(1), "pair", "first").ask(0.0)


def test_unreachable_says_nothing_of_the_address(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis", password="secret") as server:
        wrong = Lease(connector(server.port, password="wrong"), "pair", "first")
        with pytest.raises(Unreachable) as caught:
            wrong.acquire()
    assert "wrong" not in str(caught.value)
    assert str(server.port) not in str(caught.value)


def test_keeper_renews_and_says_when_another_has_it(redis_server: RedisServer) -> None:
    lost, asked = threading.Event(), threading.Event()
    first, second = lease(redis_server, "first", 0.3), lease(redis_server, "second")
    assert first.acquire()
    keeper = LeaseKeeper(first, lost.set, asked.set)
    redis_server.client().set(Keys("pair").lease, 17)  # another's epoch
    assert lost.wait(SECONDS)
    assert not first.held
    keeper.close()
    assert second.watch() is not None


def test_keeper_has_it_again_after_redis_was_restarted_empty(redis_server: RedisServer) -> None:
    lost = threading.Event()
    first = lease(redis_server, "first", 0.3)
    assert first.acquire()
    before = first.epoch
    keeper = LeaseKeeper(first, lost.set, lambda: None)
    redis_server.restart()
    until(lambda: first.epoch > before and first.held)
    assert not lost.is_set()
    keeper.close(release=True)
    assert lease(redis_server, "second").acquire()


def test_keeper_tells_once_that_it_is_asked_for(redis_server: RedisServer) -> None:
    asked = threading.Semaphore(0)
    first, second = lease(redis_server, "first", 0.3), lease(redis_server, "second")
    assert first.acquire()
    keeper = LeaseKeeper(first, lambda: None, lambda: asked.release())
    assert second.ask(60.0) == first.epoch
    assert asked.acquire(timeout=SECONDS)
    keeper.close(release=True)
    assert second.acquire()
    assert not asked.acquire(blocking=False)


def test_many_threads_want_it_and_one_gets_it(redis_server: RedisServer) -> None:
    contenders = [lease(redis_server, f"number {number}") for number in range(8)]
    got: list[Lease] = []

    def contend(one: Lease) -> None:
        if one.acquire():
            got.append(one)

    for _ in range(5):
        threads = [threading.Thread(target=contend, args=(one,)) for one in contenders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        (winner,) = got
        assert winner.epoch == max(one.epoch for one in contenders)
        assert winner.release()
        got.clear()


class Races(RuleBasedStateMachine):
    """Contenders with clocks of their own, beside a model of who has it."""

    server: RedisServer

    def __init__(self) -> None:
        super().__init__()
        self.server.client().flushall()
        self.clock = Clock()
        self.all = [lease(self.server, f"number {n}", clock=self.clock) for n in range(4)]
        self.holder: int | None = None
        self.epochs: list[int] = []
        self.asked: int | None = None  # the contender that is kept from acquiring
        self.asked_epoch = 0

    @rule(n=st.integers(0, 3))
    def acquire(self, n: int) -> None:
        got = self.all[n].acquire()
        kept = self.asked == n and self.epochs[-1:] == [self.asked_epoch]
        assert got == (self.holder is None and not kept)
        if got:
            assert self.all[n].epoch not in self.epochs
            self.epochs.append(self.all[n].epoch)
            self.holder, self.asked = n, None

    @rule(n=st.integers(0, 3))
    def renew(self, n: int) -> None:
        state = self.all[n].renew()
        if self.holder == n:
            assert state == ("asked" if self.asked == n and self.all[n].epoch == self.asked_epoch else "held")
        else:
            assert state == ("vacant" if self.holder is None else "lost")

    @rule(n=st.integers(0, 3))
    def release(self, n: int) -> None:
        assert self.all[n].release() == (self.holder == n)
        if self.holder == n:
            self.holder = None

    @rule()
    def expire(self) -> None:
        expire(self.server)
        self.clock.now += 600
        self.holder = None

    @rule(n=st.integers(0, 3))
    def ask(self, n: int) -> None:
        epoch = self.all[n].ask(3600.0)
        assert (epoch is None) == (self.holder is None)
        if epoch is not None:
            self.asked, self.asked_epoch = self.holder, epoch

    @rule()
    def restart_empty(self) -> None:
        self.server.client().flushall()
        self.clock.now += 600
        self.holder = self.asked = None

    @invariant()
    def at_most_one_holds_it_and_it_is_the_one(self) -> None:
        assert [n for n, one in enumerate(self.all) if one.held] == ([] if self.holder is None else [self.holder])
        assert self.epochs == sorted(set(self.epochs))

    def teardown(self) -> None:
        for one in self.all:
            one.close()


def test_races(redis_server: RedisServer) -> None:
    machine = type("OnServer", (Races,), {"server": redis_server})
    run_state_machine_as_test(machine, settings=settings(max_examples=30, stateful_step_count=20, deadline=None))
