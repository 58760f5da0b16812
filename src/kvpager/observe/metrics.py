"""An engine's figures as metrics in Prometheus's text format.

Everything is made anew from one look at the engine: nothing is counted twice, and a gauge is what it was at that look.
Names follow Prometheus's conventions (base units, `_total`); no label has more values than a configuration names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from kvpager.engine.latencies import EngineLatencies
from kvpager.engine.outputs import EngineStats
from kvpager.errors import MissingDependency
from kvpager.stats import Distribution, StoreStats

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

__all__ = ["CONTENT_TYPE", "STATES", "Snapshot", "families", "render"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATES = ("loading", "standby", "ready", "draining", "stopped", "failed")
ROLES = ("standby", "taking over", "primary", "stepping down")
REASONS = ("stop", "length", "abort", "deadline", "error")
STORE_ERRORS = (
    "full",
    "locked",
    "io",
    "lost",
    "foreign",
    "newer",
    "readonly",
    "slow",
    "damaged",
    "large",
    "timeout",
    "auth",
    "fenced",
)


@dataclass(frozen=True)
class Snapshot:
    """What the metrics are made of.

    state    of the engine, one of STATES; stats, latencies: its own, None while there is none
    policy   which chooses the pages that leave
    model    its served name
    version  of kvpager
    open_requests   HTTP requests that have a place; places: how many there are
    answered        HTTP answers by status
    limits   bytes that may be used, by what is bounded ("memory": frames, digests and tables; "cgroup": the process)
    rss_bytes       the process's resident set
    replication     of a node of a pair, as /health says it; nothing for a server alone
    """

    state: str
    version: str
    model: str
    policy: str = ""
    stats: EngineStats | None = None
    latencies: EngineLatencies | None = None
    open_requests: int = 0
    places: int = 0
    answered: Mapping[int, int] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    rss_bytes: int = 0
    replication: Mapping[str, Any] = field(default_factory=dict)


def render(snapshot: Snapshot) -> bytes:
    """The metrics as text for Prometheus to scrape. Raises MissingDependency without prometheus-client."""
    try:
        from prometheus_client import CollectorRegistry, generate_latest
    except ImportError as error:
        raise MissingDependency("metrics need prometheus-client: pip install 'kvpager[serve]'") from error

    class Collector:
        def collect(self) -> Iterable[Metric]:
            return families(snapshot)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector())
    text: bytes = generate_latest(registry)
    return text


def families(snapshot: Snapshot) -> Iterator[Metric]:
    """All metrics of a look at an engine."""
    yield from _process(snapshot)
    if snapshot.replication:
        yield from _replication(snapshot.replication)
    if snapshot.stats is not None:
        yield from _requests(snapshot.stats)
        yield from _pool(snapshot.stats, snapshot.policy)
        yield from _memory(snapshot.stats)
        if snapshot.stats.store is not None:
            yield from _store(snapshot.stats.store, snapshot.stats)
    if snapshot.latencies is not None:
        yield from _latencies(snapshot.latencies)


def _gauge(name: str, text: str, value: float, labels: Mapping[str, str] | None = None) -> Metric:
    return _values("gauge", name, text, [(labels or {}, value)])


def _counter(name: str, text: str, value: float, labels: Mapping[str, str] | None = None) -> Metric:
    return _values("counter", name, text, [(labels or {}, value)])


def _values(kind: str, name: str, text: str, values: Iterable[tuple[Mapping[str, str], float]]) -> Metric:
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

    values = list(values)
    names = list(values[0][0]) if values else []
    make: Any = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
    metric: Any = make(name, text, labels=names)
    for labels, value in values:
        metric.add_metric(list(labels.values()), value)
    made: Metric = metric
    return made


def _histogram(name: str, text: str, found: Distribution) -> Metric:
    from prometheus_client.metrics_core import HistogramMetricFamily

    bounds = [*(f"{bound:.10g}" for bound in found.bounds), "+Inf"]
    metric = HistogramMetricFamily(name, text)
    metric.add_metric([], list(zip(bounds, accumulate(found.counts), strict=True)), found.total)
    return metric


def _process(snapshot: Snapshot) -> Iterator[Metric]:
    yield _gauge("kvpager_build_info", "Always 1.", 1, {"version": snapshot.version, "model": snapshot.model})
    states = [({"state": state}, float(state == snapshot.state)) for state in STATES]
    yield _values("gauge", "kvpager_engine_state", "1 for the state that the engine is in.", states)
    yield _gauge("kvpager_http_requests_open", "HTTP requests that have a place.", snapshot.open_requests)
    yield _gauge("kvpager_http_places", "HTTP requests that may be open at once.", snapshot.places)
    answered = [({"status": str(status)}, float(count)) for status, count in sorted(snapshot.answered.items())]
    if answered:
        yield _values("counter", "kvpager_http_responses", "HTTP answers by status.", answered)
    yield _gauge("kvpager_resident_set_bytes", "The process's memory, all included.", snapshot.rss_bytes)
    limits = [({"of": name}, float(size)) for name, size in sorted(snapshot.limits.items())]
    if limits:
        yield _values("gauge", "kvpager_memory_limit_bytes", "The most memory, by what is bounded.", limits)


def _replication(told: Mapping[str, Any]) -> Iterator[Metric]:
    roles = [({"role": role}, float(role == told["role"])) for role in ROLES]
    yield _values("gauge", "kvpager_replication_role", "1 for what this node of a pair is.", roles)
    yield _gauge(
        "kvpager_replication_degraded", "1 while nothing can be taken over from here, or by it.", told["degraded"]
    )
    yield _gauge("kvpager_replication_epoch", "Of the lease, as far as it is known.", told.get("epoch") or 0)
    yield _gauge("kvpager_replication_lag_seconds", "By which journal or mirror are behind.", told["lag_seconds"])
    yield _gauge("kvpager_replication_lease_seconds", "Left of the lease.", told.get("lease_seconds") or 0)
    yield _gauge("kvpager_replication_requests", "In the journal, running and ended.", told["requests"])


def _requests(stats: EngineStats) -> Iterator[Metric]:
    yield _gauge("kvpager_requests_running", "Requests that have sequences.", stats.running)
    yield _gauge("kvpager_requests_waiting", "Requests that wait for a first step.", stats.waiting)
    yield _gauge("kvpager_requests_preempted", "Requests that gave up their frames, and wait.", stats.preempted)
    ended = [({"reason": reason}, float(stats.finished.get(reason, 0))) for reason in REASONS]
    yield _values("counter", "kvpager_requests_finished", "Requests that ended, by how.", ended)
    yield _counter("kvpager_preemptions", "How often a request gave up its frames.", stats.preemptions)
    yield _counter("kvpager_replays", "Sequences computed anew because a page was lost.", stats.replays)
    yield _counter("kvpager_steps", "Forwards that were run.", stats.steps)
    yield _counter("kvpager_prompt_tokens", "Tokens of prompts, of requests that ended.", stats.prompt_tokens)
    yield _counter("kvpager_prefix_hit_tokens", "Of those, found computed.", stats.cached_tokens)
    yield _counter("kvpager_generation_tokens", "Tokens that were written.", stats.completion_tokens)
    yield _gauge("kvpager_sessions_held", "Sessions that a request is using.", stats.sessions.held)
    for name, count in (
        ("resumed", stats.sessions.resumed),
        ("saved", stats.sessions.saved),
        ("lost", stats.sessions.lost),
    ):
        yield _counter(f"kvpager_sessions_{name}", f"Sessions that were {name}.", count)


def _pool(stats: EngineStats, policy: str) -> Iterator[Metric]:
    pager = stats.pager
    live = pager.frames_used - pager.frames_cached
    yield _values(
        "counter",
        "paged_cache_evictions",
        "Pages that left the pool: to make room (they stay readable), or discarded for good.",
        [
            ({"reason": "room", "policy": policy}, float(pager.evictions)),
            ({"reason": "discard", "policy": policy}, float(pager.discards)),
        ],
    )
    yield _gauge(
        "paged_cache_utilization", "Frames held by live requests over all frames, 0 to 1.", live / max(pager.frames, 1)
    )
    frames = (
        ("live", live),
        ("cached", pager.frames_cached),
        ("free", pager.frames - pager.frames_used),
    )
    yield _values(
        "gauge", "paged_cache_frames", "Frames by what holds them.", [({"state": s}, float(n)) for s, n in frames]
    )
    yield _values(
        "counter",
        "paged_cache_recalls",
        "Pages that came back, by where from; those that came from the store by way of swap count in both.",
        [({"source": "swap"}, float(pager.recalls)), ({"source": "store"}, float(pager.store_pages))],
    )
    yield _counter("paged_cache_faults", "Groups of pages of which at least one was absent.", pager.faults)
    yield _counter("paged_cache_swap_writes", "Pages written to swap.", pager.swap_writes)
    yield _counter("paged_cache_pages_attended", "Pages that attention read, over all layers.", pager.pages_attended)
    yield _counter("paged_cache_tiles", "Tiles attended, over all layers.", pager.tiles)
    yield _gauge("paged_cache_blocks_cached", "Blocks of closed sequences, kept for reuse.", pager.cached_blocks)
    yield _gauge("kvpager_sequence_tokens", "Tokens that open sequences hold.", pager.tokens)
    yield _counter("kvpager_prefix_tokens", "Tokens found in blocks held already.", pager.prefix_tokens_hit)


def _memory(stats: EngineStats) -> Iterator[Metric]:
    pager = stats.pager
    held = (("frames", pager.pool_bytes), ("digests", pager.digest_bytes), ("tables", pager.table_bytes))
    yield _values(
        "gauge",
        "paged_cache_memory_bytes",
        "Memory that paging takes, by what for.",
        [({"of": name}, float(size)) for name, size in held],
    )
    yield _gauge("paged_cache_swap_bytes", "What swap holds, in memory or in its file.", pager.swap_bytes)
    yield _gauge("paged_cache_parked_bytes", "Of those, of requests that gave up their frames.", pager.parked_bytes)


def _store(store: StoreStats, stats: EngineStats) -> Iterator[Metric]:
    yield _gauge("kvpager_store_up", "1 while the store is in use, 0 while it is not.", _up(store))
    yield _gauge("kvpager_store_blocks", "Blocks in the store.", store.blocks)
    yield _gauge("kvpager_store_records", "Sessions in the store.", store.records)
    yield _gauge("kvpager_store_bytes", "What the store takes on disk, all included.", store.bytes)
    yield _gauge("kvpager_store_limit_bytes", "The most that it may take.", store.limit_bytes)
    yield _gauge("kvpager_store_waiting_bytes", "Of blocks that wait to be written.", store.waiting_bytes)
    yield _counter("kvpager_store_hits", "Blocks asked for that were there.", store.hits)
    yield _counter("kvpager_store_misses", "Blocks asked for that were not there.", store.misses)
    yield _counter("kvpager_store_hit_tokens", "Tokens of prompts found in the store.", stats.pager.store_tokens_hit)
    yield _counter("kvpager_store_read_bytes", "Of pages, read.", store.read_bytes)
    yield _counter("kvpager_store_written_bytes", "Of pages, written for good.", store.stored_bytes)
    yield _counter("kvpager_store_skipped", "Blocks not stored: writing could not keep up.", store.skipped)
    yield _counter("kvpager_store_dropped", "Blocks that made way for others.", store.dropped)
    yield _counter(
        "kvpager_store_checksum_failures", "Blocks and sessions that did not match checksum or key.", store.damaged
    )
    errors = [({"cause": cause}, float(store.errors.get(cause, 0))) for cause in STORE_ERRORS]
    yield _values("counter", "kvpager_store_errors", "Failures of the store, by cause.", errors)
    yield _counter("kvpager_store_lost", "Blocks that the store had and could not give.", stats.pager.store_lost)
    yield from _tiers(store.tiers)


def _tiers(tiers: Mapping[str, StoreStats]) -> Iterator[Metric]:
    def each(kind: str, name: str, text: str, value: Callable[[StoreStats], float]) -> Metric:
        return _values(kind, name, text, [({"tier": tier}, float(value(one))) for tier, one in tiers.items()])

    yield each("gauge", "kvpager_store_tier_up", "1 while this tier is in use, 0 while it is not.", _up)
    yield each("gauge", "kvpager_store_tier_bytes", "What this tier holds.", lambda one: one.bytes)
    yield each("counter", "kvpager_store_tier_hits", "Blocks asked for in this tier, and there.", lambda one: one.hits)
    yield each("counter", "kvpager_store_tier_misses", "Blocks asked for, and not there.", lambda one: one.misses)
    yield each("counter", "kvpager_store_tier_written_bytes", "Of pages, written.", lambda one: one.stored_bytes)
    yield each("counter", "kvpager_store_tier_errors", "Failures.", lambda one: sum(one.errors.values()))


def _up(store: StoreStats) -> float:
    return float(store.state == "ok")


def _latencies(found: EngineLatencies) -> Iterator[Metric]:
    yield _histogram("kvpager_step_seconds", "A step of the engine.", found.step)
    yield _histogram("kvpager_queue_seconds", "From an answer's arrival to its first step.", found.queue)
    yield _histogram("kvpager_time_to_first_token_seconds", "From arrival to the first token.", found.first_token)
    yield _histogram("kvpager_time_between_tokens_seconds", "From one token to the next.", found.between_tokens)
    yield _histogram("kvpager_request_seconds", "From an answer's arrival to its end.", found.end_to_end)
    yield _histogram(
        "paged_cache_mass_coverage", "Share of attention that an answer's selections kept, estimated.", found.coverage
    )
    yield _histogram("paged_cache_attention_seconds", "Attention of one layer in a step.", found.pager.attend)
    yield _histogram("paged_cache_selection_seconds", "Of that, digests: built, and chosen by.", found.pager.select)
    yield _histogram("paged_cache_fault_seconds", "Of that, a group's absent pages read back.", found.pager.fault)
