"""How many threads are used by default: physical cores, within what the process may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvpager.kernels.cores import default_threads


@pytest.fixture
def topology(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight hardware threads of four cores (0 and 4 are one core, ...), of which all may be used; no quota."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    allow(monkeypatch, range(8))
    for cpu in range(8):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    return tmp_path


def allow(monkeypatch: pytest.MonkeyPatch, cpus: range) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cpus), raising=False)


def counted(topology: Path, quota: str | None = None) -> int:
    path = topology / "cpu.max"
    if quota is not None:
        path.write_text(quota)
    return default_threads(topology, path)


def test_hardware_threads_of_one_core_count_once(topology: Path) -> None:
    assert counted(topology) == 4


def test_only_cores_that_the_process_may_use_count(topology: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, range(3))
    assert counted(topology) == 3
    allow(monkeypatch, range(3, 5))
    assert counted(topology) == 2
    allow(monkeypatch, range(0, 8, 4))
    assert counted(topology) == 1


def test_without_a_topology_each_processor_counts(tmp_path: Path, topology: Path) -> None:
    assert default_threads(tmp_path / "none", tmp_path / "none") == 8


@pytest.mark.parametrize(
    ("quota", "threads"),
    [
        ("max 100000\n", 4),
        ("200000 100000\n", 2),
        ("250000 100000\n", 2),
        ("50000 100000\n", 1),
        ("900000 100000\n", 4),
        ("", 4),
    ],
)
def test_a_containers_quota_bounds_it(topology: Path, quota: str, threads: int) -> None:
    assert counted(topology, quota) == threads


@pytest.mark.parametrize(
    ("named", "threads"), [("2", 2), ("9", 4), ("3,2", 3), (" 1 ", 1), ("0", 4), ("many", 4), ("", 4)]
)
def test_openmps_variable_bounds_it(topology: Path, monkeypatch: pytest.MonkeyPatch, named: str, threads: int) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", named)
    assert counted(topology) == threads
