"""What the machine says of itself, and of other programs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpager.bench import machine

SECOND = os.sysconf("SC_CLK_TCK")


def test_what_others_took_is_all_less_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock: Iterator[float] = iter([0.0, 10.0])
    own: Iterator[float] = iter([0.0, 4.0])
    monkeypatch.setattr(machine, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(machine, "process_time", lambda: next(own))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    statistics = tmp_path / "stat"
    statistics.write_text("cpu 0 0 0 0 0 0 0 0 0 0\n")
    others = machine.Others(statistics)
    # five seconds of programs, two of niced ones, one of the system; eleven idle, one waiting
    statistics.write_text("cpu " + " ".join(str(n * SECOND) for n in (5, 2, 1, 11, 1, 0, 0, 0)) + " 0 0\n")
    assert others.share == pytest.approx((8 - 4) / 20)


def test_where_nothing_is_said_nothing_is_claimed(tmp_path: Path) -> None:
    assert machine.Others(tmp_path / "nothing").share is None


def test_the_machine_is_described() -> None:
    found = machine.describe()
    assert found["processor"]
    assert found["cores"] == os.cpu_count()
    assert found["l3_bytes"] is None or found["l3_bytes"] > 2**16
