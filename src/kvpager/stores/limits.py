"""How much a chain of stores holds in memory, and how long it bears with a tier."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvpager.errors import ConfigError

__all__ = ["Limits"]


@dataclass(frozen=True)
class Limits:
    """Bounds of a chain. Raises ConfigError for one that is not above zero.

    waiting_bytes    blocks that wait to be written, for each tier; records may take a quarter of it on top
    prefetch_bytes   blocks that were read ahead
    batch_bytes      a batch of blocks is written when it has reached this size
    linger_s         or when its first block has waited for so long
    yield_s          for so long after the owner last said that it computes with all processors, it is left most of them
    slow_s           a call of a tier that takes longer is slow
    failures         so many failed or slow calls one after the other, and a tier is out of use
    pause_s          for so long at first, and for twice as long after every try that fails
    longest_pause_s  but for no longer than this
    erase_s          erasing waits for the tiers for so long; it goes on behind then
    close_s          closing writes what waits for so long
    """

    waiting_bytes: int = 64 * 2**20
    prefetch_bytes: int = 64 * 2**20
    batch_bytes: int = 8 * 2**20
    linger_s: float = 0.02
    yield_s: float = 30.0
    slow_s: float = 1.0
    failures: int = 3
    pause_s: float = 1.0
    longest_pause_s: float = 60.0
    erase_s: float = 2.0
    close_s: float = 10.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ConfigError(f"{field.name}: {value} is not above zero")
