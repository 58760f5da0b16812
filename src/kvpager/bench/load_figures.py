"""Figures of a run against a server: latencies, speeds, failures, and what the server's own counts say."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from kvpager.bench.load import Load, Record

__all__ = ["LATENCIES", "distribution", "figures", "percentile"]

LEAST_SAMPLES = {50: 1, 90: 10, 99: 100}  # fewer say nothing about the percentile: it would be their maximum
LATENCIES = {
    "ttft_ms": "to the first text",
    "tpot_ms": "a token after it",
    "gap_ms": "between pieces",
    "e2e_ms": "to the end",
}
EXAMPLES = 3  # of each kind of error


def percentile(values: Sequence[float], percent: int) -> float | None:
    """The nearest-rank percentile, which is one of the values; None where they are too few to have one."""
    if len(values) < LEAST_SAMPLES[percent]:
        return None
    return sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)]


def distribution(seconds: Iterable[float]) -> dict[str, float | int | None]:
    """n, mean, p50, p90, p99 and max in milliseconds; what too few samples can't tell is None."""
    values = [1e3 * value for value in seconds]
    return {
        "n": len(values),
        "mean": sum(values) / len(values) if values else None,
        **{f"p{percent}": percentile(values, percent) for percent in LEAST_SAMPLES},
        "max": max(values, default=None),
    }


def figures(load: Load) -> dict[str, Any]:
    """All figures of a run. Latencies are of requests that went well; speeds count what they wrote in the whole time.

    Rows by kind are there where the workload has several.
    """
    well = [record for record in load.records if record.error is None]
    kinds = sorted({record.item.kind for record in load.records})
    return {
        "duration_s": load.seconds,
        "interrupted": load.interrupted,
        "out_of_time": load.out_of_time,
        "sent": len(load.records),
        "completed": len(well),
        "failed": len(load.records) - len(well),
        "errors": _errors(load.records),
        "most_at_once": load.most_at_once,
        **_speeds(well, load.seconds),
        **_latencies(well),
        "late_ms": distribution(max(0.0, record.sent - record.item.at) for record in load.records),
        "counts": _counts(well),
        "kvpager": _fidelity(well),
        "kinds": {
            kind: {"completed": len(mine), **_latencies(mine)}
            for kind, mine in ((kind, [record for record in well if record.item.kind == kind]) for kind in kinds)
        },
        "requests": [_row(record) for record in load.records],
    }


def _latencies(records: Sequence[Record]) -> dict[str, Any]:
    found = {
        "ttft_ms": [record.first for record in records if record.first is not None],
        "tpot_ms": [record.per_token for record in records if record.per_token is not None],
        "gap_ms": [gap for record in records for gap in record.gaps],
        "e2e_ms": [record.whole for record in records],
    }
    return {name: distribution(values) for name, values in found.items()}


def _speeds(records: Sequence[Record], seconds: float) -> dict[str, Any]:
    written = sum(record.output_tokens for record in records)
    read = sum(record.prompt_tokens for record in records)

    def rate(count: int) -> float | None:
        return count / seconds if seconds > 0 else None

    cached = [record.cached_tokens for record in records if record.cached_tokens is not None]
    return {
        "prompt_tokens": read,
        "output_tokens": written,
        "cached_tokens": sum(cached) if cached else None,
        "requests_per_s": rate(len(records)),
        "output_tokens_per_s": rate(written),
        "total_tokens_per_s": rate(read + written),
    }


def _counts(records: Sequence[Record]) -> dict[str, int]:
    """Where tokens were counted by the server, and where its counts don't fit what was asked for or what came.

    A piece holds at least one token: more pieces than tokens can't be.
    """
    return {
        "from_usage": sum(record.told_tokens is not None for record in records),
        "from_pieces": sum(record.told_tokens is None for record in records),
        "pieces": sum(len(record.pieces) for record in records),
        "fewer_tokens_than_pieces": sum(
            record.told_tokens is not None and record.told_tokens < len(record.pieces) for record in records
        ),
        "other_prompt_lengths": sum(record.prompt_tokens != record.item.prompt_tokens for record in records),
        "short_answers": sum(record.output_tokens < record.item.output_tokens for record in records),
        "long_answers": sum(record.output_tokens > record.item.output_tokens for record in records),
    }


def _fidelity(records: Sequence[Record]) -> dict[str, float] | None:
    """Sums of the counters that kvpager's server adds to usage, and the least coverage; None from other servers."""
    told = [record.usage["kvpager"] for record in records if record.usage and record.usage.get("kvpager")]
    if not told:
        return None
    counters = ("pages_attended", "pages_recalled", "pages_evicted", "preemptions")
    sums: dict[str, float] = {name: sum(one.get(name) or 0 for one in told) for name in counters}
    covered = [one["estimated_mass_coverage"] for one in told if one.get("estimated_mass_coverage") is not None]
    return {**sums, **({"least_mass_coverage": min(covered)} if covered else {})}


def _errors(records: Sequence[Record]) -> dict[str, Any]:
    kinds = Counter(record.error for record in records if record.error is not None)
    return {
        kind: {
            "count": count,
            "messages": list(dict.fromkeys(str(one.message) for one in records if one.error == kind))[:EXAMPLES],
            "retry_after_s": max((one.retry_after or 0.0 for one in records if one.error == kind), default=0.0) or None,
        }
        for kind, count in kinds.most_common()
    }


def _row(record: Record) -> dict[str, Any]:
    first = record.first
    return {
        "index": record.item.index,
        "kind": record.item.kind,
        "arrival_s": record.item.at,
        "sent_s": record.sent,
        "first_s": None if first is None else record.sent + first,
        "ended_s": record.ended,
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "cached_tokens": record.cached_tokens,
        "finish_reason": record.finish_reason,
        "error": record.error,
    }
