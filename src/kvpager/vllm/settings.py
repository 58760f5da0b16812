"""What a user says about the store, in `kv_connector_extra_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from kvpager.config import parse_size
from kvpager.errors import ConfigError
from kvpager.stores import (
    COMPRESSIONS,
    LEAST_LIMIT_BYTES,
    SYNCHRONOUS,
    Chain,
    Compression,
    Limits,
    Synchronous,
    open_store,
)

__all__ = ["Settings"]

BATCH_BYTES = 16 * 2**20  # vLLM's blocks are of several MB each


@dataclass(frozen=True)
class Settings:
    """As the options of `kvpager serve` of the same names; see docs/stores.md. Raises ConfigError that names the field.

    store              the database's file; it and its folder are made where they are missing
    store_limit        the most bytes that it may take on disk
    store_sync         "normal" or "full"
    store_compression  "none" or "zstd"
    store_waiting      bytes of blocks that may wait to be written
    """

    store: str
    store_limit: str | int = "10GiB"
    store_sync: Synchronous = "normal"
    store_compression: Compression = "none"
    store_waiting: str | int = "256MiB"

    def __post_init__(self) -> None:
        if not isinstance(self.store, str) or not self.store or Path(self.store).expanduser().is_dir():
            raise ConfigError(f"store: {self.store!r} is not the path of a file")
        if parse_size(self.store_limit, "store_limit") < LEAST_LIMIT_BYTES:
            raise ConfigError(f"store_limit: {self.store_limit} is less than {LEAST_LIMIT_BYTES} bytes")
        parse_size(self.store_waiting, "store_waiting")
        if self.store_sync not in SYNCHRONOUS:
            raise ConfigError(f"store_sync: {self.store_sync!r} is not one of {', '.join(SYNCHRONOUS)}")
        if self.store_compression not in COMPRESSIONS:
            raise ConfigError(f"store_compression: {self.store_compression!r} is not one of {', '.join(COMPRESSIONS)}")

    @classmethod
    def of(cls, extra: Mapping[str, object]) -> Settings:
        """From `kv_connector_extra_config`. Raises ConfigError for a missing path and for names that are not known."""
        known = [field.name for field in fields(cls)]
        for name in extra:
            if name not in known:
                raise ConfigError(f"kv_connector_extra_config: {name!r} is not one of {', '.join(known)}")
        if "store" not in extra:
            raise ConfigError('kv_connector_extra_config: a path is needed, as in {"store": "/var/lib/vllm/store.db"}')
        return cls(**extra)  # type: ignore[arg-type]  # checked by __post_init__

    def open(self, itemsize: int) -> Chain:
        """The store; `itemsize`: bytes of a number in its blocks. Raises MissingDependency."""
        return open_store(
            Path(self.store).expanduser(),
            limit_bytes=parse_size(self.store_limit),
            synchronous=self.store_sync,
            compression=self.store_compression,
            itemsize=itemsize,
            limits=Limits(waiting_bytes=parse_size(self.store_waiting), batch_bytes=BATCH_BYTES),
        )
