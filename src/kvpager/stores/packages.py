"""The optional packages of stores: xxhash for checksums, zstandard for compression."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from kvpager.errors import MissingDependency

__all__ = ["Data", "xxh3", "zstandard"]

Data = bytes | bytearray | memoryview


def _load(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependency(f"stores need {name}, not installed; run: pip install 'kvpager[store]'") from error


def xxh3() -> Callable[[Data], int]:
    """XXH3 with 64 bits (Yann Collet's xxHash): of bytes, as an unsigned number. Not meant against forgers."""
    function: Callable[[Data], int] = _load("xxhash").xxh3_64_intdigest
    return function


def zstandard() -> Any:
    """The module zstandard (RFC 8878)."""
    return _load("zstandard")
