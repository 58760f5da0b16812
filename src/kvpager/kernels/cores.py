"""How many threads the compiled kernels use by default."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["default_threads"]

TOPOLOGY = Path("/sys/devices/system/cpu")
QUOTA = Path("/sys/fs/cgroup/cpu.max")
MOST = 256


def default_threads(topology: Path = TOPOLOGY, quota: Path = QUOTA) -> int:
    """The physical cores that this process may use; no more than OMP_NUM_THREADS or a container's quota allow.

    Two hardware threads of one core share its memory ports: the second adds nothing to a kernel that waits for memory.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = {_read(topology / f"cpu{cpu}" / "topology" / "thread_siblings_list") or str(cpu) for cpu in allowed}
    most = [len(cores), MOST]
    named = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if named.isdigit() and int(named) > 0:
        most.append(int(named))
    share = _read(quota).split()
    if len(share) == 2 and share[0].isdigit() and share[1].isdigit():
        most.append(max(1, int(share[0]) // int(share[1])))
    return min(most)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
