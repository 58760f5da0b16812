from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import ArrayLike

from kvpager.core.numbers import FIELDS, PageNumbers
from kvpager.core.policies import POLICY_TYPES
from kvpager.core.scorer import AttentionScorer, Observed
from kvpager.kernels.reference import masses
from kvpager.ports import WINDOW

LAYERS, HEADS = 3, 2


def scorer(needs: frozenset[str] = FIELDS, decay: float = 0.5, grace: int = 2) -> AttentionScorer:
    made = AttentionScorer(LAYERS, HEADS, needs, decay, grace)
    made.grow(8)
    return made


def flat(row: int, layer: int, head: int) -> int:
    return (row * LAYERS + layer) * HEADS + head


def look(made: AttentionScorer, row: int, layer: int, head: int, tick: int = 0) -> PageNumbers:
    return made.numbers(np.array([flat(row, layer, head)]), tick, 0)


def observe(made: AttentionScorer, mass: ArrayLike, tick: int = 1, row: int = 2, layer: int = 1, head: int = 1) -> None:
    given = np.asarray(mass, np.float32)[None]
    made.observe(layer, Observed(np.array([row]), np.array([head]), masses(given), [0, 1], [given.shape[2]], [tick]))


def test_mass_is_the_largest_of_queries_and_group_and_fades_each_time_the_page_is_attended_to():
    made = scorer(decay=0.5)
    made.born(np.array([2]), 1, np.array([5]), 0)
    observe(made, np.array([[0.1, 0.8], [0.2, 0.3]]), tick=1)
    assert look(made, 2, 1, 1).mass == np.float32(0.8)
    observe(made, np.array([[0.1], [0.2]]), tick=9)
    assert look(made, 2, 1, 1).mass == np.float32(0.4)
    observe(made, np.array([[0.3], [0.1]]), tick=10)
    assert look(made, 2, 1, 1).mass == np.float32(0.3)


def test_mass_fades_for_each_query_so_that_a_tile_fades_it_as_decoding_does():
    tile, steps = scorer(decay=0.5), scorer(decay=0.5)
    for made, tiles in ((tile, [3]), (steps, [1, 1, 1])):
        made.born(np.array([2]), 1, np.array([5]), 0)
        observe(made, np.full((2, 1), 0.8))
        for queries in tiles:
            observe(made, np.zeros((2, queries)))
    assert look(tile, 2, 1, 1).mass == look(steps, 2, 1, 1).mass == np.float32(0.1)


def test_total_sums_queries_and_averages_the_group():
    made = scorer()
    made.born(np.array([2]), 1, np.array([5]), 0)
    observe(made, np.array([[0.1, 0.8], [0.2, 0.3]]))
    observe(made, np.array([[0.5], [0.1]]))
    np.testing.assert_allclose(look(made, 2, 1, 1).total, [(0.9 + 0.5) / 2 + 0.3], rtol=1e-6)


def test_last_is_the_last_query_of_the_last_tile():
    made = scorer()
    made.born(np.array([2]), 1, np.array([5]), 0)
    observe(made, np.array([[0.1, 0.8], [0.2, 0.4]]))
    np.testing.assert_allclose(look(made, 2, 1, 1).last, [0.6], rtol=1e-6)
    observe(made, np.array([[0.5], [0.1]]))
    np.testing.assert_allclose(look(made, 2, 1, 1).last, [0.3], rtol=1e-6)


def test_window_is_the_end_of_the_last_tile_of_several_queries_and_decoding_leaves_it():
    made = scorer()
    made.born(np.array([2]), 1, np.array([5]), 0)
    assert np.isnan(look(made, 2, 1, 1).window)
    mass = np.random.default_rng(0).random((2, 50), dtype=np.float32)
    observe(made, mass)
    np.testing.assert_allclose(look(made, 2, 1, 1).window, [mass[:, -WINDOW:].sum() / 2], rtol=1e-5)
    observe(made, np.array([[0.5], [0.1]]))
    np.testing.assert_allclose(look(made, 2, 1, 1).window, [mass[:, -WINDOW:].sum() / 2], rtol=1e-5)


def test_a_new_page_knows_nothing_of_the_block_row_s_former_page():
    made = scorer()
    rows = np.array([2, 3])
    made.born(rows, 1, np.array([5, 6]), 3)
    observe(made, np.full((2, 4), 0.5), tick=4)
    made.estimated(rows, 1, np.full((HEADS, 2), 1.5, np.float32))
    made.born(rows, 1, np.array([0, 1]), 7)
    page = look(made, 2, 1, 1, tick=8)
    assert (page.mass, page.total, page.last) == (0, 0, 0)
    assert np.isnan(page.window)
    assert np.isnan(page.estimate)
    assert (page.last_used, page.born, page.seen, page.position) == (7, 7, 0, 0)


def test_estimates_go_to_their_row_and_head_and_stay_finite():
    made = scorer()
    rows = np.array([4, 1])
    for layer in range(LAYERS):
        made.born(rows, layer, rows, 0)
    made.estimated(rows, 2, np.array([[0.25, 1.0], [2.0, 1e30]], np.float32))
    assert look(made, 4, 2, 0).estimate == 0.25
    assert look(made, 1, 2, 0).estimate == 1
    assert look(made, 4, 2, 1).estimate == 2
    assert 1 < look(made, 1, 2, 1).estimate < np.inf
    assert np.isnan(look(made, 1, 1, 1).estimate)


def test_observing_pages_changes_no_other_page():
    made = scorer()
    for layer in range(LAYERS):
        made.born(np.arange(8), layer, np.arange(8), 0)
    every = np.arange(8 * LAYERS * HEADS)
    observe(made, np.full((2, 3), 0.5), tick=4)
    made.estimated(np.array([2]), 1, np.ones((HEADS, 1), np.float32))
    numbers = made.numbers(every, 5, 1)
    assert set(np.flatnonzero(numbers.total)) == {flat(2, 1, 1)}
    assert set(np.flatnonzero(numbers.last_used)) == {flat(2, 1, 1)}
    assert set(np.flatnonzero(~np.isnan(numbers.estimate))) == {flat(2, 1, 0), flat(2, 1, 1)}


def test_numbers_say_where_each_page_is_and_what_time_it_is():
    made = scorer(grace=2)
    made.born(np.array([6]), 2, np.array([9]), 4)
    numbers = made.numbers(np.array([flat(6, 2, 1), flat(6, 2, 0)]), 5, 1, again=True)
    assert len(numbers) == 2
    assert list(numbers.head) == [1, 0]
    assert list(numbers.layer) == [2, 2]
    assert list(numbers.position) == [9, 9]
    assert list(numbers.born) == [4, 4]
    assert (numbers.now, numbers.current_layer, numbers.layers, numbers.grace) == (5, 1, LAYERS, 2)
    assert numbers.again


def test_a_page_is_young_until_tiles_have_attended_to_it_or_passed_it_over():
    made = scorer(grace=2)
    rows = np.array([6])
    made.born(rows, 2, np.array([9]), 4)
    assert look(made, 6, 2, 0).young
    for head in (0, 1):
        observe(made, np.full((2, 3), 0.5), row=6, layer=2, head=head)
        assert look(made, 6, 2, head).young
    made.estimated(rows, 2, np.array([[0.9], [1.1]], np.float32))
    assert not look(made, 6, 2, 0).young, "passed over"
    assert look(made, 6, 2, 1).young, "selected, and yet to be attended to"
    observe(made, np.full((2, 3), 0.5), row=6, layer=2, head=1)
    assert not look(made, 6, 2, 1).young


def test_counting_tiles_stops_at_the_end_of_a_byte():
    made = scorer(grace=10**6)
    made.born(np.array([2]), 1, np.array([5]), 0)
    for _ in range(300):
        observe(made, np.full((2, 1), 0.5))
        made.estimated(np.array([2]), 1, np.full((HEADS, 1), 0.5, np.float32))
    assert look(made, 2, 1, 1).seen == 255
    assert not look(made, 2, 1, 1).young


@pytest.mark.parametrize("looked_at", [False, True])
def test_what_a_step_changed_is_undone(looked_at: bool):
    made = scorer()
    rows = np.array([2, 5])
    for layer in range(LAYERS):
        made.born(rows, layer, rows, 0)
    observe(made, np.full((2, 3), 0.5), tick=1)
    before = made.numbers(np.arange(48), 2, 0)
    made.begin([rows], slice(1, 2))
    observe(made, np.full((2, 3), 0.7), tick=2)
    made.estimated(rows, 1, np.full((HEADS, 2), 0.5, np.float32))
    if looked_at:
        made.numbers(np.arange(48), 2, 0)
    made.undo()
    after = made.numbers(np.arange(48), 2, 0)
    for name in (*FIELDS, "last_used", "seen", "position"):
        np.testing.assert_array_equal(getattr(after, name), getattr(before, name), err_msg=name)


def test_ticks_missed_count_only_where_several_sequences_share_the_clock():
    made = scorer()
    for layer in (0, 1):
        made.born(np.arange(8), layer, np.arange(8), 3)
        observe(made, np.full((2, 3), 0.5), tick=4, row=2, layer=layer)
    observe(made, np.full((2, 3), 0.5), tick=9, row=5, layer=1)
    asked = np.array([flat(2, 0, 1), flat(2, 1, 1), flat(5, 1, 1)])
    assert list(made.numbers(asked, 9, 1, shared=True).missed) == [0, 5, 0]
    assert list(made.numbers(asked, 9, 1).missed) == [0, 0, 0]


def test_numbers_are_copies():
    made = scorer()
    made.born(np.array([2]), 1, np.array([5]), 0)
    before = look(made, 2, 1, 1)
    observe(made, np.full((2, 3), 0.5), tick=4)
    assert (before.mass, before.last_used) == (0, 0)


def test_a_copied_block_keeps_what_is_known():
    made = scorer()
    for layer in range(LAYERS):
        made.born(np.array([2]), layer, np.array([5]), 3)
    observe(made, np.full((2, 3), 0.5), tick=4)
    made.copy(2, 7)
    source, target = look(made, 2, 1, 1), look(made, 7, 1, 1)
    for name in ("mass", "total", "last", "window", "estimate", "last_used", "born", "seen", "position"):
        np.testing.assert_array_equal(getattr(target, name), getattr(source, name), err_msg=name)


def test_growing_keeps_what_is_known_and_never_shrinks():
    made = scorer()
    made.born(np.array([2]), 1, np.array([5]), 3)
    observe(made, np.full((2, 3), 0.5), tick=4)
    made.grow(100)
    made.grow(10)
    assert made.rows == 100
    assert look(made, 2, 1, 1).mass == 0.5
    assert look(made, 99, 1, 1).mass == 0


@pytest.mark.parametrize("name", POLICY_TYPES)
def test_books_stay_within_sixteen_bytes_a_page(name: str):
    for heads in (1, 3):
        made = AttentionScorer(30, heads, POLICY_TYPES[name].needs, 0.9, 2)
        made.grow(100)
        assert made.nbytes <= 16 * 100 * 30 * heads
    if name == "attention":
        assert made.nbytes <= 12 * 100 * 30 * heads


def test_unneeded_fields_take_no_memory_and_read_as_nan():
    made = scorer(frozenset())
    made.born(np.array([2]), 1, np.array([5]), 3)
    observe(made, np.full((2, 3), 0.5), tick=4)
    made.estimated(np.array([2]), 1, np.ones((HEADS, 1), np.float32))
    page = look(made, 2, 1, 1)
    assert all(np.isnan(getattr(page, name)).all() for name in FIELDS - {"born"})
    assert page.born == 0
    assert page.last_used == 4
    assert made.nbytes < scorer().nbytes


def test_a_field_that_does_not_exist_is_refused_by_name():
    with pytest.raises(ValueError, match="colour"):
        AttentionScorer(1, 1, {"colour"}, 0.9, 2)


@pytest.mark.parametrize("field", ["estimate", "mass", "total", "window", "last"])
def test_standing_is_the_share_of_others_that_are_looked_at_less(field):
    made = scorer(frozenset({field}))
    kept = made._pages[field]
    kept[:, :4] = np.arange(4, dtype=kept.dtype)[None, :, None]
    kept[0, 3, 0] += 1
    assert made.standing(np.array([0, 1, 3]), np.arange(4)).tolist() == [0.0, 0.25, 0.75]
    assert made.standing(np.array([3]), np.array([], np.int64)).tolist() == [0.0]


def test_without_a_score_all_stand_alike():
    assert scorer(frozenset()).standing(np.array([0, 1]), np.arange(4)).tolist() == [0.0, 0.0]
