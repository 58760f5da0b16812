"""What a benchmark ran on: the processor, its caches, threads, and the versions of what was measured."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from kvpager.errors import ConfigError
from kvpager.kernels.cores import default_threads

__all__ = ["describe", "isa", "l3_bytes", "native_module", "threads", "versions"]

PACKAGES = ("numpy", "torch", "transformers")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def native_module() -> ModuleType | None:
    """The extension module, or None where kvpager was installed without it."""
    try:
        from kvpager import _native
    except ImportError:
        return None
    return _native


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


def describe() -> dict[str, Any]:
    """The machine in a few facts: processor, cores, largest cache, and the load when asked."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "processor": _processor(),
        "architecture": platform.machine(),
        "system": platform.system(),
        "cores": os.cpu_count(),
        "l3_bytes": l3_bytes(),
        "load_average": load,
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
