"""Calls end in time whatever they do, and what is given up is not used again."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from kvpager.errors import StoreUnavailable
from kvpager.stores.deadline import Calls
from kvpager.stores.redis_links import Command, Link
from tests.redis_rig import until
from tests.stores.fake import SETTLED


class FakeLink:
    """A connection that answers with its number, fails, or hangs until it is cut."""

    def __init__(self, number: int, hangs: bool) -> None:
        self.number, self.hangs = number, hangs
        self.cuts = 0
        self._cut = threading.Event()

    def execute(self, commands: Sequence[Command]) -> list[Any]:
        if commands == [("fail",)]:
            raise ZeroDivisionError
        if self.hangs:
            assert self._cut.wait(SETTLED)
            raise ConnectionError
        return [self.number]

    def nodes(self) -> list[str]:
        return []

    def execute_on(self, name: str, commands: Sequence[Command]) -> list[Any]:
        return self.execute(commands)

    def cut(self) -> None:
        self.cuts += 1
        self._cut.set()


class Maker:
    """Makes connections; `hangs`: such that hang."""

    def __init__(self) -> None:
        self.made: list[FakeLink] = []
        self.hangs = False

    def __call__(self) -> Link:
        self.made.append(FakeLink(len(self.made), self.hangs))
        return self.made[-1]


def ask(calls: Calls, timeout_s: float = SETTLED, what: str = "ask") -> Any:
    return calls.call(lambda link: link.execute([(what,)]), timeout_s)[0]


def test_one_connection_serves_calls_that_follow_one_another() -> None:
    make = Maker()
    calls = Calls(make, 3)
    assert [ask(calls) for _ in range(10)] == [0] * 10
    calls.close()
    until(lambda: make.made[0].cuts)


def test_failures_are_handed_on_and_the_connection_stays() -> None:
    calls = Calls(Maker(), 1)
    with pytest.raises(ZeroDivisionError):
        ask(calls, what="fail")
    assert ask(calls) == 0
    calls.close()


def test_what_hangs_is_given_up_and_another_connection_is_made() -> None:
    make = Maker()
    make.hangs = True
    calls = Calls(make, 1)
    with pytest.raises(StoreUnavailable) as caught:
        ask(calls, 0.01)
    assert caught.value.kind == "timeout"
    make.hangs = False
    assert ask(calls) == 1
    assert make.made[0].cuts
    calls.close()


def test_making_a_connection_counts_too() -> None:
    gate = threading.Event()
    make = Maker()

    def slow() -> Link:
        assert gate.wait(SETTLED)
        return make()

    calls = Calls(slow, 2)
    with pytest.raises(StoreUnavailable):
        ask(calls, 0.01)
    gate.set()
    assert ask(calls) in (0, 1)
    calls.close()


def test_when_all_are_in_use_one_waits_and_then_gives_up() -> None:
    make = Maker()
    make.hangs = True
    calls = Calls(make, 1)

    def fails() -> None:
        with pytest.raises(ConnectionError):
            ask(calls)

    first = threading.Thread(target=fails)
    first.start()
    until(lambda: make.made)
    with pytest.raises(StoreUnavailable, match="in use"):
        ask(calls, 0.01)
    make.made[0].cut()
    first.join(SETTLED)
    calls.close()


def test_nothing_is_called_after_closing() -> None:
    calls = Calls(Maker(), 1)
    calls.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        ask(calls)
