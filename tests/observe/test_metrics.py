"""Figures as Prometheus's text: what is written can be read, and says what was counted."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvpager.engine.outputs import EngineStats
from kvpager.observe import Snapshot, render
from kvpager.observe.process import memory_limit_bytes, rss_bytes
from kvpager.stats import Histogram, StoreStats
from tests.engine.fake import NOTHING


def test_a_histogram_counts_each_value_once_below_the_bound_that_it_reaches() -> None:
    histogram = Histogram((1.0, 2.0, 5.0))
    for value in (0.0, 1.0, 1.5, 2.0, 4.9, 5.1, 100.0):
        histogram.add(value)
    found = histogram.look()
    assert found.counts == (2, 2, 1, 2)
    assert found.count == 7
    assert found.total == pytest.approx(114.5)
    histogram.add(1.0)
    assert found.count == 7  # a look does not change any more


def test_without_an_engine_there_is_the_state_alone() -> None:
    text = render(Snapshot("loading", "1.2.3", 'a "model"\\ with\nlines', places=4)).decode()
    found = {family.name: family for family in text_string_to_metric_families(text)}
    states = {sample.labels["state"]: sample.value for sample in found["kvpager_engine_state"].samples}
    assert states == {"loading": 1.0, "standby": 0.0, "ready": 0.0, "draining": 0.0, "stopped": 0.0, "failed": 0.0}
    assert found["kvpager_build_info"].samples[0].labels == {"version": "1.2.3", "model": 'a "model"\\ with\nlines'}
    assert "kvpager_requests_running" not in found


def test_a_node_of_a_pair_says_what_it_is() -> None:
    told = {"role": "standby", "degraded": True, "epoch": None, "lag_seconds": 0.5, "requests": 3}
    text = render(Snapshot("standby", "1.2.3", "m", replication=told)).decode()
    found = {family.name: family.samples for family in text_string_to_metric_families(text)}
    roles = {sample.labels["role"]: sample.value for sample in found["kvpager_replication_role"]}
    assert roles == {"standby": 1.0, "taking over": 0.0, "primary": 0.0, "stepping down": 0.0}
    values = {name: samples[0].value for name, samples in found.items()}
    assert values["kvpager_replication_degraded"] == 1
    assert values["kvpager_replication_lag_seconds"] == 0.5
    assert (values["kvpager_replication_epoch"], values["kvpager_replication_requests"]) == (0, 3)
    assert set(found) - {"kvpager_build_info"} <= documented()


def documented() -> set[str]:
    """The names that docs/observing.md lists."""
    page = (Path(__file__).parents[2] / "docs" / "observing.md").read_text()
    return {line.split("`")[1].partition("{")[0] for line in page.splitlines() if line.startswith("| `kvpager_")}


def test_the_processs_memory_is_told() -> None:
    held = rss_bytes()
    assert 2**20 < held < 2**40
    assert rss_bytes(Path("/nowhere")) == 0


def test_each_tier_of_a_store_is_told_and_each_of_its_failures() -> None:
    local = StoreStats(hits=3, bytes=100, errors={"large": 1})
    shared = StoreStats(state="timeout", hits=2, stored_bytes=7, errors={"timeout": 4, "auth": 1, "fenced": 2})
    errors = {**local.errors, **shared.errors}
    both = StoreStats(state="timeout", hits=5, errors=errors, tiers={"local": local, "shared": shared})
    stats = EngineStats(0, 0, 0, 0, 0, 0, 0, 0, 0, pager=NOTHING, store=both)
    text = render(Snapshot("ready", "1", "m", stats=stats)).decode()
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert sum(value for (name, *_), value in found.items() if name == "kvpager_store_errors_total") == 8
    assert found["kvpager_store_errors_total", "timeout"] == 4
    assert found["kvpager_store_up",] == 0
    for name, values in {"up": (1, 0), "hits_total": (3, 2), "bytes": (100, 0), "errors_total": (1, 7)}.items():
        assert tuple(found[f"kvpager_store_tier_{name}", tier] for tier in ("local", "shared")) == values


@pytest.mark.parametrize(
    ("content", "limit"), [("1073741824\n", 2**30), ("max\n", None), ("9223372036854771712", None), ("", None)]
)
def test_the_limit_of_a_cgroup_is_found(tmp_path: Path, content: str, limit: int | None) -> None:
    place = tmp_path / "memory.max"
    place.write_text(content)
    assert memory_limit_bytes((tmp_path / "missing", place)) == limit
