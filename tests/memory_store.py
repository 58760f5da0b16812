"""A store of blocks in a dict, for tests of what is above stores: synchronous, durable as long as the test, strict.

It asserts what the protocol asks of its caller: keys of 32 bytes, payloads of the size that the head says which don't
change once they were put, scores only of blocks, ticks that don't go back, and records after their blocks.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvpager.ports import Bytes
from kvpager.stats import StoreStats
from kvpager.stored import KEY_BYTES, TENANT_BYTES, BlockHead, Scores, StoredBlock

__all__ = ["MemoryStore", "Shelf"]


@dataclass
class Shelf:
    """What stays when a store is closed: blocks, records with their tenants, and which store holds which claim."""

    blocks: dict[bytes, StoredBlock] = field(default_factory=dict)
    sums: dict[bytes, bytes] = field(default_factory=dict)
    records: dict[bytes, tuple[bytes, bytes]] = field(default_factory=dict)
    claims: dict[bytes, MemoryStore] = field(default_factory=dict)
    tick: int = 0


class Erased:
    """What is erased already."""

    ended = True

    def __init__(self, count: int) -> None:
        self._count = count

    def wait(self) -> int:
        return self._count


class MemoryStore:
    """A BlockStore over a shelf; several over one shelf are as several processes with one database.

    broken     every block and record is missed, and nothing is stored, as with a database that can't be reached
    calls      how often each method was called with something to do
    asked      keys whose pages were asked for, in order
    prefetched keys that were announced, in order; published: those that were to be shared
    """

    def __init__(self, shelf: Shelf | None = None, *, room: int = 2**62) -> None:
        self.shelf = shelf if shelf is not None else Shelf()
        self.broken = False
        self.closed = False
        self.calls: Counter[str] = Counter()
        self.asked: list[bytes] = []
        self.prefetched: list[bytes] = []
        self.published: list[bytes] = []
        self._room = room
        self._counts: Counter[str] = Counter()

    def reopened(self) -> MemoryStore:
        """Another store over the same shelf, as after a restart when this one was closed."""
        return MemoryStore(self.shelf)

    # -- the protocol

    @property
    def tick(self) -> int:
        """The latest tick that was told."""
        return self.shelf.tick

    @property
    def states(self) -> dict[str, str]:
        """Whether it can be reached."""
        return {"local": "io" if self.broken else "ok"}

    @property
    def room(self) -> int:
        """As given; what is put is written at once, so it never shrinks."""
        return 0 if self.broken else self._room

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which are on the shelf."""
        self._called("contains", keys)
        return [not self.broken and key in self.shelf.blocks for key in keys]

    def heads(self, keys: Sequence[bytes]) -> list[BlockHead | None]:
        """Heads, each found one a hit."""
        self._called("heads", keys)
        found: list[BlockHead | None] = []
        for key in keys:
            block = None if self.broken else self.shelf.blocks.get(key)
            self._counts["misses" if block is None else "hits"] += 1
            if block is not None:
                block = StoredBlock(block.head.rescored(block.head.scores, block.head.hits + 1), block.payload)
                self.shelf.blocks[key] = block
            found.append(None if block is None else block.head)
        return found

    def get(self, keys: Sequence[bytes]) -> list[Bytes | None]:
        """Pages that are as they were put; a block that was damaged on the shelf is a miss, and counted."""
        self._called("get", keys)
        self.asked += keys
        return [self._get(key) for key in keys]

    def put(self, blocks: Sequence[StoredBlock]) -> int:
        """Takes as many as `room` bytes allow."""
        self._called("put", [block.head.key for block in blocks])
        taken, left = 0, self.room
        for block in blocks:
            head, payload = block.head, block.payload
            assert len(head.parent) in (0, KEY_BYTES)
            assert len(head.tenant) == TENANT_BYTES
            assert payload.dtype == np.uint8
            assert payload.shape == (head.pages, head.page_bytes), payload.shape
            if self.broken or payload.nbytes > left:
                break
            left -= payload.nbytes
            taken += 1
            if head.key in self.shelf.blocks:
                self._get(head.key, whole=False)
                continue
            self.shelf.blocks[head.key] = block
            self.shelf.sums[head.key] = _sum(payload)
            self._counts["stored"] += 1
            self._counts["stored_bytes"] += payload.nbytes
        return taken

    def wants(self, keys: Sequence[bytes]) -> list[bool]:
        """Those that are not on the shelf."""
        self._called("wants", keys)
        return [self.broken or key not in self.shelf.blocks for key in keys]

    def publish(self, keys: Sequence[bytes]) -> None:
        """Noted."""
        self._called("publish", keys)
        self.published += keys

    def update(self, news: Sequence[Scores], tick: int) -> list[bytes]:
        """Newer scores of blocks that are there."""
        self._called("update", [one.key for one in news])
        assert tick >= self.shelf.tick, f"tick {tick} after {self.shelf.tick}"
        if self.broken:
            return []
        self.shelf.tick = tick
        for one in news:
            block = self.shelf.blocks.get(one.key)
            if block is not None:
                head = block.head.rescored(one.scores, block.head.hits + one.hits)
                self.shelf.blocks[one.key] = StoredBlock(head, block.payload)
        return []

    def drop(self, keys: Sequence[bytes]) -> None:
        """Take blocks off the shelf."""
        self._called("drop", keys)
        for key in keys:
            self.shelf.blocks.pop(key, None)

    def prefetch(self, keys: Sequence[bytes]) -> None:
        """Noted, for a look at the order."""
        self._called("prefetch", keys)
        self.prefetched += keys

    def load_record(self, key: bytes) -> bytes | None:
        """A record as it was saved."""
        self._called("load_record", [key])
        found = None if self.broken else self.shelf.records.get(key)
        return None if found is None else found[1]

    def save_record(self, key: bytes, tenant: bytes, record: bytes) -> bool:
        """Saved at once."""
        self._called("save_record", [key])
        assert len(tenant) == TENANT_BYTES
        assert isinstance(record, bytes)
        if self.broken:
            return False
        self.shelf.records[key] = (tenant, record)
        return True

    def drop_record(self, key: bytes) -> None:
        """Take a record off the shelf."""
        self._called("drop_record", [key])
        self.shelf.records.pop(key, None)

    def claim(self, key: bytes) -> bool:
        """First come, first served; a store's second claim of the same key is a fault of its caller."""
        self._called("claim", [key])
        holder = self.shelf.claims.get(key)
        assert holder is not self, "claimed twice"
        if holder is None:
            self.shelf.claims[key] = self
        return holder is None

    def release(self, key: bytes) -> None:
        """Only the holder may."""
        self._called("release", [key])
        assert self.shelf.claims.pop(key) is self, "another store's claim was released"

    def erase(self, tenant: bytes) -> Erased:
        """Blocks and records of a tenant, at once."""
        self._called("erase", [])
        assert len(tenant) == TENANT_BYTES
        blocks = [key for key, block in self.shelf.blocks.items() if block.head.tenant == tenant]
        records = [key for key, (whose, _) in self.shelf.records.items() if whose == tenant]
        for key in blocks:
            del self.shelf.blocks[key]
        for key in records:
            del self.shelf.records[key]
        return Erased(len(blocks) + len(records))

    def stats(self) -> StoreStats:
        """What is on the shelf now, and what this store has handed out and taken."""
        size = sum(block.payload.nbytes for block in self.shelf.blocks.values())
        return StoreStats(
            state=self.states["local"],
            blocks=len(self.shelf.blocks),
            records=len(self.shelf.records),
            payload_bytes=size,
            bytes=size,
            limit_bytes=2**62,
            hits=self._counts["hits"],
            misses=self._counts["misses"],
            read_bytes=self._counts["read_bytes"],
            stored=self._counts["stored"],
            stored_bytes=self._counts["stored_bytes"],
            damaged=self._counts["damaged"],
        )

    def close(self) -> None:
        """Its claims end, as with its process."""
        self.closed = True
        for key in [key for key, holder in self.shelf.claims.items() if holder is self]:
            del self.shelf.claims[key]

    # -- for tests

    def damage(self, key: bytes) -> None:
        """Make a block one that does not match its checksum."""
        block = self.shelf.blocks[key]
        payload = block.payload.copy()
        payload[0, 0] ^= 1
        self.shelf.blocks[key] = replace(block, payload=payload)
        self.shelf.sums[key] = b"damaged"

    def _get(self, key: bytes, whole: bool = True) -> Bytes | None:
        block = None if self.broken else self.shelf.blocks.get(key)
        if block is None:
            return None
        if self.shelf.sums[key] == b"damaged":
            self._counts["damaged"] += whole
            return None
        assert _sum(block.payload) == self.shelf.sums[key], "a payload was changed after it was put"
        self._counts["read_bytes"] += block.payload.nbytes if whole else 0
        return block.payload.copy()

    def _called(self, name: str, keys: Sequence[bytes]) -> None:
        assert not self.closed, f"{name} after close"
        assert all(isinstance(key, bytes) and len(key) == KEY_BYTES for key in keys), f"{name}: keys of a wrong length"
        self.calls[name] += 1


def _sum(payload: Bytes) -> bytes:
    return hashlib.sha256(payload.tobytes()).digest()
