"""What a chain asks of each of its tiers: SqliteStore's reading and writing, as a protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvpager.ports import Bytes
from kvpager.stored import BlockHead, Scores, StoredBlock

__all__ = ["FarTier", "Tier", "TierSizes"]


@dataclass(frozen=True)
class TierSizes:
    """What a tier holds.

    blocks, records  held now
    payload_bytes    of the pages of these blocks
    bytes            all that the tier takes up: on disk with log, index and free space
    limit_bytes      the most that it may grow to
    dropped          blocks that made way for others since this tier was opened
    """

    blocks: int = 0
    records: int = 0
    payload_bytes: int = 0
    bytes: int = 0
    limit_bytes: int = 0
    dropped: int = 0


class Tier(Protocol):
    """One place that keeps blocks and records: synchronous, and free to raise any StoreError for what the outside does.

    Threads: reading (`tick`, `damaged`, `contains`, `heads`, `get`, `load_record`, `sizes`) may happen in several
    threads at once, beside one that writes. Writing (`put`, `update`, `drop`, `save_record`, `drop_record`, `erase`)
    happens in one thread, not always that which opened the tier. `claim` and `release` belong to the owner's thread.
    `close` comes from any thread, when no other call runs.

    A write is a transaction, durable (as far as the tier's settings promise) when it returns; one that raises has
    changed nothing. `put` and `update` may be several, and then the earlier ones stay. No call waits for others for
    longer than a fraction of a second: it raises StoreLocked.

    What was lost or could not be read as a whole (StoreDamaged; StoreUnavailable of kind "lost") has been put aside and
    begun anew, where that was possible, when such an error is raised: the same call then works on an empty tier.
    StoreForeign and StoreNewer say that the tier will never be usable, and that nothing of it was touched. Where only
    writing is impossible (StoreUnavailable of kind "readonly", StoreFull), reading goes on.
    """

    @property
    def name(self) -> str:
        """A word for log lines: "sqlite"."""

    @property
    def tick(self) -> int:
        """The latest tick that was told by `update`, 0 for none."""

    @property
    def damaged(self) -> int:
        """Blocks and records that did not match their checksums or keys, since this tier was opened.

        A read that meets one gives None for it and counts here; the caller drops it.
        """

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of these blocks are there, by an index in memory."""

    def heads(self, keys: Sequence[bytes]) -> list[BlockHead | None]:
        """Heads of blocks, checked, without reading a page; None for one that is not there. Counts no hit."""

    def get(self, keys: Sequence[bytes]) -> list[Bytes | None]:
        """Pages of blocks, uint8 [pages, page_bytes] each, all checked; None for one that is not there."""

    def load_record(self, key: bytes) -> bytes | None:
        """A record by its 32-byte key, checked; None where it is not there."""

    def sizes(self) -> TierSizes:
        """What is held; from counters, without a scan."""

    def put(self, blocks: Sequence[StoredBlock]) -> int:
        """Store blocks; returns how many were written.

        One that is there already, or for which a quota has no room whatever makes way, is left out. Older blocks make
        way for newer ones by the tier's own rule.
        """

    def update(self, news: Sequence[Scores], tick: int) -> None:
        """Set scores, add hits, and note the tick; blocks that are not there are left out."""

    def drop(self, keys: Sequence[bytes]) -> None:
        """Forget blocks; those that are not there are left out."""

    def save_record(self, key: bytes, tenant: bytes, record: bytes) -> None:
        """Store a record in the place of an older one."""

    def drop_record(self, key: bytes) -> None:
        """Forget a record, if it is there."""

    def erase(self, tenant: bytes) -> int:
        """Forget all blocks and records of a tenant; returns how many there were."""

    def claim(self, key: bytes) -> bool:
        """Become the one that may write this record, until `release`; False where another is. Never waits."""

    def release(self, key: bytes) -> None:
        """Let others claim a record; nothing happens where it was not claimed here."""

    def close(self) -> None:
        """Give up files and claims; idempotent."""


@runtime_checkable
class FarTier(Tier, Protocol):
    """A tier whose calls cross a network, and which other nodes share.

    Every call ends in bounded time: one that somebody waits for (reading, `claim`) within the tier's time-out, but for
    several of them where many bytes are read. `contains` asks for all keys together, and `release` does not wait.
    """

    def known(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of these blocks are known to be there, without asking."""

    def probe(self) -> None:
        """Try whether reading works; raises StoreError where it does not."""
