"""Workloads: which requests, when, and prompts of exact lengths that share only what they should."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpager.bench.workload import Item, Kind, Prompts, Workload, parse_mix
from kvpager.errors import InputError

KIND = (Kind("all", 20, 5),)


def test_a_mix_is_read_with_and_without_names_and_shares() -> None:
    assert parse_mix("short=100/64:0.8, long=2000/128:0.2") == (
        Kind("short", 100, 64, 0.8),
        Kind("long", 2000, 128, 0.2),
    )
    assert parse_mix("7/9") == (Kind("7/9", 7, 9, 1.0),)


@pytest.mark.promise(6)
@pytest.mark.parametrize("text", ["", "short", "a=1/2:x", "a=-1/2", "a=1/2;b=3/4", "a=0/5", "a=5/0", "a=1/1:0"])
def test_a_mix_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="mix: "):
        parse_mix(text)


@pytest.mark.promise(6)
@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"requests": 0}, "num-prompts: 0"),
        ({"rate": 0.0}, "request-rate: 0"),
        ({"rate": float("nan")}, "request-rate: nan"),
        ({"groups": 9}, "prefix-groups: 9"),
        ({"kinds": (Kind("a", 1, 1), Kind("a", 2, 1))}, "mix: two kinds"),
    ],
)
def test_workloads_that_cant_be_are_refused(more: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Workload(**{"kinds": KIND, "requests": 4, **more})  # type: ignore[arg-type]


@given(
    weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=5),
    requests=st.integers(1, 200),
    seed=st.integers(0, 2**31),
)
def test_kinds_have_their_shares_to_within_one_request(weights: list[float], requests: int, seed: int) -> None:
    kinds = tuple(Kind(str(index), 3 + index, 2, weight) for index, weight in enumerate(weights))
    work = Workload(kinds, requests, seed=seed)
    counts = Counter(item.kind for item in work.items())
    assert sum(counts.values()) == requests
    for kind in kinds:
        assert abs(counts[kind.name] - requests * kind.weight / sum(weights)) < 1
    assert [one["requests"] for one in work.figures()["kinds"]] == [counts[kind.name] for kind in kinds]


def test_arrivals_follow_the_seed_and_keep_the_rate() -> None:
    one, same, other = ([item.at for item in Workload(KIND, 4000, rate=5.0, seed=seed).items()] for seed in (1, 1, 2))
    assert one == same != other
    assert one[0] == 0
    assert one == sorted(one)
    gaps = [late - early for early, late in pairwise(one)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 5.0, rel=0.05)
    # exponential gaps spread as wide as their mean: even ones, or ones of another kind, would not
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.1)
    assert {item.at for item in Workload(KIND, 5).items()} == {0.0}


@given(
    length=st.integers(12, 60),
    prefix=st.integers(0, 40),
    groups=st.integers(1, 3),
    tokens=st.integers(1, 150),
    seed=st.integers(0, 1000),
)
def test_prompts_are_exact_distinct_and_share_their_groups_prefix(
    length: int, prefix: int, groups: int, tokens: int, seed: int
) -> None:
    work = Workload((Kind("all", tokens, 1),), 6, shared_prefix=prefix, groups=groups, seed=seed)
    prompts = Prompts(range(length), work, spare=2)
    items = work.items()
    made = [prompts(item) for item in items]
    assert made == [Prompts(range(length), work, spare=2)(item) for item in items]
    for item, prompt in zip(items, made, strict=True):
        assert len(prompt) == item.prompt_tokens == prefix + tokens
        assert prompt[:prefix] == made[item.group][:prefix]
        assert item.group == item.index % groups
    spare = prompts(Item(7, "all", 0, 0.0, prefix + tokens, 1))
    assert len(spare) == prefix + tokens
    beginnings = [prompt[prefix] for prompt in made] + [spare[0]] + ([made[0][0]] if prefix else [])
    assert len(set(beginnings)) == len(beginnings)  # of all numbers each is there once: other windows begin otherwise


@pytest.mark.promise(6)
def test_more_prompts_than_the_text_has_places_are_refused() -> None:
    with pytest.raises(InputError, match=r"num-prompts: 12 distinct beginnings .* 10 tokens"):
        Prompts(range(10), Workload(KIND, 10, shared_prefix=1), spare=1)
