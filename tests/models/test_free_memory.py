"""Free memory is what the system and every control group leave; what does not fit is refused with both numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpager.errors import ModelTooLarge
from kvpager.models.memory import free_memory, require_memory


def system(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 16000 kB\nMemFree: 10 kB\nMemAvailable: 8000 kB\n"}


def test_without_groups_it_is_what_the_system_has_available(tmp_path: Path) -> None:
    assert free_memory(system(tmp_path, MEMINFO)) == 8000 * 1024


def test_a_version_2_limit_on_a_group_above_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/user/job\n",
        "sys/fs/cgroup/user/memory.max": "1000000\n",
        "sys/fs/cgroup/user/memory.current": "700000\n",
        "sys/fs/cgroup/user/memory.stat": "anon 1\ninactive_file 50000\n",
        "sys/fs/cgroup/user/job/memory.max": "max\n",
        "sys/fs/cgroup/user/job/memory.current": "600000\n",
    }
    assert free_memory(system(tmp_path, MEMINFO | files)) == 350000


def test_a_version_1_limit_counts_and_no_limit_does_not(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/box\n3:cpuset:/\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "5\n",
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "2000\n",
        "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "500\n",
        "sys/fs/cgroup/memory/box/memory.stat": "inactive_file 1\ntotal_inactive_file 100\n",
    }
    assert free_memory(system(tmp_path, MEMINFO | files)) == 1600


def test_unknown_free_memory_refuses_nothing(tmp_path: Path) -> None:
    assert free_memory(tmp_path) is None
    require_memory(10**15, "m", None)


def test_what_does_not_fit_is_refused_with_gb_needed_and_free() -> None:
    require_memory(900, "m", 1000)
    with pytest.raises(ModelTooLarge, match=r"^m needs 4\.40 GB of memory; 3\.00 GB are free$"):
        require_memory(4 * 10**9, "m", 3 * 10**9)
