"""``kvpager bench store``: a page back from swap and from the store, and how fast the store writes and checks.

Everything happens in one folder, hence on one disk, and what is read is in the system's page cache, as it is after a
restart of a process. Beside the store's writing stands a plain file of the same bytes, written in the same batches.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpager.ports import Bytes
from kvpager.stored import BlockHead, StoredBlock
from kvpager.swap import open_swap

if TYPE_CHECKING:
    from kvpager.stores import SqliteStore

__all__ = ["READERS", "Fault", "Plan", "Result", "Write", "measure", "random_blocks", "steps"]

READERS = {
    "swap": "swap, in a file",
    "store": "store, whole blocks",
    "store pages": "store, a layer's pages of each block",
    "first touch": "store, whole blocks, through swap into frames",
}
BATCH_BLOCKS = 8  # written in one transaction
UNBOUNDED = 2**50


@dataclass(frozen=True)
class Plan:
    """What is measured.

    blocks      what is stored and read back, all with pages of one size
    heads       pages of a block that one layer has, for reading single ones
    batches     pages that are wanted at once
    repeats     times that each case is measured; each reads as many pages as all blocks have
    synchronous, compressions   what writing is measured with
    """

    blocks: Sequence[StoredBlock]
    heads: int
    batches: tuple[int, ...] = (64, 256, 1024)
    repeats: int = 5
    synchronous: tuple[str, ...] = ("normal", "full")
    compressions: tuple[str, ...] = ("none", "zstd")
    seed: int = 0

    @property
    def pages(self) -> int:
        """Of one block."""
        return self.blocks[0].head.pages

    @property
    def page_bytes(self) -> int:
        """Of one page."""
        return self.blocks[0].head.page_bytes

    @property
    def payload_bytes(self) -> int:
        """Of all pages."""
        return len(self.blocks) * self.pages * self.page_bytes


@dataclass(frozen=True)
class Fault:
    """Pages read back: whence, how many were wanted at once, and microseconds a page in each repeat."""

    reader: str
    batch: int
    us: tuple[float, ...]

    def figures(self) -> dict[str, Any]:
        """For ``--json``."""
        return {"reader": self.reader, "batch": self.batch, "us_per_page": median(self.us), "least": min(self.us)}


@dataclass(frozen=True)
class Write:
    """Blocks written: seconds of all batches and of closing the store, and what that came to on disk.

    disk_bytes     all that the store takes there
    reserve_bytes  of these, room that is kept back for a full disk, however much is stored
    read_us        microseconds a page, read back in whole blocks
    """

    synchronous: str
    compression: str
    payload_bytes: int
    seconds: tuple[float, ...]
    closing: float
    disk_bytes: int
    reserve_bytes: int
    read_us: float

    def figures(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "synchronous": self.synchronous,
            "compression": self.compression,
            "mb_per_s": self.payload_bytes / 1e6 / (sum(self.seconds) + self.closing),
            "batch_ms": 1e3 * median(self.seconds),
            "batch_ms_most": 1e3 * max(self.seconds),
            "closing_ms": 1e3 * self.closing,
            "disk_bytes": self.disk_bytes,
            "reserve_bytes": self.reserve_bytes,
            "overhead": (self.disk_bytes - self.reserve_bytes) / self.payload_bytes - 1,
            "read_us_per_page": self.read_us,
        }


@dataclass
class Result:
    """All that was measured. `plain_mb_per_s`: a file of the same bytes; `verify_s`: checking all of a store."""

    blocks: int
    payload_bytes: int
    page_bytes: int
    faults: list[Fault] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    plain_mb_per_s: float = 0.0
    verify_s: tuple[float, ...] = ()

    def figures(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "blocks": self.blocks,
            "payload_bytes": self.payload_bytes,
            "page_bytes": self.page_bytes,
            "faults": [fault.figures() for fault in self.faults],
            "writes": [write.figures() for write in self.writes],
            "plain_file_mb_per_s": self.plain_mb_per_s,
            "verify_mb_per_s": self.payload_bytes / 1e6 / median(self.verify_s),
        }


def random_blocks(count: int, pages: int, page_bytes: int, seed: int = 0) -> list[StoredBlock]:
    """Blocks of normally distributed bfloat16 numbers, each with a key of its own; every 16th has the same pages."""
    rng = np.random.default_rng(seed)
    kinds: list[Bytes] = []
    for _ in range(min(count, 16)):
        numbers = rng.standard_normal(pages * page_bytes // 2).astype(np.float32).view(np.uint32) >> 16
        kinds.append(numbers.astype("<u2").view(np.uint8).reshape(pages, page_bytes))
    blocks, parent = [], b""
    for depth in range(count):
        key = hashlib.sha256(f"{seed}:{depth}".encode()).digest()
        tokens = rng.integers(0, 50000, 16).astype("<i8").tobytes()
        head = BlockHead(key, parent, bytes(16), depth, tokens, False, "bench", pages, page_bytes)
        blocks.append(StoredBlock(head, kinds[depth % len(kinds)]))
        parent = key
    return blocks


def steps(plan: Plan) -> int:
    """How often `measure` tells its progress."""
    return 1 + len(plan.synchronous) + len(plan.compressions[1:]) + len(READERS) * len(plan.batches) + 1


def measure(plan: Plan, folder: Path, progress: Callable[[int], None] = lambda done: None) -> Result:
    """Measure everything in a new folder inside of `folder`, which is empty again afterwards. Raises StoreError."""
    from kvpager.stores import SqliteStore

    result = Result(len(plan.blocks), plan.payload_bytes, plan.page_bytes)
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        progress(done)

    with tempfile.TemporaryDirectory(prefix="kvpager-bench-", dir=folder) as name:
        place = Path(name)
        result.plain_mb_per_s = _plain(plan, place / "plain")
        step()
        for synchronous, compression in _kinds(plan):
            result.writes.append(_write(plan, place, synchronous, compression))
            step()
        path = place / f"{plan.synchronous[0]}-none.db"
        store = SqliteStore(path, limit_bytes=UNBOUNDED)
        try:
            for reader in READERS:
                for batch in plan.batches:
                    result.faults.append(_fault(plan, place, store, reader, batch))
                    step()
            result.verify_s = tuple(_timed(store.verify) for _ in range(plan.repeats))
        finally:
            store.close()
        step()
    return result


def _kinds(plan: Plan) -> Iterator[tuple[str, str]]:
    """Every way to sync without compression, then the other compressions."""
    yield from ((synchronous, "none") for synchronous in plan.synchronous)
    yield from ((plan.synchronous[0], compression) for compression in plan.compressions if compression != "none")


def _timed(call: Callable[..., object], *arguments: object) -> float:
    began = perf_counter()
    call(*arguments)
    return perf_counter() - began


def _batches(plan: Plan) -> Iterator[Sequence[StoredBlock]]:
    for start in range(0, len(plan.blocks), BATCH_BLOCKS):
        yield plan.blocks[start : start + BATCH_BLOCKS]


def _plain(plan: Plan, path: Path) -> float:
    """MB/s of a file that is written batch by batch, and waited for once."""
    began = perf_counter()
    with path.open("wb", buffering=0) as file:
        for batch in _batches(plan):
            for block in batch:
                file.write(np.ascontiguousarray(block.payload).data)
        os.fsync(file.fileno())
    seconds = perf_counter() - began
    path.unlink()
    return plan.payload_bytes / 1e6 / seconds


def _write(plan: Plan, place: Path, synchronous: str, compression: str) -> Write:
    """A new store of all blocks; it stays."""
    from kvpager.stores import SqliteStore
    from kvpager.stores.places import Places

    path = place / f"{synchronous}-{compression}.db"
    options: dict[str, Any] = {"synchronous": synchronous, "compression": compression}
    store = SqliteStore(path, limit_bytes=UNBOUNDED, **options)
    seconds = tuple(_timed(store.put, batch) for batch in _batches(plan))
    closing = _timed(store.close)
    store = SqliteStore(path, limit_bytes=UNBOUNDED, **options)
    try:
        disk, reserve = store.sizes().bytes, Places(path).reserve.stat().st_size
        read = _fault(replace(plan, repeats=1), place, store, "store", 16 * plan.pages).us[0]
    finally:
        store.close()
    return Write(synchronous, compression, plan.payload_bytes, seconds, closing, disk, reserve, read)


def _fault(plan: Plan, place: Path, store: SqliteStore, reader: str, batch: int) -> Fault:
    rng = np.random.default_rng(plan.seed)
    make = {"swap": _swap_reads, "store": _block_reads, "store pages": _page_reads, "first touch": _touches}[reader]
    us = []
    for _ in range(plan.repeats):
        pages, seconds = 0, 0.0
        for count, took in make(plan, place, store, batch, rng):
            pages, seconds = pages + count, seconds + took
        us.append(seconds * 1e6 / pages)
    return Fault(reader, batch, tuple(us))


Reads = Iterator[tuple[int, float]]  # pages, and the seconds that they took


def _swap_reads(plan: Plan, place: Path, store: SqliteStore, batch: int, rng: np.random.Generator) -> Reads:
    """Pages in random order, out of a swap file into an array of frames."""
    swap = open_swap(place, plan.page_bytes, UNBOUNDED)
    try:
        slots = np.concatenate([swap.write(block.payload) for block in plan.blocks])
        slots = slots[rng.permutation(len(slots))]
        frames, rows = np.zeros((batch, plan.page_bytes), np.uint8), np.arange(batch)
        for start in range(0, len(slots) - batch + 1, batch):
            yield batch, _timed(swap.read, slots[start : start + batch], frames, rows)
    finally:
        swap.close()


def _keys(plan: Plan, count: int, rng: np.random.Generator) -> Iterator[list[bytes]]:
    """All blocks in random order, so many at a time."""
    keys = [plan.blocks[i].head.key for i in rng.permutation(len(plan.blocks)).tolist()]
    for start in range(0, len(keys) - count + 1, count):
        yield keys[start : start + count]


def _block_reads(plan: Plan, place: Path, store: SqliteStore, batch: int, rng: np.random.Generator) -> Reads:
    """Whole blocks, as many as hold a batch of pages."""
    count = min(-(-batch // plan.pages), len(plan.blocks))
    for keys in _keys(plan, count, rng):
        yield count * plan.pages, _timed(lambda wanted: _all(store.get(wanted)), keys)


def _page_reads(plan: Plan, place: Path, store: SqliteStore, batch: int, rng: np.random.Generator) -> Reads:
    """One layer's pages of as many blocks as a batch needs."""
    count = min(-(-batch // plan.heads), len(plan.blocks))

    def read(keys: list[bytes], wanted: list[int]) -> None:
        found = [store.get_pages(key, wanted) for key in keys]
        assert None not in found, "the store has lost a block"

    for keys in _keys(plan, count, rng):
        layer = int(rng.integers(plan.pages // plan.heads)) * plan.heads
        yield count * plan.heads, _timed(read, keys, list(range(layer, layer + plan.heads)))


def _touches(plan: Plan, place: Path, store: SqliteStore, batch: int, rng: np.random.Generator) -> Reads:
    """Whole blocks into swap, and all their pages from there into frames."""
    count = min(-(-batch // plan.pages), len(plan.blocks))
    frames = np.zeros((count * plan.pages, plan.page_bytes), np.uint8)
    rows = np.arange(len(frames))
    swap = open_swap(place, plan.page_bytes, UNBOUNDED)

    def touch(keys: list[bytes]) -> None:
        slots = np.concatenate([swap.write(payload) for payload in _all(store.get(keys))])
        swap.read(slots, frames, rows)

    try:
        for keys in _keys(plan, count, rng):
            yield count * plan.pages, _timed(touch, keys)
    finally:
        swap.close()


def _all(found: Sequence[Bytes | None]) -> list[Bytes]:
    there = [pages for pages in found if pages is not None]
    assert len(there) == len(found), "the store has lost a block"
    return there
