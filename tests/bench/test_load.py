"""Runs against a scripted server on a clock of the test's own: every latency, speed and count is known beforehand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvpager.bench import load_figures
from kvpager.bench.load import Limits, Load, Record, drive
from kvpager.bench.workload import Item
from kvpager.errors import RemoteError
from kvpager.remote import Piece


class Clock:
    """Seconds that pass only when somebody says so."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        until = self.seconds + seconds
        for _ in range(10):  # what can be done at this time is done before it passes
            await asyncio.sleep(0)
        self.seconds = max(self.seconds, until)


def item(index: int, at: float = 0.0, prompt: int = 10, output: int = 3, kind: str = "all") -> Item:
    return Item(index, kind, 0, at, prompt, output)


def usage(read: int, written: int, **more: Any) -> dict[str, Any]:
    return {"prompt_tokens": read, "completion_tokens": written, **more}


class Script:
    """Answers by index: waits (seconds) before each piece, then usage, or a failure."""

    def __init__(self, clock: Clock, waits: dict[int, list[float]], ends: dict[int, Any] | None = None) -> None:
        self.clock, self.waits, self.ends = clock, waits, ends or {}
        self.order: list[int] = []

    async def __call__(self, item: Item) -> AsyncIterator[Piece]:
        self.order.append(item.index)
        for wait in self.waits[item.index]:
            self.clock.seconds += wait
            yield Piece("text")
        end = self.ends.get(item.index)
        if isinstance(end, Exception):
            raise end
        yield Piece("", "length")
        yield Piece("", None, end)


def played(script: Any, items: list[Item], clock: Clock, **limits: Any) -> dict[str, Any]:
    load = Load()
    asyncio.run(drive(script, items, Limits(**limits), load, clock=clock, sleep=clock.sleep))
    return load_figures.figures(load)


def test_latencies_and_speeds_are_those_of_the_script() -> None:
    clock = Clock()
    script = Script(
        clock,
        {0: [0.5, 0.1, 0.3], 1: [0.2, 0.4, 0.4]},
        {0: usage(10, 3), 1: usage(10, 5, prompt_tokens_details={"cached_tokens": 8})},
    )
    result = played(script, [item(0), item(1, output=5)], clock, concurrency=1)
    assert result["ttft_ms"]["mean"] == pytest.approx(350)
    assert result["ttft_ms"]["max"] == pytest.approx(500)
    assert result["ttft_ms"]["p50"] == pytest.approx(200)  # nearest rank: of two the first
    assert result["e2e_ms"]["max"] == pytest.approx(1000)
    assert result["gap_ms"]["n"] == 4
    assert result["gap_ms"]["max"] == pytest.approx(400)
    assert result["tpot_ms"]["mean"] == pytest.approx((400 / 2 + 800 / 4) / 2)
    assert result["duration_s"] == pytest.approx(1.9)
    assert (result["prompt_tokens"], result["output_tokens"], result["cached_tokens"]) == (20, 8, 8)
    assert result["output_tokens_per_s"] == pytest.approx(8 / 1.9)
    assert result["total_tokens_per_s"] == pytest.approx(28 / 1.9)
    assert result["requests_per_s"] == pytest.approx(2 / 1.9)
    assert result["counts"] == {
        "from_usage": 2,
        "from_pieces": 0,
        "pieces": 6,
        "fewer_tokens_than_pieces": 0,
        "other_prompt_lengths": 0,
        "short_answers": 0,
        "long_answers": 0,
    }
    assert result["kvpager"] is None


def test_counts_that_dont_fit_are_told() -> None:
    clock = Clock()
    waits = {index: [0.1] * 3 for index in range(4)}
    script = Script(clock, waits, {0: usage(10, 2), 1: usage(11, 9), 2: None, 3: usage(10, 3)})
    counts = played(script, [item(index) for index in range(4)], clock, concurrency=1)["counts"]
    assert counts["fewer_tokens_than_pieces"] == 1
    assert counts["other_prompt_lengths"] == 1
    assert (counts["short_answers"], counts["long_answers"]) == (1, 1)
    assert (counts["from_usage"], counts["from_pieces"]) == (3, 1)


def test_failures_are_counted_by_kind_and_take_no_part_in_latencies() -> None:
    clock = Clock()
    refused = RemoteError("http_429", "429 too many", status=429, retry_after=3.0)
    ends = {0: RemoteError("cut", "gone"), 1: refused, 2: usage(10, 1), 3: refused}
    script = Script(clock, {0: [9.0], 1: [], 2: [0.25], 3: []}, ends)
    result = played(script, [item(index) for index in range(4)], clock, concurrency=1)
    assert (result["sent"], result["completed"], result["failed"]) == (4, 1, 3)
    assert result["errors"] == {
        "http_429": {"count": 2, "messages": ["429 too many"], "retry_after_s": 3.0},
        "cut": {"count": 1, "messages": ["gone"], "retry_after_s": None},
    }
    assert result["ttft_ms"]["n"] == 1
    assert result["ttft_ms"]["max"] == pytest.approx(250)
    assert result["output_tokens"] == 1
    assert [row["error"] for row in result["requests"]] == ["cut", "http_429", None, "http_429"]


def test_an_answer_without_anything_is_a_failure() -> None:
    clock = Clock()
    result = played(Script(clock, {0: []}), [item(0)], clock)
    assert list(result["errors"]) == ["empty"]


def test_requests_are_sent_at_their_time_and_lateness_is_told() -> None:
    clock = Clock()
    script = Script(clock, {0: [0.1], 1: [3.0], 2: [0.1]}, {index: usage(10, 1) for index in range(3)})
    result = played(script, [item(0), item(1, at=2.0), item(2, at=2.5)], clock, concurrency=1)
    sent = [row["sent_s"] for row in result["requests"]]
    assert sent == pytest.approx([0.0, 2.0, 5.0])
    assert result["late_ms"]["max"] == pytest.approx(2500)


class Gate:
    """A server that holds every answer until `width` requests are there."""

    def __init__(self, width: int) -> None:
        self.width, self.here, self.most = width, 0, 0
        self.open = asyncio.Event()

    async def __call__(self, item: Item) -> AsyncIterator[Piece]:
        self.here += 1
        self.most = max(self.most, self.here)
        if self.here == self.width:
            self.open.set()
        await self.open.wait()
        yield Piece("text", "stop", usage(10, 1))
        self.here -= 1


@pytest.mark.parametrize(("concurrency", "expected"), [(3, 3), (None, 7)])
def test_so_many_requests_are_under_way_at_once_and_no_more(concurrency: int | None, expected: int) -> None:
    gate = Gate(expected)
    result = played(gate, [item(index) for index in range(7)], Clock(), concurrency=concurrency, seconds=20)
    assert (gate.most, result["most_at_once"], result["completed"]) == (expected, expected, 7)


class Stuck:
    """Request 0 is answered; all others hang after their first piece."""

    async def __call__(self, item: Item) -> AsyncIterator[Piece]:
        yield Piece("text", None, usage(10, 1))
        if item.index:
            await asyncio.Event().wait()


def test_a_request_that_takes_too_long_is_a_timeout_and_others_go_on() -> None:
    result = played(Stuck(), [item(index) for index in (1, 0)], Clock(), timeout=0.05)
    assert result["errors"]["timeout"]["count"] == 1
    assert result["completed"] == 1
    assert not result["out_of_time"]


def test_when_the_time_is_over_what_is_under_way_is_unfinished() -> None:
    result = played(Stuck(), [item(index) for index in range(5)], Clock(), concurrency=2, seconds=0.05)
    assert result["out_of_time"]
    assert result["completed"] == 1
    assert result["errors"]["unfinished"]["count"] == 2  # the rest was never sent
    assert result["sent"] == 3


def test_a_cancelled_run_keeps_what_was_measured() -> None:
    load = Load()

    async def interrupted() -> None:
        limits = Limits(concurrency=2)
        run = asyncio.create_task(drive(Stuck(), [item(index) for index in range(5)], limits, load, clock=Clock()))
        while len(load.records) < 3:
            await asyncio.sleep(0)
        run.cancel()
        await run

    asyncio.run(interrupted())
    result = load_figures.figures(load)
    assert result["interrupted"]
    assert (result["completed"], result["errors"]["unfinished"]["count"]) == (1, 2)


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (1, {"p50": 1.0, "p90": None, "p99": None}),
        (9, {"p50": 5.0, "p90": None, "p99": None}),
        (10, {"p50": 5.0, "p90": 9.0, "p99": None}),
        (99, {"p50": 50.0, "p90": 90.0, "p99": None}),
        (200, {"p50": 100.0, "p90": 180.0, "p99": 198.0}),
    ],
)
def test_percentiles_are_measured_values_and_need_enough_of_them(count: int, expected: dict[str, float | None]) -> None:
    found = load_figures.distribution([(count - index) / 1e3 for index in range(count)])
    assert found["n"] == count
    assert found["max"] == count
    assert {name: None if found[name] is None else round(found[name], 6) for name in expected} == expected


def test_no_values_have_no_figures() -> None:
    assert load_figures.distribution([]) == {"n": 0, "mean": None, "p50": None, "p90": None, "p99": None, "max": None}


def test_kvpagers_own_counters_are_added_up() -> None:
    told = [
        {"pages_attended": 5, "pages_recalled": 2, "pages_evicted": 3, "preemptions": 0, "estimated_mass_coverage": 1},
        {"pages_attended": 7, "pages_recalled": 0, "preemptions": 1, "estimated_mass_coverage": 0.9},
    ]
    records = [Record(item(0), 0.0, pieces=[0.1], usage=usage(10, 1, kvpager=one)) for one in told]
    assert load_figures.figures(Load(records, seconds=1.0))["kvpager"] == {
        "pages_attended": 12,
        "pages_recalled": 2,
        "pages_evicted": 3,
        "preemptions": 1,
        "least_mass_coverage": 0.9,
    }
