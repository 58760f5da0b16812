"""The soak of benchmarks/soak.py, for seconds here: KVPAGER_SOAK_MINUTES=10 makes it the long one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.mark.slow
def test_a_mixed_load_with_clients_that_leave_ends_with_nothing_wrong_and_nothing_left(tmp_path: Path) -> None:
    minutes = os.environ.get("KVPAGER_SOAK_MINUTES", "0.25")
    found = tmp_path / "soak.json"
    # memory is still filling in so short a time: a bound on its growth belongs to the long run
    growth = "0.02" if float(minutes) >= 5 else "0.5"
    command = [
        sys.executable,
        str(SCRIPT),
        "--minutes",
        minutes,
        "--clients",
        "8",
        "--growth",
        growth,
        "--json",
        str(found),
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60 * float(minutes) + 120, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    counts = json.loads(found.read_text())["counts"]
    assert counts["answered"] > 0
    assert counts["left"] > 0
    assert counts["streamed"] > 0
    assert not [kind for kind in counts if kind.startswith("failed")], counts
