"""What a benchmark ran on: the processor, its caches, threads, and the versions of what was measured."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from kvpager.errors import ConfigError
from kvpager.kernels.choose import native_module
from kvpager.kernels.cores import default_threads

__all__ = ["Others", "describe", "isa", "l3_bytes", "threads", "versions"]

PACKAGES = ("numpy", "torch", "transformers")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Have the kernels, and PyTorch where it is installed, use `count` threads inside."""
    setters: list[tuple[Any, int]] = []
    native = native_module()
    if native is not None:
        setters.append((native.set_threads, native.threads() or default_threads()))
    try:
        import torch
    except ImportError:
        pass
    else:
        setters.append((torch.set_num_threads, torch.get_num_threads()))
    try:
        for setter, _ in setters:
            setter(count)
        yield
    finally:
        for setter, before in setters:
            setter(before)


@contextmanager
def isa(name: str | None) -> Iterator[None]:
    """Have the native kernels use the instruction set `name` inside, or the one they use already for None.

    Raises ConfigError where it is not available.
    """
    native = native_module()
    if name is None:
        yield
        return
    found = [] if native is None else native.isas()
    if native is None or name not in found:
        raise ConfigError(f"isa: {name!r} is not one of {', '.join(found) or 'none: the extension is not built here'}")
    before = native.isa()
    native.set_isa(name)
    try:
        yield
    finally:
        native.set_isa(before)


def l3_bytes() -> int | None:
    """Bytes of the largest cache that the first core sees; None where the system does not say."""
    sizes = []
    for file in CACHES.glob("index*/size"):
        text = file.read_text().strip()
        number = text.rstrip("KMG")
        if number.isdigit():
            sizes.append(int(number) * UNITS.get(text[len(number) :], 1))
    return max(sizes, default=None)


class Others:
    """How much of the cores other programs take from its making on: where it is much, times are not to be trusted."""

    def __init__(self, statistics: Path = Path("/proc/stat")) -> None:
        self._statistics = statistics
        self._started = self._now()

    @property
    def share(self) -> float | None:
        """Their mean share of all cores, 0 to 1; None where the system does not say."""
        now = self._now()
        if now is None or self._started is None:
            return None
        everybody, own, wall = (late - early for late, early in zip(now, self._started, strict=True))
        return min(1.0, max(0.0, everybody - own) / max(wall * (os.cpu_count() or 1), 1e-9))

    def _now(self) -> tuple[float, float, float] | None:
        try:
            words = self._statistics.read_text().split()
        except OSError:
            return None
        # user, nice, system, then idle and waiting, then interrupts of two kinds and what the host took
        ticks = [int(word) for word in words[1:9]]
        busy = sum(ticks[:3]) + sum(ticks[5:])
        return busy / os.sysconf("SC_CLK_TCK"), process_time(), perf_counter()


def describe() -> dict[str, Any]:
    """The machine in a few facts: processor, cores, largest cache."""
    return {
        "processor": _processor(),
        "architecture": platform.machine(),
        "system": platform.system(),
        "cores": os.cpu_count(),
        "l3_bytes": l3_bytes(),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def versions() -> dict[str, str]:
    """Versions of Python, kvpager and the packages that are measured, as far as they are installed."""
    from kvpager import __version__

    found = {"python": platform.python_version(), "kvpager": __version__}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
