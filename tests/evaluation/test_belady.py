"""The optimum is checked against a search over every choice of victims."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from kvpager.config import KVShape, PagerConfig
from kvpager.core.pager import Pager
from kvpager.errors import InputError
from kvpager.evaluation.belady import AccessTrace, optimal_recalls


def fewest(groups: list[list[int]], frames: int) -> int:
    """Try every set of victims at every step."""
    states = {frozenset[int](): 0}
    seen: set[int] = set()
    for group in groups:
        wanted = frozenset(group)
        after: dict[frozenset[int], int] = {}
        for resident, cost in states.items():
            recalls = cost + len((wanted - resident) & seen)
            others = sorted(resident - wanted)
            for kept in range(min(len(others), frames - len(wanted)) + 1):
                for choice in combinations(others, kept):
                    new = wanted | frozenset(choice)
                    after[new] = min(after.get(new, recalls), recalls)
        seen |= wanted
        states = after
    return min(states.values())


@pytest.mark.parametrize("seed", range(40))
def test_the_rule_finds_the_fewest_recalls(seed: int) -> None:
    rng = np.random.default_rng(seed)
    frames, pages = int(rng.integers(2, 5)), int(rng.integers(4, 8))
    groups = [
        rng.choice(pages, size=int(rng.integers(1, frames + 1)), replace=False).tolist()
        for _ in range(int(rng.integers(4, 11)))
    ]
    assert optimal_recalls([np.array(group, np.int64) for group in groups], frames) == fewest(groups, frames)


def test_a_pool_that_holds_all_recalls_nothing() -> None:
    groups = [np.array([0, 1]), np.array([2]), np.array([0, 2])]
    assert optimal_recalls(groups, 3) == 0
    assert optimal_recalls([], 1) == 0


def test_a_group_larger_than_the_pool_is_refused() -> None:
    with pytest.raises(InputError, match="frames: 1 can't hold a group of 2"):
        optimal_recalls([np.array([0, 1])], 1)


@pytest.mark.parametrize("policy", ["attention", "lru", "fifo", "random"])
def test_no_policy_recalls_fewer_than_the_optimum(policy: str) -> None:
    shape = KVShape(layers=2, kv_heads=2, query_heads=4, head_dim=16)
    rng = np.random.default_rng(3)
    config = PagerConfig(pool=40, budget=96, policy=policy, tile=16, group_pages=16)
    with Pager(shape, config) as pager:
        trace = AccessTrace(pager)
        pager.observers.append(trace)
        sequence = pager.open()
        for _ in range(20):
            pager.begin([sequence], [16])
            for layer in range(2):
                pager.append(sequence, layer, *rng.standard_normal((2, 2, 16, 16), np.float32))
                pager.attend(sequence, layer, 3 * rng.standard_normal((4, 16, 16), np.float32))
            pager.commit()
        stats = pager.stats()
    optimum = optimal_recalls(trace.groups, stats.frames)
    assert sum(len(group) for group in trace.groups) == stats.pages_attended
    assert 0 < optimum <= stats.recalls
