"""The states of a pair's nodes, over a real Redis, with hosts that only note what they are told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kvpager.journaled import Resumable, Told
from kvpager.replication.node import Node
from tests.redis_rig import RedisServer, until
from tests.replication.rig import PAGE, SECONDS, accepted, connector, ended, grown, key

TTL_S = 0.6


class FakeHost:
    """Notes what it is told. known: requests that it goes on with; steps: in good order or not, when it steps down."""

    page_size = PAGE

    def __init__(self) -> None:
        self.known: list[list[Resumable]] = []
        self.steps: list[bool] = []
        self.warmed: list[bytes] = []
        self.leaves: set[str] = set()
        self.faults: list[Exception] = []

    def go_on(self, resumables: Sequence[Resumable]) -> set[str]:
        if self.faults:
            raise self.faults.pop()
        self.known.append(list(resumables))
        return {one.accepted.id for one in resumables} - self.leaves

    def step_down(self, flush: Callable[[], None] | None) -> None:
        self.steps.append(flush is not None)
        if flush is not None:
            flush()

    def warm(self, keys: Sequence[bytes]) -> None:
        self.warmed += keys


class Member:
    """A node and its host."""

    def __init__(self, server: RedisServer, owner: str, eager: bool = True) -> None:
        self.host = FakeHost()
        self.node = Node(connector(server.port), "pair", owner, eager=eager, ttl_s=TTL_S)

    def start(self) -> Member:
        self.node.start(self.host)
        return self

    @property
    def role(self) -> str:
        return str(self.node.state()["role"])

    def becomes(self, role: str) -> None:
        until(lambda: self.role == role, f"it is no {role}")

    def told(self, *told: Told) -> None:
        """Tell a step, and wait until it may be released."""
        done = threading.Event()
        self.node.relay.step(told, done.set)
        assert done.wait(SECONDS)


@pytest.fixture
def member(redis_server: RedisServer) -> Iterator[Callable[..., Member]]:
    """Makes nodes of one pair that are closed at the end."""
    made: list[Member] = []

    def make(owner: str, **more: Any) -> Member:
        made.append(Member(redis_server, owner, **more))
        return made[-1].start()

    yield make
    for one in made:
        one.node.close()


def test_a_node_follows_then_goes_on(member: Callable[..., Member]) -> None:
    first = member("first")
    first.becomes("primary")
    second = member("second", eager=False)
    first.node.relay.accept(accepted("a"))
    first.told(grown("a", 0, 0, 6, 11))
    until(lambda: second.host.warmed == [key("a", 0, 0)])
    state = second.node.state()
    assert (state["role"], state["primary"], state["requests"]) == ("standby", "first", 1)
    assert state["epoch"] == first.node.state()["epoch"]
    assert first.node.relay.resumable("a")
    assert not second.node.relay.resumable("a")
    first.node.close()
    second.becomes("primary")
    (known,) = second.host.known[-1]
    assert known.accepted == accepted("a")
    assert known.outputs == [[11]]
    assert second.node.state()["epoch"] > state["epoch"]
    assert second.node.fence().epoch == second.node.state()["epoch"]


def test_what_nobody_goes_on_with_is_let_go(member: Callable[..., Member]) -> None:
    first = member("first")
    first.becomes("primary")
    for id in "ab":
        first.node.relay.accept(accepted(id))
        first.told(grown(id, 0, 0, 6, 11))
    second = member("second")
    second.host.leaves = {"b"}
    first.node.close()
    second.becomes("primary")
    second.node.relay.accept(accepted("a"))
    second.told(ended("a"))
    until(lambda: second.node.state()["requests"] == 1)
    assert not second.node.relay.resumable("b")


def test_asked_to_hand_over(member: Callable[..., Member]) -> None:
    first = member("first")
    first.becomes("primary")
    second = member("second")
    until(lambda: second.node.state()["primary"] == "first")
    asker = first.node._new_lease()
    assert asker.ask(30.0)
    second.becomes("primary")
    first.becomes("standby")
    asker.close()
    assert first.host.steps == [True]
    assert not second.host.steps


def test_a_lease_that_was_taken_away(member: Callable[..., Member], redis_server: RedisServer) -> None:
    first = member("first")
    first.becomes("primary")
    first.node.relay.accept(accepted("a"))
    epoch = first.node.state()["epoch"]
    redis_server.client().set(first.node.fence().key, epoch + 1)
    until(lambda: first.host.steps == [False])
    first.becomes("standby")
    released = threading.Event()
    first.node.relay.step((grown("a", 0, 0, 6, 11),), released.set)
    redis_server.client().delete("kvpager:{pair}:lease")
    first.becomes("primary")
    assert first.node.state()["epoch"] > epoch
    assert [one.outputs for one in first.host.known[-1]] in ([], [[[]]])  # what came late was not taken
    assert not released.is_set()


def test_a_standby_leaves_time_to_a_primary_that_never_was(member: Callable[..., Member]) -> None:
    patient = member("patient", eager=False)
    eager = member("eager")
    eager.becomes("primary")
    assert patient.role == "standby"


def test_redis_that_was_away_is_the_primarys_again(member: Callable[..., Member], redis_server: RedisServer) -> None:
    first, second = member("first"), None
    first.becomes("primary")
    second = member("second")
    until(lambda: second.node.state()["primary"] == "first")
    epoch = first.node.state()["epoch"]
    redis_server.kill()
    until(lambda: first.node.state()["degraded"] and second.node.state()["degraded"])
    redis_server.start()
    until(lambda: not first.node.state()["degraded"])
    until(lambda: second.node.state()["epoch"] == first.node.state()["epoch"])
    assert first.node.state()["epoch"] > epoch
    assert not first.host.steps


def test_a_fault_of_the_host_puts_the_node_on_standby_and_it_tries_again(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    one = Member(redis_server, "one")
    one.host.faults = [RuntimeError("broken")]
    one.start()
    one.becomes("primary")
    one.node.close()
    assert "a fault" in caplog.text
    assert one.host.known == [[]]
