"""A process that was stopped finds out whether it still has the lease before it gives anything out."""

from __future__ import annotations

import threading

from kvpager.replication.limits import Limits
from kvpager.replication.waiting import Waiting
from tests.redis_rig import until
from tests.replication.rig import SECONDS, accepted, grown


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_who_wakes_late_waits_anew_and_only_then_gives_up() -> None:
    clock, released = Clock(), threading.Event()
    waiting = Waiting(Limits(), clock, lambda: None)
    waiting.start()
    waiting.accept(accepted("a"))
    waiting.step((grown("a", 0, 0, 6, 1),), released.set)
    clock.now = 10.0
    waiting.acknowledge(())  # wakes it
    until(lambda: waiting._pending[-1].at == 10.0)
    assert waiting.state == "good"
    assert not released.is_set()
    clock.now = 10.55
    waiting.acknowledge(())
    assert released.wait(SECONDS)
    assert waiting.state == "degraded"
    waiting.close(0.0)


def test_what_waits_when_another_has_the_lease_is_never_given_out() -> None:
    clock, released, lost = Clock(), threading.Event(), threading.Event()
    waiting = Waiting(Limits(), clock, lost.set)
    waiting.start()
    waiting.accept(accepted("a"))
    waiting.step((grown("a", 0, 0, 6, 1),), released.set)
    clock.now = 10.0
    waiting.acknowledge(())
    until(lambda: waiting._pending[-1].at == 10.0)
    waiting.lose()
    assert lost.wait(SECONDS)
    clock.now = 20.0
    waiting.acknowledge(())
    waiting.close(0.0)
    assert not released.is_set()
