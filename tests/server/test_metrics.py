"""GET /metrics of a running server: what moves, what never leaves its range, and what the documentation lists."""

from __future__ import annotations

import re
import threading
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.harness import LiveServer, real_server

DOCS = Path(__file__).parents[2] / "docs" / "observing.md"


def scrape(server: LiveServer) -> dict[str, float]:
    """Samples by name with labels, as `name{label="value"}`."""
    answer = server.client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


def total(samples: dict[str, float], name: str) -> float:
    return sum(value for sample, value in samples.items() if sample.partition("{")[0] == name)


@pytest.fixture(scope="module")
def small(folder: str) -> LiveServer:
    """A server whose pool is smaller than what its requests hold."""
    return real_server(folder, pool="56KiB", budget=64)


def test_evictions_and_utilization_move_as_the_pool_fills(small: LiveServer) -> None:
    with small as server:
        before = scrape(server)
        assert before["paged_cache_utilization"] == 0
        assert total(before, "paged_cache_evictions_total") == 0
        server.complete("a text that is longer than the pool " * 4, max_tokens=40, ignore_eos=True)
        after = scrape(server)
    room = [value for name, value in after.items() if name.startswith("paged_cache_evictions_total") and "room" in name]
    assert sum(room) > 0
    assert after['paged_cache_recalls_total{source="swap"}'] > 0
    assert after["paged_cache_utilization"] == 0  # nobody holds a frame any more
    assert after['paged_cache_frames{state="live"}'] == 0
    frames = total(after, "paged_cache_frames")
    assert frames == total(before, "paged_cache_frames") > 0
    assert after["kvpager_generation_tokens_total"] == 40
    assert after["kvpager_time_between_tokens_seconds_count"] == 39
    assert after["kvpager_time_to_first_token_seconds_count"] == 1
    assert after["paged_cache_mass_coverage_count"] == 1
    assert after["paged_cache_attention_seconds_count"] > 0
    assert after["paged_cache_selection_seconds_count"] > 0
    assert after["paged_cache_fault_seconds_count"] > 0
    assert after['kvpager_requests_finished_total{reason="length"}'] == 1


def test_while_requests_run_gauges_are_in_range_and_after_a_mass_cancel_they_are_zero(folder: str) -> None:
    """BUGS.md G18: everybody leaves at once, and nothing more is sent."""
    with real_server(folder, max_num_seqs=8) as server:
        answers = [server.raw("/v1/completions", {"prompt": f"number {n}", "max_tokens": 400, "ignore_eos": True})
                   for n in range(20)]  # fmt: skip
        server.until(lambda: scrape(server)["kvpager_requests_running"] == 8)
        busy = scrape(server)
        assert 0 < busy["paged_cache_utilization"] <= 1
        assert busy["kvpager_requests_waiting"] > 0
        for answer in answers:
            answer.close()
        server.until(lambda: server.service.places.taken == 0)
        idle = scrape(server)
        for name in ("kvpager_requests_running", "kvpager_requests_waiting", "kvpager_requests_preempted"):
            assert idle[name] == 0
        assert idle["paged_cache_utilization"] == 0
        assert idle["kvpager_http_requests_open"] == 0
        assert idle["kvpager_sequence_tokens"] == 0
        ended = total(idle, "kvpager_requests_finished_total")
        assert ended == 20
        assert all(idle[name] >= value for name, value in busy.items() if name.partition("{")[0].endswith("_total"))


def test_counters_never_go_back_while_others_scrape(folder: str) -> None:
    seen: list[dict[str, float]] = []
    with real_server(folder) as server:
        done = threading.Event()

        def watch() -> None:
            with httpx.Client(base_url=server.url, timeout=60) as client:
                while not done.is_set():
                    families = text_string_to_metric_families(client.get("/metrics").text)
                    seen.append({s.name + str(sorted(s.labels.items())): s.value for f in families for s in f.samples
                                 if f.type in ("counter", "histogram")})  # fmt: skip

        watcher = threading.Thread(target=watch)
        watcher.start()
        number = 0
        while number < 6 or len(seen) <= 3:  # however slow the scrapes are
            server.complete(f"text {number} " * 5, max_tokens=8, ignore_eos=True)
            number += 1
        done.set()
        watcher.join()
    assert len(seen) > 3
    for before, after in pairwise(seen):
        assert not [name for name in before if after[name] < before[name]]


def test_metrics_need_a_key_where_there_are_keys_and_no_place(folder: str) -> None:
    with real_server(folder, api_keys=("secret",)) as server:
        assert server.client.get("/metrics").status_code == 401
        answer = server.client.get("/metrics", headers={"Authorization": "Bearer secret"})
        assert answer.status_code == 200
        assert "secret" not in answer.text
        server.service.places.taken = server.service.places.count
        assert server.client.get("/metrics", headers={"Authorization": "Bearer secret"}).status_code == 200
        server.service.places.taken = 0


def test_the_documentation_lists_what_is_exposed(folder: str, tmp_path: Path) -> None:
    listed = set(re.findall(r"^\| `([a-z_]+)(?:\{[a-z, ]+\})?` \|", DOCS.read_text(), re.MULTILINE))
    pair = {"role": "primary", "degraded": False, "epoch": 7, "lag_seconds": 0.0, "lease_seconds": 0.9, "requests": 0}
    with real_server(folder, store=tmp_path / "store.db", replication=lambda: pair) as server:
        server.run(server.service.go_on([]))
        server.complete("hello", max_tokens=2)
        text = server.client.get("/metrics").text
    exposed = set()
    for family in text_string_to_metric_families(text):
        exposed.add(f"{family.name}_total" if family.type == "counter" else family.name)
    exposed |= {"kvpager_memory_limit_bytes"}  # where there is a limit
    assert listed == exposed
