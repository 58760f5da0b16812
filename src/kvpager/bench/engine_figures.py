"""Figures of a run of ``kvpager bench engine``, and what several pools did with the same workload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from kvpager.bench.engine import PARTS, WORK, EngineRun, Step
from kvpager.bench.load_figures import distribution

__all__ = ["compared", "figures"]

KINDS = ("prefill", "mixed", "decode", "idle")


def figures(run: EngineRun) -> dict[str, Any]:
    """All figures of a run, for ``--json``. Speeds are of requests that ended well, over the virtual clock's time."""
    assert run.stats is not None, "a run has an end"
    well = [answer for answer in run.answers if answer.finish_reason in ("stop", "length")]
    written = sum(len(answer.token_ids) for answer in well)
    read = sum(answer.item.prompt_tokens for answer in well)
    computed = sum(step.prefill for step in run.steps)
    seconds = run.seconds or float("inf")
    return {
        "duration_s": run.seconds,
        "interrupted": run.interrupted,
        "completed": len(well),
        "failed": len(run.answers) - len(well),
        "errors": sorted({answer.error for answer in run.answers if answer.error}),
        "finish_reasons": dict(run.stats.finished),
        "prompt_tokens": read,
        "prompt_tokens_computed": computed,
        "cached_tokens": run.stats.cached_tokens,
        "output_tokens": written,
        "output_tokens_per_s": written / seconds,
        "total_tokens_per_s": (written + read) / seconds,
        "prefill_tokens_per_s": _prefill_speed(run.steps),
        "queue_ms": distribution(_told(run, lambda usage: usage.queue_s)),
        "ttft_ms": distribution(_told(run, lambda usage: usage.first_token_s)),
        "tpot_ms": distribution(_told(run, _per_token)),
        "e2e_ms": distribution(_told(run, lambda usage: usage.total_s)),
        "steps": _steps(run.steps),
        "parts": parts(run.steps),
        "overhead_share": overhead(run.steps),
        "decode_by_batch": _by_batch(run.steps),
        "pool": _pool(run),
        "memory": run.stats.pager.as_dict(),
        "store": None if run.stats.store is None else run.stats.store.as_dict(),
        "preemptions": run.stats.preemptions,
        "replays": run.stats.replays,
        "ids_digest": run.ids_digest,
        "schedule_digest": run.schedule_digest,
        "requests": [_row(answer) for answer in run.answers],
    }


def _told(run: EngineRun, figure: Callable[[Any], float | None]) -> list[float]:
    values = [figure(answer.usage) for answer in run.answers if answer.usage is not None]
    return [value for value in values if value is not None]


def _per_token(usage: Any) -> float | None:
    if usage.first_token_s is None or usage.completion_tokens < 2:
        return None
    return float((usage.total_s - usage.first_token_s) / (usage.completion_tokens - 1))


def _prefill_speed(steps: Sequence[Step]) -> float | None:
    """Tokens a second of steps with prompts alone; None where there is no such step."""
    alone = [step for step in steps if step.kind == "prefill"]
    seconds = sum(step.whole for step in alone)
    return sum(step.tokens for step in alone) / seconds if seconds else None


def _steps(steps: Sequence[Step]) -> dict[str, Any]:
    """How many of each kind, their time, its share, and how large their batches were."""
    whole = sum(step.whole for step in steps)
    found: dict[str, Any] = {}
    for kind in KINDS:
        mine = [step for step in steps if step.kind == kind]
        seconds = sum(step.whole for step in mine)
        found[kind] = {
            "n": len(mine),
            "seconds": seconds,
            "share": seconds / whole if whole else None,
            "median_ms": 1e3 * median(step.whole for step in mine) if mine else None,
            "mean_sequences": sum(step.sequences for step in mine) / len(mine) if mine else None,
            "mean_tokens": sum(step.tokens for step in mine) / len(mine) if mine else None,
        }
    return found


def parts(steps: Sequence[Step]) -> dict[str, dict[str, float | None]]:
    """Seconds, share, and milliseconds a step of each part."""
    whole = sum(step.whole for step in steps)
    found: dict[str, dict[str, float | None]] = {}
    for part in PARTS:
        seconds = sum(step.seconds[part] for step in steps)
        found[part] = {
            "seconds": seconds,
            "share": seconds / whole if whole else None,
            "ms_per_step": 1e3 * seconds / len(steps) if steps else None,
        }
    return found


def overhead(steps: Sequence[Step]) -> float | None:
    """The share of the time that is neither the model's nor attention's."""
    whole = sum(step.whole for step in steps)
    return 1 - sum(step.seconds[part] for step in steps for part in WORK) / whole if whole else None


def _by_batch(steps: Sequence[Step]) -> dict[str, Any]:
    """Steps that decode alone, by the number of their sequences."""
    sizes = sorted({step.sequences for step in steps if step.kind == "decode"})
    found = {}
    for size in sizes:
        mine = [step for step in steps if step.kind == "decode" and step.sequences == size]
        found[str(size)] = {
            "n": len(mine),
            "median_ms": 1e3 * median(step.whole for step in mine),
            "overhead_share": overhead(mine),
        }
    return found


def _pool(run: EngineRun) -> dict[str, Any]:
    assert run.stats is not None, "a run has an end"
    used = [step.frames_used for step in run.steps] or [0]
    return {
        "frames": run.stats.pager.frames,
        "most_used": max(used),
        "mean_used": sum(used) / len(used),
        "most_running": max((step.running for step in run.steps), default=0),
        "most_waiting": max((step.waiting for step in run.steps), default=0),
    }


def _row(answer: Any) -> dict[str, Any]:
    usage = None if answer.usage is None else asdict(answer.usage)
    return {
        "index": answer.item.index,
        "kind": answer.item.kind,
        "arrival_s": answer.item.at,
        "finish_reason": answer.finish_reason,
        "error": answer.error,
        "usage": usage,
        "output_tokens": len(answer.token_ids),
    }


def compared(runs: dict[str, EngineRun]) -> list[dict[str, Any]]:
    """A row for each pool: its speed and memory, and whether its ids are those of the last one.

    Where the schedules are equal as well, ids must be equal: `broken` says that they are not. Under other schedules
    matrix products may round differently, and then `differing` requests can be no fault.
    """
    reference = list(runs.values())[-1]
    rows = []
    for name, run in runs.items():
        assert run.stats is not None, "a run has an end"
        pager = run.stats.pager
        same_schedule = run.schedule_digest == reference.schedule_digest
        differing = sum(
            mine.token_ids != other.token_ids for mine, other in zip(run.answers, reference.answers, strict=True)
        )
        rows.append(
            {
                "pool": name,
                "pool_bytes": pager.pool_bytes,
                "resident_bytes": pager.resident_bytes,
                "swap_bytes": pager.swap_bytes,
                "completed": sum(answer.finish_reason in ("stop", "length") for answer in run.answers),
                "output_tokens_per_s": sum(len(a.token_ids) for a in run.answers) / (run.seconds or float("inf")),
                "recalls": pager.recalls,
                "evictions": pager.evictions,
                "preemptions": run.stats.preemptions,
                "same_schedule": same_schedule,
                "ids_equal": differing == 0,
                "differing": differing,
                "broken": same_schedule and differing > 0,
            }
        )
    return rows
