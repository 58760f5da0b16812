"""The worker's counts as vLLM's statistics: in its log, and at its /metrics."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from kvpager.vllm.counts import COUNTERS, GAUGES

__all__ = ["PREFIX", "Metrics", "Stats"]

PREFIX = "vllm:kvpager_"


class Stats(KVConnectorStats):
    """Counts by name: what was counted in an interval, and gauges as they were last."""

    def reset(self) -> None:
        """Forget all."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add what another interval, or another worker, has counted."""
        for name, value in other.data.items():
            self.data[name] = value if name in GAUGES else self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the line in vLLM's log."""
        return {name: round(value, 3) for name, value in self.data.items()}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class Metrics(KVConnectorPromMetrics):
    """Counters and gauges `vllm:kvpager_...`, for each engine."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._counters = {name: self._make(self._counter_cls, name, text) for name, text in COUNTERS.items()}
        self._gauges = {name: self._make(self._gauge_cls, name, text) for name, text in GAUGES.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take what an interval has counted."""
        for name, value in transfer_stats_data.items():
            if name in self._gauges:
                self._gauges[name][engine_idx].set(value)
            elif name in self._counters:
                self._counters[name][engine_idx].inc(value)

    def _make(self, kind: type[Counter] | type[Gauge], name: str, text: str) -> Any:
        metric = kind(name=PREFIX + name, documentation=text, labelnames=self._labelnames)
        return create_metric_per_engine(metric, self.per_engine_labelvalues)
