"""The chain over several tiers in memory, reading ahead, its settings and its end."""

import pytest

from kvpager.errors import ConfigError, MissingDependency, StoreUnavailable
from kvpager.stored import Scores
from kvpager.stores.chain import Chain
from kvpager.stores.limits import Limits
from kvpager.stores.tier import Tier
from tests.stores.chain_rig import MINE, SIZE, Make, same
from tests.stores.fake import NOBODY, SETTLED, Clock, FakeTier, Gate, block, key_of


def test_what_a_farther_tier_has_is_put_into_the_nearer_one(make: Make, tier: FakeTier) -> None:
    far = FakeTier()
    far.put([block(i) for i in range(20)])
    far.save_record(key_of(100), MINE, b"far")
    chain = make(tier, far)
    keys = [key_of(i) for i in range(20)]
    assert chain.contains([*keys, key_of(50)]) == [True] * 20 + [False]
    assert chain.heads(keys) == [block(i).head for i in range(20)]
    assert same(chain.get([*keys, key_of(50)]), [*(block(i) for i in range(20)), None])
    assert chain.load_record(key_of(100)) == b"far"
    assert chain.flush(SETTLED)
    assert set(tier.blocks) == set(keys)
    far.calls.clear()
    assert same(chain.get(keys), [block(i) for i in range(20)])
    assert far.calls == []


def test_all_tiers_are_written_to_and_claimed(make: Make, tier: FakeTier) -> None:
    far = FakeTier()
    chain = make(tier, far)
    chain.put([block(1)])
    chain.save_record(key_of(100), MINE, b"record")
    chain.update([Scores(key_of(1), b"new", 1)], 4)
    assert chain.claim(key_of(100))
    assert chain.flush(SETTLED)
    for one in (tier, far):
        assert one.blocks[key_of(1)].head.scores == b"new"
        assert one.records[key_of(100)] == (MINE, b"record")
        assert one.claimed == {key_of(100)}
    chain.release(key_of(100))
    far.claimed.add(key_of(100))
    assert not chain.claim(key_of(100))
    assert tier.claimed == set()
    chain.drop([key_of(1)])
    chain.drop_record(key_of(100))
    assert chain.flush(SETTLED)
    assert (tier.blocks, far.blocks, tier.records, far.records) == ({}, {}, {}, {})


def test_a_farther_tier_that_hangs_holds_nobody_up(make: Make, tier: FakeTier) -> None:
    far = FakeTier()
    gate = Gate(far, "put")
    chain = make(tier, far, waiting_bytes=2 * SIZE)
    for i in range(10):
        assert chain.put([block(i)]) == 1
        assert gate.reached.wait(SETTLED)
        chain._levels[0].writer.flush(SETTLED)
    assert len(tier.blocks) == 10
    gate.open()
    assert chain.flush(SETTLED)
    assert 2 <= len(far.blocks) < 10


def test_what_is_prefetched_is_read_once_and_forgotten_when_it_is_dropped(make: Make, tier: FakeTier) -> None:
    tier.put([block(i) for i in range(6)])
    chain = make()
    gate = Gate(tier, "get")
    chain.prefetch([key_of(i) for i in range(3)])
    assert gate.reached.wait(SETTLED)
    gate.open()
    assert same(chain.get([key_of(i) for i in range(3)]), [block(i) for i in range(3)])
    assert tier.calls.count("get") == 1
    chain.prefetch([key_of(4)])
    chain.drop([key_of(4)])
    assert chain.get([key_of(4)]) == [None]
    chain.prefetch([key_of(5)])
    chain.erase(NOBODY).wait()
    assert chain.get([key_of(5)]) == [None]


def test_close_writes_what_waits_and_takes_nothing_more(make: Make, tier: FakeTier) -> None:
    chain = make(linger_s=1000)
    chain.put([block(i) for i in range(3)])
    chain.save_record(key_of(100), MINE, b"record")
    chain.close()
    chain.close()
    assert tier.closed
    assert set(tier.blocks) == {key_of(i) for i in range(3)}
    assert set(tier.records) == {key_of(100)}
    assert chain.room == 0
    assert chain.put([block(4)]) == 0
    assert not chain.save_record(key_of(1), MINE, b"")
    assert chain.get([key_of(1)]) == [None]
    assert chain.contains([key_of(1)]) == [False]
    assert chain.load_record(key_of(100)) is None
    chain.update([Scores(key_of(1), b"", 1)], 1)
    chain.drop([key_of(1)])
    chain.drop_record(key_of(1))
    chain.prefetch([key_of(1)])
    assert chain.erase(MINE).wait() == 0
    assert chain.stats().stored == 3


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"waiting_bytes: 0 is not above zero"):
        Limits(waiting_bytes=0)
    with pytest.raises(ConfigError, match="at least one tier"):
        Chain([])


def test_a_missing_package_is_told_and_not_counted_as_a_fault() -> None:
    def opener() -> Tier:
        raise MissingDependency("pip install it")

    with pytest.raises(MissingDependency):
        Chain([opener])


def test_the_state_is_told_without_a_look_at_the_tier_but_for_one_a_second(
    make: Make, tier: FakeTier, clock: Clock
) -> None:
    chain = make(failures=1)
    tier.calls.clear()
    for _ in range(100):
        assert chain.states == {"local": "ok"}
    assert tier.calls == []
    tier.fails = {"contains": StoreUnavailable("lost", "it was deleted")}
    clock.now += 1
    assert chain.states == chain.states == {"local": "lost"}
    assert tier.calls == ["contains"]
    tier.fails = {}
    clock.now += 2
    assert chain.states == {"local": "ok"}
    clock.now -= 1000  # a clock that jumps back
    assert chain.states == {"local": "ok"}
    assert tier.calls == ["contains"] * 3
    chain.close()
    clock.now += 100
    assert chain.states == {"local": "ok"}
    assert tier.calls == [*["contains"] * 3, "close"]
