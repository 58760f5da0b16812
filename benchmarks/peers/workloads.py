"""The workloads that run.py measures, and their prompts: the same for every peer, as in `kvpager bench engine`.

Prompts are token ids of the bundled book, each from a place of its own, cut by `kvpager.bench.workload.Prompts`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvpager.bench.workload import Kind, Prompts, Workload

__all__ = ["WORKLOADS", "plan_round", "warm_up"]

# name: rounds of a name, a workload, and whether its requests are made one after another
WORKLOADS: dict[str, list[tuple[str, Workload, bool]]] = {
    "single": [
        (f"{tokens}", Workload((Kind(f"{tokens}", tokens, 65),), requests=1, seed=tokens), True)
        for tokens in (512, 2048, 7000)
    ],
    "batch8": [("batch8", Workload((Kind("batch8", 2000, 128),), requests=8), False)],
    "pressure": [("pressure", Workload((Kind("pressure", 500, 500),), requests=16), False)],
    "shared": [
        (name, Workload((Kind("shared", 50, 64),), requests=32, shared_prefix=1500, seed=seed), in_turn)
        for name, seed, in_turn in (("shared-in-turn", 1, True), ("shared-at-once", 2, False))
    ],
}


def plan_round(name: str, workload: Workload, in_turn: bool, ids: list[int], again: int) -> dict[str, Any]:
    """A round as driving.py takes it. Each repetition (`again`) has other prompts, so that no cache knows them."""
    workload = replace(workload, seed=workload.seed + 1_000_000 * again)
    prompts = Prompts(ids, workload)
    requests = [{"prompt": prompts(item), "max_tokens": item.output_tokens} for item in workload.items()]
    return {"name": name, "in_turn": in_turn, "requests": requests}


def warm_up(ids: list[int]) -> list[dict[str, Any]]:
    """Requests that don't count: a short one and one of 600 tokens."""
    return [{"prompt": ids[-count:], "max_tokens": 16} for count in (32, 600)]
