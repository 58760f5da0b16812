from kvpager.stores.breaker import Breaker
from kvpager.stores.limits import Limits
from tests.stores.fake import Clock

LIMITS = Limits(failures=3, pause_s=2.0, longest_pause_s=5.0)


def test_it_opens_after_so_many_failures_one_after_the_other() -> None:
    breaker = Breaker(LIMITS, Clock())
    assert not breaker.failed("io")
    assert not breaker.failed("io")
    assert not breaker.succeeded()  # nothing was open
    assert not breaker.failed("io")
    assert not breaker.failed("io")
    assert breaker.ready()
    assert breaker.failed("locked")
    assert breaker.reason == "locked"
    assert not breaker.ready()
    assert breaker.wait_s == 2.0


def test_one_call_a_pause_may_try_and_pauses_grow_up_to_a_bound() -> None:
    clock = Clock()
    breaker = Breaker(LIMITS, clock)
    breaker.failed("full", at_once=True)
    for pause in (2.0, 4.0, 5.0, 5.0):
        clock.now += pause - 0.01
        assert not breaker.ready()
        clock.now += 0.02
        assert breaker.ready()
        assert not breaker.ready()  # the one that tries has not told yet
        assert breaker.failed("full")
    clock.now += 6
    assert breaker.ready()
    assert breaker.succeeded()
    assert breaker.reason is None
    assert breaker.ready()
    breaker.failed("full", at_once=True)
    assert breaker.wait_s == 2.0  # short again


def test_a_try_that_never_tells_lets_another_one_after_a_pause() -> None:
    clock = Clock()
    breaker = Breaker(LIMITS, clock)
    breaker.failed("io", at_once=True)
    clock.now += 2
    assert breaker.ready()
    clock.now += 2
    assert breaker.ready()


def test_a_clock_that_jumps_back_makes_no_pause_longer() -> None:
    clock = Clock()
    breaker = Breaker(LIMITS, clock)
    breaker.failed("io", at_once=True)
    clock.now -= 900
    assert breaker.wait_s == 2.0
    clock.now += 2
    assert breaker.ready()


def test_what_is_slow_again_soon_is_left_alone_for_longer() -> None:
    clock = Clock()
    breaker = Breaker(LIMITS, clock)
    breaker.failed("slow", at_once=True)
    for pause in (2.0, 4.0, 5.0, 5.0):
        assert breaker.wait_s == pause
        clock.now += pause
        assert breaker.ready()
        breaker.succeeded()  # little was asked of it
        breaker.succeeded()
        clock.now += 1
        breaker.failed("slow", at_once=True)
    clock.now += 5
    breaker.succeeded()
    clock.now += 5
    breaker.succeeded()  # for as long as the longest pause it was quick
    breaker.failed("slow", at_once=True)
    assert breaker.wait_s == 2.0
