"""What a chain does with what is to be written, or forgotten, while its tier can't be written."""

import pytest

from kvpager.errors import (
    StoreDamaged,
    StoreError,
    StoreFull,
    StoreLocked,
    StoreUnavailable,
)
from tests.stores.chain_rig import LIMITS, NO_SPACE, WRITES, Make, fail, found, until
from tests.stores.fake import NOBODY, SETTLED, Clock, FakeTier, Gate, block, key_of


@pytest.fixture
def limits() -> dict[str, float]:
    return LIMITS


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
