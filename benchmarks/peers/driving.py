"""Runs rounds of requests through an engine, step by step, and writes down when tokens came: the same for every peer.

It runs in the peer's own environment and so needs Python alone. `python drive_PEER.py` reads a plan from standard
input and writes its result to standard output, both JSON; what the peer prints itself goes to standard error.

plan    model (folder), settings, lock (file or null), warm_up (requests), rounds of name, requests, and in_turn
        (each request is made when the one before has ended; otherwise all at once); a request is prompt (token ids)
        and max_tokens
result  load_s, versions, kv, settings as they came to be, and rounds of name, seconds, others_share, preemptions and
        requests: first_s and end_s (seconds after it was made), tokens, all three lists
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, Protocol


class Driver(Protocol):
    """An engine that is driven step by step."""

    def facts(self) -> dict[str, Any]:
        """versions, kv (bytes, tokens, dtype) and settings."""

    def add(self, key: str, prompt: list[int], max_tokens: int) -> None:
        """Take a request that makes `max_tokens` tokens, greedily, whatever they are."""

    def step(self) -> list[tuple[str, int, bool]]:
        """Go on; key, number of all its tokens so far, and whether it has ended, for the requests that moved."""

    def preemptions(self) -> int | None:
        """How often a request had to give its memory back before its end, since the engine was made; None: not said."""


def run(make: Callable[[str, dict[str, Any]], Driver]) -> None:
    """Carry out the plan on standard input with the engine that `make` makes of a model's folder and settings."""
    plan = json.load(sys.stdin)
    with _standard_output_kept() as answer:
        began = perf_counter()
        driver = make(plan["model"], plan["settings"])
        loaded = perf_counter() - began
        _round(driver, {"name": "warm-up", "requests": plan["warm_up"], "in_turn": True})
        with _held(plan["lock"]):
            _forget_peak()
            rounds = [_round(driver, one) for one in plan["rounds"]]
            result = {"load_s": loaded, **driver.facts(), "peak_rss_bytes": _peak(), "rounds": rounds}
        answer(json.dumps(result))


def _round(driver: Driver, plan: dict[str, Any]) -> dict[str, Any]:
    requests = plan["requests"]
    at_once = [[index] for index in range(len(requests))] if plan["in_turn"] else [list(range(len(requests)))]
    rows: list[dict[str, Any]] = [{} for _ in requests]
    preempted, others, began = driver.preemptions(), Others(), perf_counter()
    for indices in at_once:
        _make(driver, {f"{began}-{index}": (requests[index], rows[index]) for index in indices})
    seconds = perf_counter() - began
    for request, row in zip(requests, rows, strict=True):
        if row["tokens"] != request["max_tokens"]:
            raise SystemExit(f"{plan['name']}: a request made {row['tokens']} tokens, not {request['max_tokens']}")
    return {
        "name": plan["name"],
        "seconds": seconds,
        "others_share": others.share(),
        "preemptions": None if preempted is None else driver.preemptions() - preempted,
        "requests": rows,
    }


def _make(driver: Driver, requests: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """Make all requests now, go on until they have ended, and fill in their rows."""
    began = perf_counter()
    for key, (request, row) in requests.items():
        row.update(first_s=None, end_s=None, tokens=0)
        driver.add(key, request["prompt"], request["max_tokens"])
    left = len(requests)
    while left:
        moved = driver.step()
        now = perf_counter() - began
        for key, tokens, ended in moved:
            row = requests[key][1]
            if row["first_s"] is None and tokens:
                row["first_s"] = now
            row["tokens"] = tokens
            if ended and row["end_s"] is None:
                row["end_s"] = now
                left -= 1


class Others:
    """How much of the cores other programs take from its making on: where it is much, times are not to be trusted."""

    def __init__(self) -> None:
        self._began = self._now()

    def share(self) -> float:
        """Their mean share of all cores, 0 to 1."""
        busy, own, wall = (late - early for late, early in zip(self._now(), self._began, strict=True))
        return max(0.0, busy - own) / max(wall * (os.cpu_count() or 1), 1e-9)

    def _now(self) -> tuple[float, float, float]:
        ticks = [int(word) for word in Path("/proc/stat").read_text().split()[1:9]]
        return (sum(ticks[:3]) + sum(ticks[5:])) / os.sysconf("SC_CLK_TCK"), process_time(), perf_counter()


@contextmanager
def _standard_output_kept() -> Iterator[Callable[[str], None]]:
    """What is printed inside, by libraries too, goes to standard error; gives what writes to the real output."""
    kept = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(kept, "w") as file:
        yield lambda text: print(text, file=file, flush=True)


@contextmanager
def _held(lock: str | None) -> Iterator[None]:
    """Hold the lock on a file, for which others that measure wait too."""
    if lock is None:
        yield
        return
    with open(lock, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _processes() -> Iterator[Path]:
    """This process and all that it has started, in /proc."""
    waiting = [Path(f"/proc/{os.getpid()}")]
    while waiting:
        process = waiting.pop()
        yield process
        for children in process.glob("task/*/children"):
            waiting += [Path(f"/proc/{child}") for child in children.read_text().split()]


def _forget_peak() -> None:
    """Count peaks from now on: loading and compiling are not what is measured."""
    for process in _processes():
        (process / "clear_refs").write_text("5")


def _peak() -> int:
    """Bytes of the resident sets of all processes, each at its peak."""
    total = 0
    for process in _processes():
        for line in (process / "status").read_text().splitlines():
            if line.startswith("VmHWM"):
                total += int(line.split()[1]) * 1024
    return total
