"""Stores: complete blocks that outlive the process, by key; see docs/stores.md."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvpager.stored import Fence
from kvpager.stores.chain import Chain
from kvpager.stores.header import COMPRESSIONS, Compression
from kvpager.stores.limits import Limits
from kvpager.stores.packages import xxh3, zstandard
from kvpager.stores.publishing import PUBLISHING, Publishing, PublishingPolicy
from kvpager.stores.redis import RedisStore, no_fence
from kvpager.stores.redis_desk import RedisDesk
from kvpager.stores.redis_links import client, redis_py
from kvpager.stores.redis_settings import RedisSettings
from kvpager.stores.redis_url import PASSWORD, is_redis_url, redis_place, require_path
from kvpager.stores.shared import Far
from kvpager.stores.sqlite import LEAST_LIMIT_BYTES, SYNCHRONOUS, SqliteStore, Synchronous

__all__ = [
    "COMPRESSIONS",
    "LEAST_LIMIT_BYTES",
    "PASSWORD",
    "PUBLISHING",
    "SYNCHRONOUS",
    "Chain",
    "Compression",
    "Far",
    "Limits",
    "Publishing",
    "PublishingPolicy",
    "RedisDesk",
    "RedisSettings",
    "RedisStore",
    "SqliteStore",
    "Synchronous",
    "is_redis_url",
    "open_store",
    "redis_clients",
    "redis_place",
    "redis_tier",
    "require_path",
]

BATCHES = 16
"""A batch is at most this part of what the file may grow to, which it may exceed by one batch for a moment."""


def open_store(
    path: str | Path | None,
    *,
    limit_bytes: int,
    tenant_limit_bytes: int | None = None,
    synchronous: Synchronous = "normal",
    compression: Compression = "none",
    itemsize: int = 2,
    busy_ms: int = 250,
    limits: Limits | None = None,
    clock: Callable[[], float] = time.monotonic,
    far: Far | None = None,
) -> Chain:
    """The store in the SQLite file `path`, made where there is none, as a pager wants it; behind it the tier `far`.

    Without a path there is `far` alone. What is wrong with the file or its folder, or far away, is no error here: the
    store misses until that is mended, or for good, and `stats` says why. See SqliteStore for the settings of the file,
    `redis_tier` for one far away, and Limits for those of the chain. Raises ConfigError, and MissingDependency where an
    extra is not installed.
    """

    def opener(path: str | Path) -> SqliteStore:
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
    openers = [] if path is None else [lambda: opener(path)]
    return Chain(openers, replace(limits, batch_bytes=batch_bytes), clock, far)


def redis_clients(url: str, timeout_s: float) -> Callable[[], Any]:
    """What makes clients of redis-py that wait for so long and never try again by themselves.

    Raises ConfigError for the URL, which is not shown, and MissingDependency.
    """
    place = redis_place(url)
    redis_py()
    return lambda: client(place, timeout_s)


def redis_tier(
    url: str,
    settings: RedisSettings | None = None,
    publishing: Publishing | None = None,
    fence: Callable[[], Fence | None] = no_fence,
) -> Far:
    """The Redis at `url` as the tier of a chain that nodes share. Raises ConfigError and MissingDependency.

    `fence`: what a writer must still hold, see RedisStore.
    """
    redis_place(url)
    redis_py()
    given = settings if settings is not None else RedisSettings()

    def opener() -> RedisStore:
        store = RedisStore(url, given, fence=fence)
        try:
            store.open()
        except BaseException:
            store.close()
            raise
        return store

    return Far(opener, publishing if publishing is not None else Publishing(), given.timeout_s)
