"""Stores: complete blocks that outlive the process, by key; see docs/stores.md."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kvpager.stores.chain import Chain
from kvpager.stores.header import COMPRESSIONS, Compression
from kvpager.stores.limits import Limits
from kvpager.stores.packages import xxh3, zstandard
from kvpager.stores.sqlite import LEAST_LIMIT_BYTES, SYNCHRONOUS, SqliteStore, Synchronous

__all__ = [
    "COMPRESSIONS",
    "LEAST_LIMIT_BYTES",
    "SYNCHRONOUS",
    "Chain",
    "Compression",
    "Limits",
    "SqliteStore",
    "Synchronous",
    "open_store",
]

BATCHES = 16
"""A batch is at most this part of what the file may grow to, which it may exceed by one batch for a moment."""


def open_store(
    path: str | Path,
    *,
    limit_bytes: int,
    tenant_limit_bytes: int | None = None,
    synchronous: Synchronous = "normal",
    compression: Compression = "none",
    itemsize: int = 2,
    busy_ms: int = 250,
    limits: Limits | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Chain:
    """The store in the SQLite file `path`, made where there is none, as a pager wants it.

    What is wrong with the file or its folder is no error here: the store misses until that is mended, or for good, and
    `stats` says why. See SqliteStore for the settings of the file, and Limits for those of the chain. Raises
    ConfigError, and MissingDependency where the extra `store` is not installed.
    """

    def opener() -> SqliteStore:
        store = SqliteStore(
            path,
            limit_bytes=limit_bytes,
            tenant_limit_bytes=tenant_limit_bytes,
            synchronous=synchronous,
            compression=compression,
            itemsize=itemsize,
            busy_ms=busy_ms,
            clock=clock,
        )
        try:
            store.open()
        except BaseException:
            store.close()
            raise
        return store

    xxh3()
    if compression != "none":
        zstandard()
    limits = limits if limits is not None else Limits()
    batch_bytes = max(1, min(limits.batch_bytes, limit_bytes // BATCHES))
    return Chain([opener], replace(limits, batch_bytes=batch_bytes), clock)
