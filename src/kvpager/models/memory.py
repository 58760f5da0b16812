"""How much memory a process may still take, and the refusal of what would not fit."""

from __future__ import annotations

from pathlib import Path

from kvpager.errors import ModelTooLarge

__all__ = ["free_memory", "require_memory"]

GB = 10**9
WORKING_SHARE = 0.1  # activations and buffers while loading, over the weights


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still take: what the system has, and what its control groups leave.

    None where neither can be read (not on Linux). `root` is the root of the file system, for tests.
    """
    found = [size for size in (_system(root), *_groups(root)) if size is not None]
    return min(found) if found else None


def require_memory(needed: int, name: str, free: int | None) -> None:
    """Raise ModelTooLarge when `needed` bytes of weights, and some room to work, are more than `free` bytes."""
    total = int(needed * (1 + WORKING_SHARE))
    if free is not None and total > free:
        raise ModelTooLarge(f"{name} needs {total / GB:.2f} GB of memory; {free / GB:.2f} GB are free")


def _system(root: Path) -> int | None:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _groups(root: Path) -> list[int]:
    """What each control group around this process leaves, versions 1 and 2."""
    free = []
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            base, limit, usage = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, usage = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # A limit may sit on any group above ours; in a container ours can be mounted as the root itself.
        parts = [part for part in path.strip().split("/") if part]
        for depth in range(len(parts) + 1):
            left = _left(base.joinpath(*parts[:depth]), limit, usage)
            if left is not None:
                free.append(left)
    return free


def _left(group: Path, limit: str, usage: str) -> int | None:
    most, used = _number(group / limit), _number(group / usage)
    if most is None or used is None:
        return None
    reclaimable = 0  # file pages that nobody has read lately count as used, but make room when needed
    for line in _lines(group / "memory.stat"):
        key, _, value = line.partition(" ")
        if key == "total_inactive_file" or (key == "inactive_file" and not reclaimable):
            reclaimable = int(value)
    return max(0, most - used + reclaimable)


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
