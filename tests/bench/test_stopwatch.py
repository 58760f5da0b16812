"""The clocks of ``kvpager bench step``: only the innermost one runs, and nothing is lost or counted twice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvpager.bench import step
from kvpager.bench.step import Stopwatch


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Stopwatch:
    """A stopwatch for which one second passes whenever it looks at the time."""
    ticks: Iterator[int] = iter(range(1000))
    monkeypatch.setattr(step, "perf_counter", lambda: float(next(ticks)))
    made = Stopwatch()
    made.on = True
    return made


def test_a_clock_stops_while_another_runs_inside(watch: Stopwatch) -> None:
    inner = watch.timed("attention", lambda: "done")
    outer = watch.timed("paging", inner)
    assert outer() == "done"
    found = watch.take()
    assert found["attention"] == 1
    assert found["paging"] == 2
    assert watch.take() == dict.fromkeys(step.PARTS, 0.0)


def test_a_part_inside_itself_is_counted_once(watch: Stopwatch) -> None:
    inner = watch.timed("weights", lambda: None)
    watch.timed("weights", inner)()
    assert watch.take()["weights"] == 3


def test_an_error_stops_the_clock(watch: Stopwatch) -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        watch.timed("paging", watch.timed("attention", fail))()
    watch.timed("sampling", lambda: None)()
    assert watch.take() == {**dict.fromkeys(step.PARTS, 0.0), "attention": 1, "paging": 2, "sampling": 1}


def test_nothing_is_counted_while_it_is_off(watch: Stopwatch) -> None:
    watch.on = False
    assert watch.timed("paging", lambda: 3)() == 3
    assert not any(watch.take().values())
