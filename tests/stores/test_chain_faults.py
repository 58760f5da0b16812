"""The chain over tiers in memory that fail: nothing is raised, all is counted, told once, mended where it can be."""

import os
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvpager.errors import (
    StoreDamaged,
    StoreError,
    StoreForeign,
    StoreFull,
    StoreLocked,
    StoreNewer,
    StoreUnavailable,
)
from kvpager.stored import Scores
from kvpager.stores.chain import Chain
from kvpager.stores.limits import Limits
from kvpager.stores.tier import Tier
from tests.stores.fake import NOBODY, SETTLED, Clock, FakeTier, Gate, block, key_of

NO_SPACE = OSError(28, os.strerror(28))
FAILURES = [
    (StoreFull("full"), "full"),
    (StoreLocked("locked"), "locked"),
    (StoreDamaged("damaged"), "damaged"),
    (StoreUnavailable("lost", "lost"), "lost"),
    (StoreUnavailable("readonly", "read-only"), "readonly"),
    (StoreUnavailable("io", "failing"), "io"),
    (StoreError("another"), "io"),
    (OSError(5, os.strerror(5)), "io"),
    (NO_SPACE, "full"),
    (MemoryError(), "io"),
]
FOR_GOOD = [
    (StoreForeign("another application's"), "foreign"),
    (StoreNewer("newer"), "newer"),
    (ZeroDivisionError("unforeseen"), "io"),
]
READS = ("contains", "heads", "get", "load_record", "sizes")
WRITES = ("put", "update", "drop", "save_record", "drop_record", "erase")
LIMITS = {"failures": 3, "pause_s": 5.0, "longest_pause_s": 20.0, "slow_s": 1.0, "erase_s": 0.05, "close_s": 0.05}
Make = Callable[..., Chain]


@pytest.fixture
def tier() -> FakeTier:
    return FakeTier()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(tier: FakeTier, clock: Clock) -> Iterator[Make]:
    made: list[Chain] = []

    def build(opener: Callable[[], Tier] | None = None, **limits: float) -> Chain:
        chain = Chain([opener or (lambda: tier)], Limits(**{**LIMITS, **limits}), clock)  # type: ignore[arg-type]
        made.append(chain)
        return chain

    yield build
    for chain in made:
        chain.close()


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def fail(tier: FakeTier, names: tuple[str, ...], error: Exception) -> None:
    tier.fails = dict.fromkeys(names, error)


def until(chain: Chain, happened: Callable[[], bool]) -> None:
    """Let the writer work until something has happened."""
    ends = time.monotonic() + SETTLED
    while not happened():
        assert time.monotonic() < ends
        chain.flush(0.001)


def found(chain: Chain, number: int) -> bool:
    """Whether a block is found, and right."""
    payload = chain.get([key_of(number)])[0]
    assert payload is None or np.array_equal(payload, block(number).payload)
    return payload is not None


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


@pytest.mark.parametrize("error", [StoreDamaged("begun anew"), StoreUnavailable("lost", "begun anew")])
def test_what_was_to_be_written_goes_into_a_tier_that_was_begun_anew(
    make: Make, tier: FakeTier, error: StoreError
) -> None:
    chain = make()
    chain.put([block(1)])
    assert chain.flush(SETTLED)

    def anew(name: str) -> None:
        if name == "put" and key_of(1) in tier.blocks:
            tier.blocks.clear()
            raise error

    tier.before = anew
    chain.put([block(2), block(3)])
    chain.save_record(key_of(100), NOBODY, b"record")
    assert chain.flush(SETTLED)
    assert [found(chain, i) for i in (1, 2, 3)] == [False, True, True]
    assert chain.load_record(key_of(100)) == b"record"
    assert chain.stats().errors == {error.kind: 1}
    assert chain.stats().state == "ok"


def test_a_locked_tier_is_waited_for_and_all_is_written_then(make: Make, tier: FakeTier, clock: Clock) -> None:
    chain = make()
    fail(tier, WRITES, StoreLocked("another process writes"))
    assert chain.put([block(i) for i in range(5)]) == 5
    assert chain.save_record(key_of(100), NOBODY, b"record")
    until(chain, lambda: chain.stats().state == "locked")
    assert chain.stats().errors == {"locked": 3}
    assert chain.put([block(5)]) == 1
    assert chain.save_record(key_of(101), NOBODY, b"record")
    assert all(found(chain, i) for i in range(6))
    for tries in range(4, 14):  # more often than a record would be tried on a tier that fails
        clock.now += 20
        until(chain, lambda tries=tries: chain.stats().errors["locked"] == tries)  # type: ignore[misc]
    tier.fails = {}
    clock.now += 20
    assert chain.flush(SETTLED)
    stats = chain.stats()
    assert (stats.state, stats.stored, stats.skipped, stats.records) == ("ok", 6, 0, 2)


@pytest.mark.parametrize("error", [StoreFull("full"), StoreUnavailable("readonly", "read-only"), NO_SPACE])
def test_where_nothing_can_be_written_blocks_are_given_up_and_nothing_is_taken_for_a_while(
    make: Make, tier: FakeTier, clock: Clock, error: Exception
) -> None:
    tier.put([block(1)])
    chain = make()
    fail(tier, WRITES, error)
    assert chain.put([block(2), block(3)]) == 2
    assert chain.flush(SETTLED)
    stats = chain.stats()
    assert (stats.skipped, stats.waiting, stats.waiting_bytes, stats.stored) == (2, 0, 0, 0)
    assert stats.state in ("full", "readonly")
    assert chain.room == 0
    assert chain.put([block(1), block(4)]) == 1  # there already
    assert not chain.save_record(key_of(100), NOBODY, b"record")
    assert found(chain, 1)  # reading goes on
    assert not found(chain, 2)
    clock.now += 5
    assert chain.room > 0
    assert chain.put([block(5)]) == 1  # the next try
    assert chain.flush(SETTLED)
    assert chain.room == 0
    tier.fails = {}
    clock.now += 10
    assert chain.put([block(5)]) == 1
    assert chain.flush(SETTLED)
    assert chain.stats().state == "ok"
    assert chain.stats().stored == 1


def test_a_disk_that_fails_is_tried_three_times(make: Make, tier: FakeTier) -> None:
    chain = make()
    fail(tier, ("put",), StoreUnavailable("io", "failing"))
    chain.put([block(1)])
    assert chain.flush(SETTLED)
    assert tier.calls.count("put") == 3
    assert chain.stats().skipped == 1
    assert chain.room == 0


def test_a_record_and_what_is_to_be_forgotten_are_tried_again_but_not_for_ever(
    make: Make, tier: FakeTier, clock: Clock
) -> None:
    tier.put([block(1)])
    tier.save_record(key_of(101), NOBODY, b"older")
    chain = make()
    fail(tier, WRITES, StoreFull("full"))
    gate = Gate(tier, "drop")
    chain.drop([key_of(1)])
    assert gate.reached.wait(SETTLED)
    chain.drop_record(key_of(101))
    assert chain.save_record(key_of(100), NOBODY, b"record")
    gate.open()
    assert not found(chain, 1)
    assert chain.load_record(key_of(101)) is None
    assert chain.load_record(key_of(100)) == b"record"
    for tries in range(1, 16):
        until(chain, lambda tries=tries: chain.stats().errors.get("full", 0) == tries)  # type: ignore[misc]
        clock.now += 20
    assert chain.flush(SETTLED)
    assert [tier.calls.count(name) for name in ("drop", "drop_record", "save_record")] == [5, 5, 6]  # one before
    assert chain.load_record(key_of(100)) is None
    assert chain.stats().waiting_bytes == 0


def test_on_a_full_disk_forgetting_does_not_wait(make: Make, tier: FakeTier, clock: Clock) -> None:
    tier.put([block(1), block(2)])
    chain = make(erase_s=SETTLED)
    fail(tier, ("put",), StoreFull("full"))
    chain.put([block(3)])
    assert chain.flush(SETTLED)
    chain.drop([key_of(1)])
    assert chain.erase(NOBODY).wait() == 1
    assert tier.blocks == {}
    assert chain.stats().state == "full"  # what was given free is no proof that there is room
    assert chain.room == 0
    fail(tier, WRITES, StoreFull("full"))
    chain.drop([key_of(1)])
    until(chain, lambda: chain.stats().errors["full"] == 2)
    assert not chain.flush(0.02)  # it is not tried again before the pause is over
    assert chain.stats().errors["full"] == 2


def test_erasing_is_tried_for_as_long_as_it_takes(make: Make, tier: FakeTier, clock: Clock) -> None:
    tier.put([block(1)])
    chain = make()
    fail(tier, ("erase",), StoreUnavailable("io", "failing"))
    assert chain.erase(NOBODY).wait() == 0
    for tries in range(1, 20):
        until(chain, lambda tries=tries: chain.stats().errors.get("io", 0) >= tries)  # type: ignore[misc]
        clock.now += 20
        assert chain.heads([key_of(1)]) == [None]
    tier.fails = {}
    clock.now += 20
    assert chain.flush(SETTLED)
    assert tier.blocks == {}


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
