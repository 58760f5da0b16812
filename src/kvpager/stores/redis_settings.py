"""How a Redis is used as a store."""

from __future__ import annotations

from dataclasses import dataclass

from kvpager.errors import ConfigError
from kvpager.stores.header import COMPRESSIONS, Compression

__all__ = ["RedisSettings"]


@dataclass(frozen=True)
class RedisSettings:
    """How a Redis is used. Raises ConfigError for a value out of its range.

    limit_bytes  of all that nodes with this prefix store together, as they count it
    ttl_s        seconds after its last use for which a block or record is kept
    timeout_s    for which a call that somebody waits for may last
    connections  of this process at most
    compression, itemsize  of pages that are written, see codec.encode
    """

    limit_bytes: int = 10 * 2**30
    ttl_s: int = 7 * 86400
    timeout_s: float = 0.1
    connections: int = 4
    compression: Compression = "none"
    itemsize: int = 2

    def __post_init__(self) -> None:
        if self.limit_bytes <= 0 or self.ttl_s < 1 or self.connections < 2:
            raise ConfigError("redis: limit_bytes and ttl_s are above zero, connections are 2 or more")
        if not 0.001 <= self.timeout_s <= 60:
            raise ConfigError(f"redis: timeout_s is {self.timeout_s}, and 0.001 to 60 is allowed")
        if self.compression not in COMPRESSIONS:
            raise ConfigError(f"compression is {self.compression!r}, and one of {', '.join(COMPRESSIONS)} is allowed")
