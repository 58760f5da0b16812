"""Stored blocks: what is kept of a full block outside a pager, and what a pager asks of a store.

A store is content-keyed: a block's key (see core.blocks) says everything that its bytes depend on, so a store never
compares anything but keys. What a store hands out was checked: a block that is missing, damaged or another's is a miss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kvpager.ports import Bytes
from kvpager.stats import StoreStats

__all__ = ["KEY_BYTES", "TENANT_BYTES", "BlockHead", "BlockStore", "Erasing", "Fence", "Scores", "StoredBlock"]

KEY_BYTES = 32
TENANT_BYTES = 16


@dataclass(frozen=True)
class BlockHead:
    """All of a stored block but its pages: enough to select among them.

    key          32 bytes, untruncated SHA-256
    parent       the key of the block before it, or what stands for one (0 or 32 bytes)
    tenant       16 bytes that tell whose it is, for quotas and erasing; all zeros for nobody's in particular
    depth        which block of its sequence it is, from 0
    tokens       its token ids, little-endian int64
    approximate  whether its keys and values were computed while a selection left pages out
    layout       text that says how its bytes are to be read: shape, dtype, frame layout; part of what the key is of
    pages        how many there are, in the order [layer, KV head]
    page_bytes   of one page
    digest_kind  what `digest` is in; "" where there is none
    digest       the digests of all its pages
    scores       what the scorer knew of its pages; opaque here
    hits         how often it was found by a sequence
    """

    key: bytes
    parent: bytes
    tenant: bytes
    depth: int
    tokens: bytes
    approximate: bool
    layout: str
    pages: int
    page_bytes: int
    digest_kind: str = ""
    digest: bytes = b""
    scores: bytes = b""
    hits: int = 0

    def rescored(self, scores: bytes, hits: int) -> BlockHead:
        """The same with other scores and hits."""
        return replace(self, scores=scores, hits=hits)


@dataclass(frozen=True)
class StoredBlock:
    """A block with its pages: uint8 [pages, page_bytes], bit-equal to the frames."""

    head: BlockHead
    payload: Bytes


@dataclass(frozen=True)
class Scores:
    """News about a stored block: what the scorer knows now, and how often it was found since it was told last.

    rank  the share of the pager's blocks whose score is lower, 0 to 1; 0 where that is not known
    """

    key: bytes
    scores: bytes
    hits: int
    rank: float = 0.0


@dataclass(frozen=True)
class Fence:
    """What a writer must still hold: the value of `key`, where a shared store keeps it, is `epoch`."""

    key: str
    epoch: int


class Erasing(Protocol):
    """All of a tenant on its way out of a store. May be asked by any thread."""

    @property
    def ended(self) -> bool:
        """Whether it is done, or has taken so long that nobody should wait: it goes on behind then."""

    def wait(self) -> int:
        """Wait until it has ended; how many blocks and records there were, as far as that is known then."""


class BlockStore(Protocol):
    """Complete blocks by key, durable or shared; every call takes many.

    Calls belong to one thread, the pager's. Nothing here raises for what the outside does: what fails is a miss or is
    not stored, counted in `stats` and logged once. But for `close`, calls must not take long: what writes works behind.
    """

    @property
    def tick(self) -> int:
        """The latest tick that scores in the store speak of, 0 for none: a pager's clock goes on from there."""

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of these blocks are there, as far as the index says; nothing is read."""

    def heads(self, keys: Sequence[bytes]) -> list[BlockHead | None]:
        """Heads of blocks, without reading a page; None for a miss. Each one found is a hit."""

    def get(self, keys: Sequence[bytes]) -> list[Bytes | None]:
        """Pages of blocks, uint8 [pages, page_bytes] each, all checked; None for a miss."""

    def put(self, blocks: Sequence[StoredBlock]) -> int:
        """Take blocks to be stored; returns how many of the first were taken. The others may be offered again.

        A block that is there already counts as taken. Payloads are not copied: they must not change any more.
        """

    @property
    def states(self) -> dict[str, str]:
        """The state of each tier, as in StoreStats, the nearest first: cheap enough for every step."""

    @property
    def room(self) -> int:
        """Bytes of blocks that `put` would take now."""

    def wants(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of these blocks `put` would keep now: what is there is not wanted. Nobody far away is asked."""

    def publish(self, keys: Sequence[bytes]) -> None:
        """These blocks go to the tier that others share, whatever else decides that; those also that are put later."""

    def update(self, news: Sequence[Scores], tick: int) -> list[bytes]:
        """Note newer scores of blocks; those that are not there are left out.

        Returns keys of blocks that are wanted now and were not before: they may be offered again.
        """

    def drop(self, keys: Sequence[bytes]) -> None:
        """Forget blocks, for instance those that were found to be wrong."""

    def prefetch(self, keys: Sequence[bytes]) -> None:
        """Blocks that `get` will be asked for soon, the most wanted first; a hint."""

    def load_record(self, key: bytes) -> bytes | None:
        """A record (a session's, say) by its 32-byte key, checked; None for a miss."""

    def save_record(self, key: bytes, tenant: bytes, record: bytes) -> bool:
        """Take a record to be stored after all blocks that were taken before it, in the place of an older one.

        False where it was not taken.
        """

    def drop_record(self, key: bytes) -> None:
        """Forget a record."""

    def claim(self, key: bytes) -> bool:
        """Become the one that may write this record, until `release`; False where another process is. Never waits."""

    def release(self, key: bytes) -> None:
        """Let others claim a record."""

    def erase(self, tenant: bytes) -> Erasing:
        """Forget all blocks and records of a tenant, those that wait to be written too. None is found from now on."""

    def stats(self) -> StoreStats:
        """Counters and sizes."""

    def close(self) -> None:
        """Write what waits, as far as that takes no more than a few seconds, and close; idempotent."""
