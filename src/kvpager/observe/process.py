"""What the process takes, and the most that it is given."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["memory_limit_bytes", "rss_bytes"]

STATM = Path("/proc/self/statm")
CGROUP = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
UNBOUNDED = 2**60  # cgroups of the first version write a number near 2**63 for no limit


def rss_bytes(statm: Path = STATM) -> int:
    """The resident set of this process now, in bytes; 0 where the system does not tell."""
    try:
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def memory_limit_bytes(places: tuple[Path, ...] = CGROUP) -> int | None:
    """The memory at which the system ends this process (its cgroup's limit), in bytes; None for no limit."""
    for place in places:
        try:
            limit = int(place.read_text())
        except (OSError, ValueError):  # not there, or "max"
            continue
        return limit if limit < UNBOUNDED else None
    return None
