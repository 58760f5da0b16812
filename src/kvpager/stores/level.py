"""One tier of a chain: guarded, written to behind, and read as if all that waits were written."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvpager.ports import Bytes
from kvpager.stats import StoreStats
from kvpager.stored import BlockHead, Scores, StoredBlock
from kvpager.stores.backlog import Backlog, Erase, size_of
from kvpager.stores.guard import Guard
from kvpager.stores.limits import Limits
from kvpager.stores.probing import Prober
from kvpager.stores.tier import FarTier, Tier, TierSizes
from kvpager.stores.writer import Writer

__all__ = ["Level"]

_log = logging.getLogger("kvpager.stores")
T = TypeVar("T")
_LOOK_S = 0.05  # how often one looks whether it makes sense to wait on
_READ_AT_ONCE = 8  # blocks a call of the tier, so that a slow one is left alone soon


class Level:
    """A tier that never fails: it misses, or takes nothing. See stored.BlockStore for what its methods mean.

    `get` and `put` may be called by several threads.

    guard   what keeps the tier's failures from here
    writer  what writes what waits
    hits, misses  of heads that a pager asked for, as the chain counts them; read_bytes: of pages
    """

    def __init__(
        self, opener: Callable[[], Tier], limits: Limits, clock: Callable[[], float], far_s: float | None = None
    ) -> None:
        """Opens the tier; what it raises but StoreError and OSError is raised.

        far_s  for a FarTier: a read that takes longer is slow
        """
        self.guard = Guard(opener, limits, clock, far_s)
        self._prober = None if far_s is None else Prober(self.guard)
        self._backlog = Backlog()
        self.writer = Writer(self.guard, self._backlog, limits)
        self._limits = limits
        self._sizes = TierSizes()
        self.hits = self.misses = self.read_bytes = 0
        if self.guard.tier is None and not self.guard.off:
            self.writer.wake()  # to open it later

    @property
    def tick(self) -> int:
        """The latest tick that scores speak of."""
        return max(self._backlog.tick, self.guard.read(lambda tier: tier.tick, 0))

    @property
    def room(self) -> int:
        """Bytes of blocks that would be taken now; none while writing is known to fail for longer than a moment."""
        if self._refuses:
            return 0
        return max(0, self._limits.waiting_bytes - self._backlog.bytes)

    @property
    def waiting(self) -> tuple[int, int]:
        """Blocks that wait, and bytes that do."""
        return self._backlog.count, self._backlog.bytes

    @property
    def damaged(self) -> int:
        """Blocks and records that did not match their checksums or keys."""
        return 0 if self.guard.tier is None else self.guard.tier.damaged

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which blocks are there."""
        return self._as_written(keys, lambda: self.guard.read(lambda tier: tier.contains(keys), [False] * len(keys)))

    def known(self, keys: Sequence[bytes]) -> list[bool]:
        """Which blocks are there, as far as is known without asking far away."""
        tier = self.guard.tier
        if not isinstance(tier, FarTier):
            return self.contains(keys)
        return self._as_written(keys, lambda: tier.known(keys))

    def heads(self, keys: Sequence[bytes]) -> list[BlockHead | None]:
        """Heads of blocks."""
        found = [self._backlog.head(key) for key in keys]
        rest = [i for i, head in enumerate(found) if head is None]
        if rest:
            stored = self._backlog.heads([keys[i] for i in rest], self._stored_heads, self._limits.slow_s)
            for i, head in zip(rest, stored, strict=True):
                found[i] = head
        return found

    def get(self, keys: Sequence[bytes]) -> list[Bytes | None]:
        """Pages of blocks."""
        waiting = [self._backlog.block(key) for key in keys]
        found = [None if block is None else block.payload for block in waiting]
        rest = [i for i, key in enumerate(keys) if found[i] is None and not self._backlog.hides(key)]
        for start in range(0, len(rest), _READ_AT_ONCE):
            some = rest[start : start + _READ_AT_ONCE]
            payloads = self._checked([keys[i] for i in some], lambda tier, keys: tier.get(keys))
            for i, payload in zip(some, payloads, strict=True):
                found[i] = payload
        self.read_bytes += sum(payload.nbytes for payload in found if payload is not None)
        return found

    def put(self, blocks: Sequence[StoredBlock]) -> int:
        """Take blocks; returns how many of the first are taken, or there."""
        there = self.known([block.head.key for block in blocks])
        for taken, (block, is_there) in enumerate(zip(blocks, there, strict=True)):
            size = size_of(block)
            if is_there or self._backlog.block(block.head.key) is not None:
                continue
            room = self.room
            if size > room and not (room and room == self._limits.waiting_bytes):  # one at least, however large
                return taken
            self._backlog.put(block, size)
            self.writer.wake()
        return len(blocks)

    def update(self, news: Sequence[Scores], tick: int) -> None:
        """Note newer scores."""
        self._backlog.update(news, tick)
        self.writer.wake()

    def drop(self, keys: Sequence[bytes]) -> None:
        """Forget blocks."""
        if keys:
            self._backlog.drop(keys)
            self.writer.wake()

    def load_record(self, key: bytes) -> bytes | None:
        """A record."""
        waits, record = self._backlog.record(key)
        if waits:
            return record
        damaged = self.damaged
        record = self.guard.read(lambda tier: tier.load_record(key), None)
        if record is None and self.damaged > damaged:
            self.drop_record(key)
        return record

    def save_record(self, key: bytes, tenant: bytes, record: bytes) -> bool:
        """Take a record."""
        most = self._limits.waiting_bytes + self._limits.waiting_bytes // 4
        if self._refuses or self._backlog.bytes + len(record) > most:
            return False
        self._backlog.save(key, tenant, record)
        self.writer.wake()
        return True

    def drop_record(self, key: bytes) -> None:
        """Forget a record."""
        self._backlog.drop_record(key)
        self.writer.wake()

    def erase(self, tenant: bytes) -> Erase:
        """Begin to forget all of a tenant; none of its blocks is found from now on."""
        work = self._backlog.erase(tenant)
        self.writer.wake()
        return work

    def claim(self, key: bytes) -> bool:
        """Claim a record; where the tier can't tell whether another has, nobody can be kept from it."""
        return self._backlog.take_back(key) or self.guard.aside(lambda tier: tier.claim(key), True)

    def release(self, key: bytes) -> None:
        """Give up a claim, as soon as what waits of the record is written: who claims it next is to find that."""
        if not self._backlog.hold_on(key):
            self.guard.aside(lambda tier: tier.release(key), None)

    def sizes(self) -> TierSizes:
        """What the tier holds, as it said last."""
        self._sizes = self.guard.read(lambda tier: tier.sizes(), self._sizes)
        return self._sizes

    def blocks(self, keys: Sequence[bytes]) -> list[StoredBlock]:
        """Blocks whole, as far as they are there."""
        heads = self.heads(keys)
        there = [head for head in heads if head is not None]
        payloads = self.get([head.key for head in there])
        return [StoredBlock(head, one) for head, one in zip(there, payloads, strict=True) if one is not None]

    def stats(self) -> StoreStats:
        """Counters and sizes of this tier."""
        sizes = self.sizes()
        waiting, waiting_bytes = self.waiting
        return StoreStats(
            state=self.guard.state,
            blocks=sizes.blocks,
            records=sizes.records,
            payload_bytes=sizes.payload_bytes,
            bytes=sizes.bytes,
            limit_bytes=sizes.limit_bytes,
            hits=self.hits,
            misses=self.misses,
            read_bytes=self.read_bytes,
            stored=self.writer.stored,
            stored_bytes=self.writer.stored_bytes,
            skipped=self.writer.skipped,
            waiting=waiting,
            waiting_bytes=waiting_bytes,
            dropped=sizes.dropped,
            damaged=self.damaged,
            errors=dict(self.guard.errors),
        )

    def close(self, timeout: float, unread: bool) -> None:
        """Write what waits, for so many seconds at most, and close the tier, unless a call of it goes on.

        unread  whether nobody reads it any more
        """
        written = self._flush(timeout)
        ended = self.writer.stop(1.0)
        if self._prober is not None:
            self._prober.stop(1.0)
        if not written:
            blocks, size = self.waiting
            _log.warning("store: closed with %d blocks (%d bytes with records) not written", blocks, size)
        if ended and unread:  # else a call hangs, and closing would too
            self.guard.close()

    def _flush(self, timeout: float) -> bool:
        """Write what waits; a far tier that can't be written to is not waited for."""
        if self._prober is None:
            return self.writer.flush(timeout)
        ends = time.monotonic() + timeout
        while not (written := self.writer.flush(max(0.0, min(_LOOK_S, ends - time.monotonic())))):
            if self.guard.tier is None or self._refuses or time.monotonic() >= ends:
                break
        return written

    @property
    def _refuses(self) -> bool:
        """Whether nothing is taken: writing has failed, and not because another process writes."""
        writing = self.guard.writing
        return self.guard.off or (writing.reason not in (None, "locked") and writing.wait_s > 0)

    def _as_written(self, keys: Sequence[bytes], ask: Callable[[], Sequence[bool]]) -> list[bool]:
        """Which blocks will be there when all that waits is written; `ask` tells which the tier has.

        What waits is asked first: it may be done by the time that the tier has answered.
        """
        waits = [self._backlog.block(key) is not None for key in keys]
        hidden = [self._backlog.hides(key) for key in keys]
        return [waiting or (there and not hides) for waiting, hides, there in zip(waits, hidden, ask(), strict=True)]

    def _stored_heads(self, keys: Sequence[bytes]) -> list[BlockHead | None]:
        return self._checked(keys, lambda tier, keys: tier.heads(keys))

    def _checked(
        self, keys: Sequence[bytes], read: Callable[[Tier, Sequence[bytes]], list[T | None]]
    ) -> list[T | None]:
        """Read; what turns out to be damaged is dropped."""
        if not keys:
            return []
        damaged = self.damaged
        nothing: list[T | None] = [None] * len(keys)
        found = self.guard.read(lambda tier: read(tier, keys), nothing)
        if self.damaged > damaged:
            self.drop([key for key, item in zip(keys, found, strict=True) if item is None])
        return found
