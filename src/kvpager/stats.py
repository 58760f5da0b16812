"""Plain counters and sizes that the core fills and others report."""

from __future__ import annotations

import resource
import sys
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

__all__ = ["Distribution", "Histogram", "Latencies", "PagerLatencies", "PagerStats", "StoreStats", "peak_rss_bytes"]

MICROSECONDS = (20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.5)
"""Bounds of what happens inside of a step, in seconds."""


@dataclass(frozen=True)
class Distribution:
    """How often values fell between bounds: `counts[i]` up to `bounds[i]`, the last beyond all; `total`: their sum."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self.counts)


class Histogram:
    """Counts values by bounds, which ascend; a value that equals a bound counts below it."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def look(self) -> Distribution:
        """What was counted so far, as it is now."""
        return Distribution(self._bounds, tuple(self._counts), self._total)


def peak_rss_bytes() -> int:
    """The most memory this process has held at once (its peak resident set), in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@dataclass(frozen=True)
class PagerLatencies:
    """How long parts of a pager's work took, in seconds, all tiles of a call in one layer together.

    attend  attention, with all that belongs to it: choosing pages, faults, scores
    select  of that, digests: building them and choosing by them; counted where pages were chosen
    fault   of that, a group's absent pages read back, what had to make way for them included
    """

    attend: Distribution
    select: Distribution
    fault: Distribution


class Latencies:
    """Takes what PagerLatencies gives."""

    def __init__(self) -> None:
        self.attend, self.select, self.fault = (Histogram(MICROSECONDS) for _ in range(3))

    def look(self) -> PagerLatencies:
        """What was counted so far."""
        return PagerLatencies(self.attend.look(), self.select.look(), self.fault.look())


@dataclass(frozen=True)
class PagerStats:
    """One look at a pager. Bytes are bytes allocated, so that memory is told whole (promise 7).

    pool_bytes          the frames
    digest_bytes        the pages' digests
    table_bytes         page table, block table, scores and the books of the pool
    resident_bytes      the sum of the three
    full_kv_bytes       what a full cache holds for the most tokens that were held at once
    swap_bytes          what swap holds (memory, or bytes of the file)
    peak_rss_bytes      the process's peak resident set
    frames, frames_used the pool's size, and frames that hold a page
    frames_cached       of those, frames of blocks that no open sequence holds
    sequences, tokens   open sequences, and tokens that they hold together
    cached_blocks       full blocks of closed sequences, kept for reuse
    parked_sequences    open sequences that are parked
    parked_bytes        bytes in swap of the pages that parked sequences hold, those shared with others included
    recalls, evictions  pages read back from swap; pages that left the pool and stayed readable
    discards            pages that were dropped for good (mode "discard")
    swap_writes         pages written to swap
    faults              groups of pages of which at least one was absent
    tiles               tiles attended, over all layers
    pages_attended      pages that tiles attended to, over all layers
    prefix_tokens_hit   tokens that `open` found in blocks already held
    store_tokens_hit    those of them that came from the store
    store_pages         pages read from the store
    store_lost          blocks that the store said it had and could not give
    store_skipped       blocks that were let go of before the store had room for them
    mass_coverage       the estimated share of attention that the selections kept, mean over tiles (1.0: all of it)
    """

    pool_bytes: int
    digest_bytes: int
    table_bytes: int
    full_kv_bytes: int
    swap_bytes: int
    peak_rss_bytes: int
    frames: int
    frames_used: int
    frames_cached: int
    sequences: int
    tokens: int
    cached_blocks: int
    parked_sequences: int
    parked_bytes: int
    recalls: int
    evictions: int
    discards: int
    swap_writes: int
    faults: int
    tiles: int
    pages_attended: int
    prefix_tokens_hit: int
    store_tokens_hit: int
    store_pages: int
    store_lost: int
    store_skipped: int
    mass_coverage: float

    @property
    def resident_bytes(self) -> int:
        """Frames, digests and tables together."""
        return self.pool_bytes + self.digest_bytes + self.table_bytes

    def as_dict(self) -> dict[str, int | float]:
        """All figures, `resident_bytes` among them, for JSON."""
        return {**asdict(self), "resident_bytes": self.resident_bytes}


@dataclass(frozen=True)
class StoreStats:
    """One look at a store of blocks.

    state            "ok", or why it is out of use at the moment ("off": for good)
    blocks, records  held now
    payload_bytes    of the pages of these blocks
    bytes            on disk, all included
    limit_bytes      the most that it may grow to
    hits, misses     blocks that were asked for by key, and were there or not
    read_bytes       of pages, handed out
    stored           blocks written for good, acknowledged
    stored_bytes     of their pages
    skipped          blocks that were not stored because writing could not keep up
    waiting          blocks taken that are not written yet; waiting_bytes: of them
    dropped          blocks that made way for others (the quota)
    damaged          blocks that did not match their checksums or their keys
    errors           failures by kind: "full", "locked", "io", "lost", "foreign", "newer", "readonly", "slow",
                     "large" (a session that its limit has no room for), "timeout", "auth", "fenced"
    tiers            the same of each tier by itself, "local" and "shared", the nearest first, whose sizes stand above
    """

    state: str = "ok"
    blocks: int = 0
    records: int = 0
    payload_bytes: int = 0
    bytes: int = 0
    limit_bytes: int = 0
    hits: int = 0
    misses: int = 0
    read_bytes: int = 0
    stored: int = 0
    stored_bytes: int = 0
    skipped: int = 0
    waiting: int = 0
    waiting_bytes: int = 0
    dropped: int = 0
    damaged: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    tiers: dict[str, StoreStats] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        """All figures, for JSON."""
        return asdict(self)
