"""How much of the processors writing leaves to its owner."""

from collections.abc import Callable, Iterator

import pytest

from kvpager.stores.backlog import size_of
from kvpager.stores.chain import Chain
from kvpager.stores.limits import Limits
from tests.stores.fake import SETTLED, FakeTier, block

SIZE = size_of(block(0))
Make = Callable[..., Chain]


@pytest.fixture
def tier() -> FakeTier:
    return FakeTier()


@pytest.fixture
def make(tier: FakeTier) -> Iterator[Make]:
    made: list[Chain] = []

    def build(**limits: float) -> Chain:
        made.append(Chain([lambda: tier], Limits(**limits)))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for chain in made:
        chain.close()


def test_blocks_wait_while_their_owner_computes_and_less_than_three_quarters_of_what_may_wait_do(
    make: Make, tier: FakeTier
) -> None:
    chain = make(waiting_bytes=10 * SIZE, batch_bytes=SIZE)
    backlog = chain._levels[0]._backlog

    def settled(count: int) -> bool:
        with backlog.changed:
            return backlog.changed.wait_for(lambda: backlog.count == count, SETTLED)

    chain.yields(0)
    chain.put([block(number) for number in range(4)])
    assert chain.stats().waiting == 4
    chain.put([block(number) for number in range(4, 8)])
    assert settled(7), "what is more is written"
    chain.yields(1)
    assert settled(0)
    chain.yields(0)
    chain.put([block(9)])
    assert chain.flush(SETTLED), "who flushes does not wait for the owner"
    assert len(tier.blocks) == 9


def test_blocks_are_written_in_pieces_with_pauses_while_they_may_take_a_share_of_a_processor(
    make: Make, tier: FakeTier
) -> None:
    chain = make(waiting_bytes=20 * SIZE, batch_bytes=8 * SIZE)
    backlog = chain._levels[0]._backlog
    chain.yields(1e-9)
    chain.put([block(number) for number in range(12)])
    with backlog.changed:
        assert backlog.changed.wait_for(lambda: backlog.count == 11, SETTLED)
    assert len(tier.blocks) == 1, "the pause is longer than any test"
    chain.yields(1)
    with backlog.changed:
        assert backlog.changed.wait_for(lambda: backlog.idle, SETTLED)
    assert len(tier.blocks) == 12


@pytest.mark.parametrize("share", [0, 1e-9])
def test_an_owner_that_says_nothing_more_has_stopped_computing(make: Make, tier: FakeTier, share: float) -> None:
    chain = make(yield_s=0.01)
    backlog = chain._levels[0]._backlog
    chain.yields(share)
    chain.put([block(number) for number in range(12)])
    with backlog.changed:
        assert backlog.changed.wait_for(lambda: backlog.idle, SETTLED)
    assert len(tier.blocks) == 12
