"""Selection: the budget, the protected pages, ties, and the figures that come with it."""

from __future__ import annotations

import numpy as np
import pytest

from kvpager.core.selection import pull, select
from kvpager.errors import InputError
from kvpager.ports import Room


@pytest.mark.parametrize("pages", [3, 4, 10, 29])
@pytest.mark.parametrize("heads", [1, 3])
def test_the_layer_s_budget_is_met_exactly_and_protected_pages_are_in(heads: int, pages: int) -> None:
    mass = np.random.default_rng(1).random((heads, 30), np.float32)
    mass[:, [0, 28, 29]] = 0
    chosen = select(mass, Room(pages, 1, 2))[0]
    assert chosen.sum() == heads * pages
    assert chosen[:, [0, 28, 29]].all()


def test_the_rest_goes_to_the_largest_estimates_of_any_head() -> None:
    mass = np.array([[9, 1, 8, 7, 6, 0], [9, 2, 3, 1, 1, 0]], np.float32)
    chosen, threshold = select(mass, Room(4, 1, 1))
    np.testing.assert_array_equal(chosen, np.array([[1, 0, 1, 1, 1, 1], [1, 0, 1, 0, 0, 1]], bool))
    assert threshold == 3


def test_it_is_the_best_choice_among_all_within_the_budget() -> None:
    rng = np.random.default_rng(2)
    mass = rng.random((3, 40), np.float32)
    chosen, threshold = select(mass, Room(12, 2, 3))
    free = np.sort(mass[:, 2:-3].ravel())[::-1][: (12 - 5) * 3]
    expected = free.sum() + mass[:, :2].sum() + mass[:, -3:].sum()
    assert mass[chosen].sum() == pytest.approx(float(expected), rel=1e-5)
    ratio = mass / threshold
    assert (ratio[:, 2:-3] >= 1).sum() == (12 - 5) * 3


def test_between_equals_the_earlier_block_wins_then_the_lower_head() -> None:
    chosen, _threshold = select(np.ones((2, 8), np.float32), Room(4, 1, 1))
    assert np.flatnonzero(chosen[0]).tolist() == [0, 1, 2, 7]
    assert np.flatnonzero(chosen[1]).tolist() == [0, 1, 2, 7]
    mass = np.ones((2, 8), np.float32)
    mass[1, 5] = 2
    chosen = select(mass, Room(4, 1, 1))[0]
    assert np.flatnonzero(chosen[0]).tolist() == [0, 1, 2, 7]
    assert np.flatnonzero(chosen[1]).tolist() == [0, 1, 5, 7]


def test_all_candidates_are_in_when_the_budget_holds_them() -> None:
    mass = np.array([[0.0, 0.5, 0.25, 0.0]], np.float32)
    chosen, threshold = select(mass, Room(9, 1, 1))
    assert chosen.all()
    assert threshold == 0.25


def test_candidates_that_start_later_have_no_sinks() -> None:
    mass = np.arange(10, dtype=np.float32)[None]
    assert not select(mass, Room(4, 2, 1, 2))[0][0, 0]
    partly = select(mass, Room(4, 2, 1, 1))[0][0]
    assert partly[0]
    assert not partly[1]


@pytest.mark.parametrize("candidates", [0, 1, 2])
def test_fewer_candidates_than_protected_pages_are_all_in(candidates: int) -> None:
    chosen, _threshold = select(np.zeros((2, candidates), np.float32), Room(4, 1, 2))
    assert chosen.shape == (2, candidates)
    assert chosen.all()


def test_the_threshold_stays_above_zero() -> None:
    chosen, threshold = select(np.zeros((2, 20), np.float32), Room(5, 1, 2))
    assert threshold > 0
    assert chosen.sum() == 10


def test_a_budget_below_the_protected_pages_is_refused() -> None:
    with pytest.raises(InputError, match="a budget of 2 a KV head is less than its 3 protected"):
        select(np.ones((1, 9), np.float32), Room(2, 1, 2))


def test_the_estimate_is_not_changed() -> None:
    mass = np.random.default_rng(3).random((2, 20), np.float32)
    before = mass.copy()
    select(mass, Room(5, 1, 2))
    np.testing.assert_array_equal(mass, before)


def test_one_query_that_needs_a_page_outweighs_many_that_hardly_look_at_it() -> None:
    shares = np.zeros((2, 1, 64), np.float32)
    shares[0, 0] = 0.02  # 1.28 in sum
    shares[1, 0, 5] = 0.9
    drawn = pull(shares)
    assert drawn.shape == (1, 2)
    assert drawn[0, 1] > drawn[0, 0]
    np.testing.assert_allclose(drawn, [[0.16, 0.9]], rtol=1e-5)
