"""A tier in memory that fails, is slow or hangs as it is told, and a clock that only goes as it is told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from kvpager.ports import Bytes
from kvpager.stored import BlockHead, Scores, StoredBlock
from kvpager.stores.tier import TierSizes

NOBODY = bytes(16)
SETTLED = 10.0
"""Seconds in which what goes on behind is certainly done; nothing waits so long unless it is broken."""


class Clock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def block(
    number: int, pages: int = 2, page_bytes: int = 64, tenant: bytes = NOBODY, scores: bytes = b""
) -> StoredBlock:
    """A block whose bytes follow from its number."""
    payload = np.random.default_rng(number).integers(0, 256, (pages, page_bytes), dtype=np.uint8)
    head = BlockHead(
        key=key_of(number),
        parent=b"",
        tenant=tenant,
        depth=0,
        tokens=b"",
        approximate=False,
        layout="test",
        pages=pages,
        page_bytes=page_bytes,
        scores=scores,
    )
    return StoredBlock(head, payload)


class FakeTier:
    """See stores.tier.Tier.

    fails     by the name of a method: what it raises
    before    called with the name of a method before it does anything
    rotten    keys whose bytes do not match
    calls     names of the methods that were called, in order
    log       what was written, in order
    """

    name = "fake"

    def __init__(self) -> None:
        self.fails: dict[str, Exception] = {}
        self.before: Callable[[str], None] = lambda name: None
        self.rotten: set[bytes] = set()
        self.calls: list[str] = []
        self.log: list[tuple[str, object]] = []
        self.batches: list[int] = []
        self.blocks: dict[bytes, StoredBlock] = {}
        self.records: dict[bytes, tuple[bytes, bytes]] = {}
        self.claimed: set[bytes] = set()
        self.tick = 0
        self.damaged = 0
        self.closed = False
        self._lock = threading.Lock()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        self._enter("contains")
        return [key in self.blocks for key in keys]

    def heads(self, keys: Sequence[bytes]) -> list[BlockHead | None]:
        self._enter("heads")
        return [None if (found := self._sound(key)) is None else found.head for key in keys]

    def get(self, keys: Sequence[bytes]) -> list[Bytes | None]:
        self._enter("get")
        return [None if (found := self._sound(key)) is None else found.payload for key in keys]

    def load_record(self, key: bytes) -> bytes | None:
        self._enter("load_record")
        if key in self.rotten:
            self.damaged += 1
            return None
        return self.records[key][1] if key in self.records else None

    def sizes(self) -> TierSizes:
        self._enter("sizes")
        payload = sum(held.payload.nbytes for held in self.blocks.values())
        return TierSizes(len(self.blocks), len(self.records), payload, 2 * payload, 10**9)

    def put(self, blocks: Sequence[StoredBlock]) -> int:
        self._enter("put")
        with self._lock:
            new = [held for held in blocks if held.head.key not in self.blocks]
            self.blocks.update({held.head.key: held for held in new})
            self.batches.append(len(blocks))
            self.log += [("put", held.head.key) for held in blocks]
            return len(new)

    def update(self, news: Sequence[Scores], tick: int) -> None:
        self._enter("update")
        for new in news:
            held = self.blocks.get(new.key)
            if held is not None:
                head = held.head.rescored(new.scores, held.head.hits + new.hits)
                self.blocks[new.key] = StoredBlock(head, held.payload)
        self.tick = max(self.tick, tick)

    def drop(self, keys: Sequence[bytes]) -> None:
        self._enter("drop")
        for key in keys:
            self.blocks.pop(key, None)
            self.rotten.discard(key)
            self.log.append(("drop", key))

    def save_record(self, key: bytes, tenant: bytes, record: bytes) -> None:
        self._enter("save_record")
        self.records[key] = (tenant, record)
        self.log.append(("save", key))

    def drop_record(self, key: bytes) -> None:
        self._enter("drop_record")
        self.records.pop(key, None)
        self.rotten.discard(key)

    def erase(self, tenant: bytes) -> int:
        self._enter("erase")
        blocks = [key for key, held in self.blocks.items() if held.head.tenant == tenant]
        records = [key for key, (owner, _) in self.records.items() if owner == tenant]
        for key in blocks:
            del self.blocks[key]
        for key in records:
            del self.records[key]
        return len(blocks) + len(records)

    def claim(self, key: bytes) -> bool:
        self._enter("claim")
        fresh = key not in self.claimed
        self.claimed.add(key)
        return fresh

    def release(self, key: bytes) -> None:
        self._enter("release")
        self.claimed.discard(key)

    def close(self) -> None:
        self._enter("close")
        self.closed = True

    def _sound(self, key: bytes) -> StoredBlock | None:
        if key in self.rotten:
            self.damaged += 1
            return None
        return self.blocks.get(key)

    def _enter(self, name: str) -> None:
        self.before(name)
        self.calls.append(name)
        if name in self.fails:
            raise self.fails[name]


class Gate:
    """Holds a tier's calls of one name until it is opened; `reached` is set when the first one waits."""

    def __init__(self, tier: FakeTier, name: str) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()
        self._name = name
        tier.before = self._wait

    def open(self) -> None:
        self._open.set()

    def _wait(self, name: str) -> None:
        if name == self._name:
            self.reached.set()
            assert self._open.wait(SETTLED)
