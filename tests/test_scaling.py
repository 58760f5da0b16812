"""The arithmetic of docs/scaling.md is what benchmarks/scaling.py computes, and it agrees with a simulation."""

from __future__ import annotations

import argparse
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from benchmarks import scaling
from benchmarks.scaling import Figures, hit_rates, row

from tests.redis_rig import RedisServer

PAGE = Path(__file__).parents[1] / "docs" / "scaling.md"


def simulated(count: int, exponent: float, size: int) -> float:
    """Hit rate of a least-recently-used cache, once it is full."""
    weights = np.arange(1, count + 1, dtype=float) ** -exponent
    asked = np.random.default_rng(0).choice(count, 40_000, p=weights / weights.sum())
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for number, name in enumerate(asked.tolist()):
        hits += name in cache and number >= 10_000
        cache[name] = None
        cache.move_to_end(name)
        if len(cache) > size:
            cache.popitem(last=False)
    return hits / 30_000


@pytest.mark.parametrize(("count", "exponent", "size"), [(1000, 0.8, 290), (1000, 0.8, 20), (2000, 1.1, 100)])
def test_hit_rates_are_those_of_a_simulation(count: int, exponent: float, size: int) -> None:
    assert hit_rates(count, exponent, [size])[0] == pytest.approx(simulated(count, exponent, size), abs=0.015)


def test_a_cache_that_holds_all_hits_always_and_an_empty_one_never() -> None:
    assert hit_rates(100, 0.8, [0, 100, 1000]) == [0.0, 1.0, 1.0]


def test_nodes_compute_less_with_affinity_and_with_redis() -> None:
    figures = Figures()
    alone, shared = (row(figures, 10, affinity=False, redis=redis) for redis in (False, True))
    kept, both = (row(figures, 10, affinity=True, redis=redis) for redis in (False, True))
    assert alone.computed > shared.computed
    assert alone.computed > kept.computed >= both.computed
    assert kept.at_home > alone.at_home
    assert alone.shards == alone.read_mb_s == alone.write_mb_s == 0
    assert shared.read_mb_s > both.read_mb_s >= 0


def test_what_one_redis_can_not_carry_takes_more_shards() -> None:
    figures = Figures(nodes_a_shard=10**6)
    few, many = (row(figures, nodes, affinity=False, redis=True) for nodes in (10, 1000))
    assert few.shards == 1
    assert many.shards >= (many.read_mb_s / figures.network_mb_s)
    assert many.shards > 1


def test_the_page_has_what_the_script_says() -> None:
    page = PAGE.read_text().splitlines()
    figures = Figures()
    for line in [*scaling.single_lines(figures), *scaling.table_lines(figures, (10, 100, 1000))]:
        assert line in page, "run python benchmarks/scaling.py table, and put it into docs/scaling.md"


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    scaling.plot(Figures(), str(tmp_path / "scaling.png"))
    assert (tmp_path / "scaling.png").stat().st_size > 1000


def test_measuring_measures(redis_server: RedisServer) -> None:
    args = argparse.Namespace(redis=redis_server.url, blocks=8, page_bytes=16, batches=[1, 4], rounds=1)
    found = scaling.measure(args)
    assert [one["batch"] for one in found] == ["1", "1", "4", "4", "the store's", "the store's"]
    assert [one["what"] for one in found] == ["written", "read"] * 3
    assert all(one["us"] > 0 and one["mb_s"] > 0 for one in found)
    assert redis_server.client().dbsize() == 0
    redis_server.client().set("somebody's", 1)
    with pytest.raises(SystemExit, match="not empty"):
        scaling.measure(args)
