"""The chain over tiers in memory that fail: nothing is raised, all is counted, told once, mended where it can be."""

import threading

import numpy as np
import pytest

from kvpager.errors import (
    StoreLocked,
    StoreUnavailable,
)
from kvpager.stored import Scores
from kvpager.stores.tier import Tier
from tests.stores.chain_rig import FAILURES, FOR_GOOD, LIMITS, READS, WRITES, Make, fail, found, lines, until
from tests.stores.fake import NOBODY, SETTLED, Clock, FakeTier, Gate, block, key_of


@pytest.fixture
def limits() -> dict[str, float]:
    return LIMITS


@pytest.mark.parametrize(("error", "kind"), FAILURES + FOR_GOOD)
def test_nothing_is_raised_whatever_fails(make: Make, tier: FakeTier, error: Exception, kind: str) -> None:
    tier.put([block(1)])
    fail(tier, (*READS, *WRITES, "claim", "release", "close"), error)
    chain = make()
    for _ in range(2):
        assert chain.contains([key_of(1)]) == [False]
        assert chain.heads([key_of(1)]) == [None]
        assert chain.get([key_of(1)]) == [None]
        assert chain.load_record(key_of(1)) is None
        assert chain.claim(key_of(1))
        chain.release(key_of(1))
        chain.prefetch([key_of(1)])
        chain.put([block(2)])
        chain.update([Scores(key_of(1), b"", 1)], 1)
        chain.drop([key_of(1)])
        chain.save_record(key_of(1), NOBODY, b"record")
        chain.drop_record(key_of(1))
        assert chain.erase(NOBODY).wait() <= 3  # what waited
        stats = chain.stats()
        assert stats.state in (kind, "off")
        assert stats.errors[kind] > 0
    chain.close()


@pytest.mark.parametrize(("error", "kind"), FAILURES)
def test_reads_that_fail_are_misses_and_after_three_misses_at_once(
    make: Make, tier: FakeTier, clock: Clock, caplog: pytest.LogCaptureFixture, error: Exception, kind: str
) -> None:
    tier.put([block(1)])
    chain = make()
    fail(tier, READS, error)
    for _ in range(5):
        assert not found(chain, 1)
    asked = 1 if kind in ("full", "readonly") else 3
    assert tier.calls.count("get") == asked
    assert chain.stats().state == kind
    assert chain.stats().errors == {kind: asked}
    tier.fails = {}
    assert not found(chain, 1)
    clock.now += 5
    assert found(chain, 1)
    assert chain.stats().state == "ok"
    assert len(lines(caplog)) == (2 if asked == 1 else 3)  # the first failure, out of use, and well again
    assert "works again" in lines(caplog)[-1]
    assert key_of(1).hex()[:16] not in caplog.text


def test_what_waits_is_found_while_the_tier_can_not_be_read(make: Make, tier: FakeTier) -> None:
    chain = make()
    gate = Gate(tier, "put")
    chain.put([block(1)])
    assert gate.reached.wait(SETTLED)
    fail(tier, READS, StoreUnavailable("io", "failing"))
    for _ in range(5):
        assert found(chain, 1)
        assert chain.heads([key_of(1)]) == [block(1).head]
        assert not found(chain, 2)
    gate.open()


def test_a_slow_tier_is_left_alone_for_a_while(make: Make, tier: FakeTier, clock: Clock) -> None:
    tier.put([block(i) for i in range(40)])
    chain = make()

    def slow(name: str) -> None:
        clock.now += 1.5

    tier.before = slow
    begun = clock.now
    payloads = chain.get([key_of(i) for i in range(40)])
    assert sum(payload is not None for payload in payloads) == 24  # what was read is right, the rest is not waited for
    assert clock.now - begun == 4.5
    for _ in range(100):
        assert not found(chain, 1)
    assert clock.now - begun == 4.5
    assert chain.stats().state == "slow"
    assert chain.stats().errors == {"slow": 3}
    tier.before = lambda name: None
    clock.now += 5
    assert found(chain, 1)
    assert chain.stats().state == "ok"


def test_a_slow_write_is_counted_and_told_and_goes_on(
    make: Make, tier: FakeTier, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    chain = make()

    def slow(name: str) -> None:
        if name == "put":
            clock.now += 1.5

    tier.before = slow
    for i in range(5):
        chain.put([block(i)])
        assert chain.flush(SETTLED)
    assert chain.stats().stored == 5
    assert chain.stats().state == "ok"
    assert chain.stats().errors == {"slow": 5}
    assert len(lines(caplog)) == 1


@pytest.mark.parametrize(("error", "kind"), FOR_GOOD)
@pytest.mark.parametrize("name", ["get", "put"])
def test_a_tier_that_is_not_ours_is_off_for_good(
    make: Make, tier: FakeTier, clock: Clock, caplog: pytest.LogCaptureFixture, error: Exception, kind: str, name: str
) -> None:
    tier.put([block(1)])
    chain = make()
    fail(tier, (name,), error)
    found(chain, 1)
    chain.put([block(2)])
    assert chain.flush(SETTLED)
    tier.fails = {}
    clock.now += 1000
    tier.calls.clear()
    assert not found(chain, 1)
    assert chain.room == 0
    assert chain.put([block(3)]) == 0
    assert not chain.save_record(key_of(100), NOBODY, b"record")
    assert chain.erase(NOBODY).wait() == 0
    assert chain.flush(SETTLED)
    assert tier.calls == []
    stats = chain.stats()
    assert (stats.state, stats.errors, stats.waiting) == ("off", {kind: 1}, 0)
    assert len(lines(caplog)) == 1
    assert "off for good" in lines(caplog)[0]


@pytest.mark.parametrize(("error", "kind"), FOR_GOOD[:2])
def test_a_tier_that_is_not_ours_when_it_is_opened_is_off(
    make: Make, caplog: pytest.LogCaptureFixture, error: Exception, kind: str
) -> None:
    def opener() -> Tier:
        raise error

    chain = make(opener)
    assert chain.tick == 0
    assert not found(chain, 1)
    assert chain.put([block(1)]) == 0
    assert chain.flush(SETTLED)
    assert (chain.stats().state, chain.stats().errors) == ("off", {kind: 1})
    assert len(lines(caplog)) == 1


def test_a_tier_that_can_not_be_opened_is_opened_later(
    make: Make, tier: FakeTier, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    tier.put([block(1)])
    tier.tick = 12
    failing = True
    tries = 0

    def opener() -> Tier:
        nonlocal tries
        tries += 1
        if failing:
            raise StoreLocked("another process opens it")
        return tier

    chain = make(opener)
    assert chain.stats().state == "locked"
    assert not found(chain, 1)
    assert chain.put([block(2)]) == 1
    clock.now += 5
    until(chain, lambda: tries == 2)
    failing = False
    clock.now += 10
    assert chain.flush(SETTLED)
    assert found(chain, 1)
    assert found(chain, 2)
    assert chain.tick == 12
    assert chain.stats().stored == 1
    assert (chain.stats().state, chain.stats().errors) == ("ok", {"locked": 2})
    assert len(lines(caplog)) == 2


def test_an_opener_that_fails_in_an_unforeseen_way_later_turns_the_tier_off(make: Make, clock: Clock) -> None:
    errors: list[Exception] = [ZeroDivisionError(), StoreLocked("at first")]

    def opener() -> Tier:
        raise errors.pop()

    chain = make(opener)
    chain.put([block(1)])
    clock.now += 5
    assert chain.flush(SETTLED)
    assert chain.stats().state == "off"


@pytest.mark.parametrize("method", ["get", "heads"])
def test_what_is_damaged_is_a_miss_and_is_dropped(
    make: Make, tier: FakeTier, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    tier.put([block(i) for i in range(4)])
    tier.rotten = {key_of(1), key_of(3)}
    chain = make()
    results = getattr(chain, method)([key_of(i) for i in range(4)])
    assert [result is not None for result in results] == [True, False, True, False]
    assert chain.contains([key_of(i) for i in range(4)]) == [True, False, True, False]
    assert chain.stats().damaged == 2
    assert chain.put([block(1)]) == 1  # computed again
    assert chain.flush(SETTLED)
    assert set(tier.blocks) == {key_of(0), key_of(1), key_of(2)}
    assert found(chain, 1)
    tier.rotten = {key_of(2)}
    assert not found(chain, 2)
    assert chain.stats().damaged == 3
    assert chain.stats().state == "ok"
    assert len(lines(caplog)) == 1


def test_a_damaged_record_is_a_miss_and_is_dropped(make: Make, tier: FakeTier) -> None:
    tier.save_record(key_of(1), NOBODY, b"record")
    tier.rotten = {key_of(1)}
    chain = make()
    assert chain.load_record(key_of(1)) is None
    assert chain.load_record(key_of(2)) is None
    assert chain.flush(SETTLED)
    assert tier.records == {}
    assert tier.calls.count("drop_record") == 1
    assert chain.stats().damaged == 1


def test_close_does_not_wait_for_a_call_that_hangs(
    make: Make, tier: FakeTier, caplog: pytest.LogCaptureFixture
) -> None:
    chain = make(slow_s=0.05)
    gate = Gate(tier, "put")
    chain.put([block(1)])
    assert gate.reached.wait(SETTLED)
    chain.close()
    assert not tier.closed  # its call goes on
    assert "1 blocks" in caplog.text
    assert "not written" in caplog.text
    gate.open()


def test_close_does_not_wait_long_for_a_tier_that_is_locked(make: Make, tier: FakeTier) -> None:
    chain = make()
    fail(tier, ("put",), StoreLocked("another process writes"))
    chain.put([block(1)])
    chain.close()
    assert tier.closed


def test_many_readers_and_one_writer_come_to_no_harm(make: Make, tier: FakeTier) -> None:
    chain = make(waiting_bytes=2**20, batch_bytes=1000)
    stop = threading.Event()
    wrong: list[int] = []

    def read() -> None:
        while not stop.is_set():
            for i in range(200):
                payload = chain._fetch([key_of(i)])[0]
                if payload is not None and not np.array_equal(payload, block(i).payload):
                    wrong.append(i)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for i in range(200):
        chain.put([block(i)])
        if i % 10 == 9:
            chain.drop([key_of(i - 5)])
        if i % 50 == 0:
            chain.prefetch([key_of(j) for j in range(i)])
    assert chain.flush(SETTLED)
    stop.set()
    for reader in readers:
        reader.join(SETTLED)
    assert wrong == []
    assert len(tier.blocks) == 180
