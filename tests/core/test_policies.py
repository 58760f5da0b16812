"""One table over all policies, then what is particular to each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvpager.config import POLICIES
from kvpager.core.numbers import FIELDS, PageNumbers
from kvpager.core.policies import POLICY_TYPES, make
from kvpager.errors import ConfigError

FLOATS = FIELDS - {"born"}
ATTENTIVE = ("attention", "h2o", "tova", "snapkv")


def pages(n: int = 6, **fields: Any) -> PageNumbers:
    """n like pages of one layer at tick 10, written at tick 0, attended to at tick 9; `fields` replace numbers."""
    floats = {name: np.full(n, 0.1, np.float32) for name in FLOATS}
    whole = {name: np.zeros(n, np.int32) for name in ("born", "position", "layer", "head", "missed")}
    floats["seen"] = np.full(n, 9, np.uint8)
    made = PageNumbers(**floats, **whole, last_used=np.full(n, 9, np.int32), now=10, current_layer=0, layers=4, grace=2)
    arrays = {k: np.asarray(v, getattr(made, k).dtype) if isinstance(v, list) else v for k, v in fields.items()}
    return replace(made, **arrays)


def leaving(name: str, numbers: PageNumbers) -> list[int]:
    """Indices of the pages in the order in which they would leave."""
    return list(np.argsort(make(name).score(numbers, np.random.default_rng(0)), kind="stable"))


# What a policy reads, and values of it in the order in which the pages should leave.
TABLE = [
    ("attention", {"estimate": [0.01, 0.2, 0.7, 0.9, 3, 8]}),
    ("attention", {"estimate": [np.nan] * 6, "mass": [0, 0.01, 0.1, 0.2, 0.5, 1]}),
    ("h2o", {"total": [0, 0.1, 1, 2, 3, 4]}),
    ("tova", {"last": [0, 0.1, 0.2, 0.3, 0.4, 0.5]}),
    ("snapkv", {"window": [0, 0.1, 5, 31, np.nan, np.nan], "position": [5, 4, 3, 2, 6, 7]}),
    ("streaming", {"position": [1, 2, 3, 4, 5, 0]}),
    ("lru", {"last_used": [1, 2, 4, 6, 9, 10]}),
    ("lru", {"last_used": [8, 8, 9, 9, 9, 9], "layer": [0, 3, 0, 1, 2, 3]}),
    ("fifo", {"born": [0, 2, 4, 6, 9, 10]}),
]


@pytest.mark.parametrize(("name", "fields"), TABLE)
def test_pages_leave_in_the_policy_s_order(name: str, fields: dict[str, Any]):
    assert leaving(name, pages(**fields)) == list(range(6))
    backwards = {field: values[::-1] for field, values in fields.items()}
    assert leaving(name, pages(**backwards)) == list(range(6))[::-1]


def test_every_policy_of_the_configuration_is_there_and_knows_its_name():
    assert set(POLICY_TYPES) == set(POLICIES)
    assert all(make(name).name == name for name in POLICIES)


def test_an_unknown_policy_is_refused_by_name_with_what_there_is():
    with pytest.raises(ConfigError, match=r"lfu.*attention.*random"):
        make("lfu")


@pytest.mark.parametrize("name", POLICIES)
def test_scores_are_float32_one_a_page_and_never_nan(name: str):
    rng = np.random.default_rng(1)
    for unknown in (False, True):
        numbers = pages(50, **{field: rng.random(50, dtype=np.float32) for field in FLOATS})
        if unknown:
            numbers = replace(numbers, estimate=np.full(50, np.nan, np.float32), window=np.full(50, np.nan, np.float32))
        numbers.estimate[:5] = 0
        score = make(name).score(numbers, rng)
        assert score.dtype == np.float32
        assert score.shape == (50,)
        assert not np.isnan(score).any()
        assert make(name).score(pages(0), rng).shape == (0,)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_reads_no_field_that_it_does_not_ask_for(name: str):
    needed = POLICY_TYPES[name].needs
    assert needed <= FIELDS
    rng = np.random.default_rng(1)
    numbers = pages(50, **{field: rng.random(50, dtype=np.float32) for field in FLOATS})
    without = replace(numbers, **{field: np.full(50, np.nan, np.float32) for field in FLOATS - needed})
    scores = [make(name).score(seen, np.random.default_rng(0)) for seen in (numbers, without)]
    np.testing.assert_array_equal(*scores)


@pytest.mark.parametrize("name", POLICIES)
def test_scoring_changes_nothing(name: str):
    numbers = pages(8, estimate=[np.nan, 0, 1, 2, 0.5, 1, 1, 1])
    before = {field: np.copy(getattr(numbers, field)) for field in (*FLOATS, "seen", "last_used", "born", "position")}
    make(name).score(numbers, np.random.default_rng(0))
    for field, values in before.items():
        np.testing.assert_array_equal(getattr(numbers, field), values)


@pytest.mark.parametrize("name", POLICIES)
def test_the_grace_period_keeps_new_pages_under_policies_that_go_by_attention(name: str):
    numbers = pages(3, seen=[3, 2, 1], position=[1, 2, 3])
    score = make(name).score(numbers, np.random.default_rng(0))
    assert list(np.isposinf(score)) == ([False, False, True] if name in ATTENTIVE else [False] * 3)
    score = make(name).score(replace(numbers, grace=0), np.random.default_rng(0))
    assert not np.isposinf(score).any()


def test_random_follows_the_generator_it_is_given():
    scores = [make("random").score(pages(20), np.random.default_rng(seed)) for seed in (3, 3, 4)]
    np.testing.assert_array_equal(scores[0], scores[1])
    assert (scores[0] != scores[2]).any()


def test_lru_and_fifo_stay_exact_however_long_the_clock_has_run():
    late = 2**31 - 8
    for name, field in (("lru", "last_used"), ("fifo", "born")):
        stamps = np.arange(late - 5, late + 1, dtype=np.int32)
        numbers = replace(pages(now=late), last_used=np.full(6, late, np.int32), born=np.full(6, late - 9, np.int32))
        assert leaving(name, replace(numbers, **{field: stamps})) == list(range(6))


def test_attention_keeps_what_the_next_layers_want_before_what_has_just_run():
    numbers = pages(4, layer=[1, 0, 3, 2], last_used=[10, 10, 9, 9], current_layer=1)
    for estimate in ([2.0] * 4, [np.nan] * 4):
        assert leaving("attention", replace(numbers, estimate=np.array(estimate, np.float32))) == [0, 1, 2, 3]


def test_attention_keeps_what_this_tile_selected_until_it_has_been_attended_to():
    # One page passed over, one attended to, one selected and yet to be read; then one of the next layer.
    numbers = pages(4, estimate=[0.5, 1.5, 1.5, 1.5], layer=[1, 1, 1, 2], last_used=[9, 10, 9, 9], current_layer=1)
    score = make("attention").score(numbers, np.random.default_rng(0))
    assert score[0] < score[1] < score[2] == score[3]


def test_attention_keeps_the_running_layer_s_pages_while_it_has_more_tiles():
    numbers = pages(2, estimate=[1.5, 1.5], layer=[1, 3], last_used=[10, 9], current_layer=1)
    assert leaving("attention", numbers) == [0, 1]
    assert leaving("attention", replace(numbers, again=True)) == [1, 0]


def test_attention_weighs_the_wait_for_the_layer_against_turns_passed_over():
    # A page of the next layer that is selected once in eleven turns waits longer than a good one that has just run.
    numbers = pages(2, estimate=[0.1, 4], layer=[1, 0], current_layer=0, last_used=[3, 10])
    assert leaving("attention", numbers) == [0, 1]


def test_attention_lets_paused_sequences_go_first_but_not_those_that_take_turns():
    numbers = pages(3, estimate=[2, 2, 0.2], missed=[100, 5, 100], layer=[2, 2, 2])
    assert leaving("attention", numbers) == [0, 2, 1]
    unknown = pages(2, estimate=[np.nan, np.nan], missed=[100, 0], mass=[0.9, 0.1], layer=[2, 2])
    assert leaving("attention", unknown) == [0, 1]
