"""A chain with a far tier in memory: what is published and when, what is asked far away, who tries it again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from kvpager.errors import ConfigError, StoreUnavailable
from kvpager.stored import Scores
from kvpager.stores.chain import Chain
from kvpager.stores.limits import Limits
from kvpager.stores.publishing import Publisher, Publishing
from kvpager.stores.shared import Far
from tests.redis_rig import until
from tests.stores.fake import NOBODY, SETTLED, Clock, FakeTier, Gate, block, key_of

Make = Callable[..., Chain]


class FakeFar(FakeTier):
    """A far tier, which knows what it has."""

    name = "far"

    def known(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self.blocks for key in keys]

    def probe(self) -> None:
        self._enter("probe")


@pytest.fixture
def near() -> FakeTier:
    return FakeTier()


@pytest.fixture
def far() -> FakeFar:
    return FakeFar()


@pytest.fixture
def make(near: FakeTier, far: FakeFar) -> Iterator[Make]:
    made: list[Chain] = []

    def build(policy: str = "selective", hits: int = 1, alone: bool = False, **limits: float) -> Chain:
        openers = [] if alone else [lambda: near]
        given = Limits(**{"linger_s": 0.001, "close_s": 0.5, **limits})  # type: ignore[arg-type]
        chain = Chain(openers, given, Clock(), Far(lambda: far, Publishing(policy, hits)))  # type: ignore[arg-type]
        made.append(chain)
        return chain

    yield build
    for chain in made:
        chain.close()


def numbers(tier: FakeTier) -> list[int]:
    return sorted(int.from_bytes(key, "big") for key in tier.blocks)


def hit(chain: Chain, *found: int, hits: int = 1) -> list[bytes]:
    return chain.update([Scores(key_of(number), b"", hits) for number in found], 1)


@pytest.mark.parametrize(("policy", "there"), [("all", [1, 2, 3]), ("selective", []), ("none", [])])
def test_what_is_put_is_published_by_the_policy(
    make: Make, near: FakeTier, far: FakeFar, policy: str, there: list[int]
) -> None:
    chain = make(policy)
    assert chain.put([block(1), block(2), block(3)]) == 3
    assert chain.flush(SETTLED)
    assert numbers(near) == [1, 2, 3]
    assert numbers(far) == there


def test_a_block_is_published_after_so_many_hits_from_the_near_tier(make: Make, far: FakeFar) -> None:
    chain = make(hits=3)
    chain.put([block(1), block(2), block(3)])
    hit(chain, 1, 2)
    hit(chain, 1)
    assert chain.flush(SETTLED)
    assert numbers(far) == []
    assert hit(chain, 1) == []
    hit(chain, 3, hits=5)
    assert chain.flush(SETTLED)
    assert numbers(far) == [1, 3]
    for number in (1, 3):
        assert np.array_equal(far.blocks[key_of(number)].payload, block(number).payload)


def test_a_block_of_a_high_score_is_published(make: Make, far: FakeFar) -> None:
    chain = make(hits=100)
    chain.put([block(1), block(2)])
    chain.update([Scores(key_of(1), b"", 0, 0.5), Scores(key_of(2), b"", 0, 0.99)], 1)
    assert chain.flush(SETTLED)
    assert numbers(far) == [2]


@pytest.mark.parametrize("policy", ["none", "selective"])
def test_what_is_asked_for_is_published_whatever_the_policy(make: Make, far: FakeFar, policy: str) -> None:
    chain = make(policy)
    chain.put([block(1), block(2)])
    chain.publish([key_of(1), key_of(3)])
    assert chain.flush(SETTLED)
    chain.put([block(3), block(4)])
    assert chain.flush(SETTLED)
    assert numbers(far) == [1, 3]


def test_without_a_near_tier_blocks_are_wanted_when_they_were_found_again(make: Make, far: FakeFar) -> None:
    chain = make(alone=True)
    keys = [key_of(number) for number in (1, 2, 3)]
    assert chain.wants(keys) == [False] * 3
    assert chain.put([block(1), block(2)]) == 2
    assert chain.room
    assert hit(chain, 1) == [key_of(1)]
    assert hit(chain, 1) == []
    chain.publish([key_of(3)])
    assert chain.wants(keys) == [True, False, True]
    assert chain.put([block(1), block(2), block(3)]) == 3
    assert chain.flush(SETTLED)
    assert numbers(far) == [1, 3]
    assert chain.wants(keys) == [False] * 3


def test_nothing_is_asked_far_away_when_blocks_are_put(make: Make, far: FakeFar) -> None:
    for alone in (False, True):
        chain = make("all", alone=alone)
        far.calls.clear()
        chain.wants([key_of(1)])
        chain.put([block(1)])
        chain.publish([key_of(1)])
        assert chain.flush(SETTLED)
        assert set(far.calls) <= {"put", "update"}


def test_what_the_far_tier_has_is_found_and_taken_into_the_near_one(make: Make, near: FakeTier, far: FakeFar) -> None:
    far.put([block(1)])
    chain = make()
    assert chain.contains([key_of(1), key_of(2)]) == [True, False]
    assert [head is not None for head in chain.heads([key_of(1), key_of(2)])] == [True, False]
    (payload,) = chain.get([key_of(1)])
    assert payload is not None
    assert chain.flush(SETTLED)
    assert numbers(near) == [1]
    stats = chain.stats()
    assert (stats.hits, stats.tiers["local"].hits, stats.tiers["shared"].hits) == (1, 0, 1)
    assert list(stats.tiers) == ["local", "shared"]


def test_forgotten_and_erased_blocks_are_not_published_any_more(make: Make, near: FakeTier, far: FakeFar) -> None:
    chain = make()
    chain.put([block(1), block(2)])
    assert chain.flush(SETTLED)
    gate = Gate(near, "get")  # a read of the near tier goes on
    hit(chain, 1, 2)
    assert gate.reached.wait(SETTLED)
    chain.drop([key_of(1)])
    chain.erase(NOBODY)
    gate.open()
    assert chain.flush(SETTLED)
    assert numbers(far) == []


def test_while_reading_fails_nobody_who_waits_tries(make: Make, far: FakeFar) -> None:
    chain = make("all", alone=True, pause_s=0.01, longest_pause_s=0.01)
    error = StoreUnavailable("timeout", "no answer")
    far.fails = dict.fromkeys(("contains", "heads", "get", "claim", "load_record", "probe"), error)
    assert chain.contains([key_of(1)]) == [False]
    assert chain.stats().state == "timeout"  # once is enough
    far.calls.clear()
    for _ in range(50):
        assert chain.contains([key_of(1)]) == [False]
        assert chain.heads([key_of(1)]) == [None]
        assert chain.get([key_of(1)]) == [None]
        assert chain.claim(key_of(2))
        assert chain.load_record(key_of(2)) is None
    assert set(far.calls) <= {"probe"}


def test_a_far_tier_that_answers_again_is_used_again(near: FakeTier, far: FakeFar) -> None:
    limits = Limits(pause_s=0.01, longest_pause_s=0.02, linger_s=0.001)
    chain = Chain([lambda: near], limits, far=Far(lambda: far, Publishing("all")))
    far.put([block(1)])
    far.fails = dict.fromkeys(("contains", "probe"), StoreUnavailable("timeout", "no answer"))
    assert chain.contains([key_of(1)]) == [False]
    until(lambda: far.calls.count("probe") >= 3)
    assert chain.contains([key_of(1)]) == [False]
    far.fails = {}
    until(lambda: chain.contains([key_of(1)]) == [True])
    assert chain.stats().state == "ok"
    chain.close()
    assert far.closed


def test_a_far_tier_that_is_slow_is_left_alone(near: FakeTier, far: FakeFar) -> None:
    clock = Clock()
    far.put([block(number) for number in range(40)])

    def passes(name: str) -> None:
        clock.now += 0.3 if name == "get" else 0.0

    far.before = passes
    chain = Chain([], Limits(close_s=0.5), clock, Far(lambda: far, Publishing(), slow_s=0.2))
    assert sum(payload is not None for payload in chain.get([key_of(number) for number in range(40)])) == 24
    assert chain.stats().state == "slow"
    chain.close()


def test_a_near_store_is_not_held_back_by_a_far_one_that_takes_nothing(
    make: Make, near: FakeTier, far: FakeFar
) -> None:
    chain = make("all")
    far.fails = {"put": StoreUnavailable("timeout", "no answer")}
    for number in range(20):
        assert chain.put([block(number)]) == 1
    chain.flush(0.2)
    assert numbers(near) == list(range(20))
    assert chain.stats().tiers["shared"].state == "timeout"


def test_the_claim_of_both_tiers_counts(make: Make, near: FakeTier, far: FakeFar) -> None:
    chain = make()
    far.claimed.add(key_of(1))  # another node's
    assert not chain.claim(key_of(1))
    assert near.claimed == set()
    far.fails = {"claim": StoreUnavailable("timeout", "no answer")}
    assert chain.claim(key_of(2))
    assert near.claimed == {key_of(2)}
    assert not chain.claim(key_of(2))  # on this machine it still counts


@pytest.mark.parametrize("wrong", [{"policy": "some"}, {"hits": 0}, {"rank": 0.0}, {"rank": 2.0}])
def test_bad_publishing_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Publishing(**wrong)  # type: ignore[arg-type]


def test_what_a_publisher_remembers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpager.stores.publishing._MOST", 10)
    publisher = Publisher(Publishing(hits=2))
    publisher.count([Scores(key_of(number), b"", 1) for number in range(100)])
    assert publisher.count([Scores(key_of(number), b"", 1) for number in (0, 99)]) == [key_of(99)]
    publisher.choose([key_of(number) for number in range(100)])
    assert sum(publisher.wants([key_of(number) for number in range(100)])) == 10
