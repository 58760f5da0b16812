"""Blocks and records from one store to another one, by way of an archive."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvpager.errors import StoreDamaged, StoreTooLarge
from kvpager.stored import StoredBlock
from kvpager.stores.archive import Entry, export_blocks, import_blocks
from kvpager.stores.codec import decode, encode
from kvpager.stores.database import Database
from kvpager.stores.header import Compression
from kvpager.stores.lookup import Lookup
from kvpager.stores.sound import SOUND_BLOCK, SOUND_RECORD
from kvpager.stores.tier import Tier
from kvpager.stores.verify import Progress

__all__ = ["Moved", "export_to", "import_from"]

STEP = 16
BATCH_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Moved:
    """How many blocks and records were written, and how many were left out.

    Left out of an archive is what is damaged; left out of a store is what is there already, or has no room.
    """

    blocks: int = 0
    records: int = 0
    left_out: int = 0


def export_to(
    path: Path,
    database: Database,
    lookup: Lookup,
    *,
    tenant: bytes | None,
    compression: Compression,
    itemsize: int,
    progress: Progress,
) -> Moved:
    """Write all blocks and records (of a tenant) to an archive, each block after the one before it.

    What comes and goes meanwhile may be missed. Raises StoreError, see archive.export_blocks.
    """
    whose, values = ("", ()) if tenant is None else (" AND tenant = ?", (tenant,))
    with database.reading() as connection:
        keys: list[bytes] = [
            key
            for (key,) in connection.execute(
                f"SELECT key FROM blocks WHERE {SOUND_BLOCK}{whose} ORDER BY depth, id", values
            )
        ]
        records = connection.execute(
            f"SELECT key, tenant FROM records WHERE {SOUND_RECORD}{whose} ORDER BY id", values
        ).fetchall()
    written = {"block": 0, "record": 0}
    total = len(keys) + len(records)

    def entries() -> Iterator[Entry]:
        for begin in range(0, len(keys), STEP):
            with database.reading() as connection:
                found = [lookup.whole(connection, key) for key in keys[begin : begin + STEP]]
            for block in found:
                if block is not None:
                    written["block"] += 1
                    data = encode(block, compression, itemsize)
                    yield Entry("block", block.head.key, block.head.tenant, data)
            progress(min(begin + STEP, len(keys)), total)
        for done, (key, whose) in enumerate(records, len(keys) + 1):
            with database.reading() as connection:
                record = lookup.record(connection, key)
            if record is not None:
                written["record"] += 1
                yield Entry("record", key, whose, record)
            progress(done, total)

    count = export_blocks(path, entries())
    return Moved(written["block"], written["record"], total - count)


def import_from(path: Path, tier: Tier, progress: Progress) -> Moved:
    """Store all that an archive holds. `progress` counts bytes of the archive's entries.

    Raises StoreError; what was stored before stays: all up to the damage, where the archive is damaged.
    """
    batch: list[StoredBlock] = []
    blocks = records = seen = held = done = 0
    total = path.stat().st_size if path.is_file() else 0
    for entry in import_blocks(path):
        seen += 1
        done += len(entry.data)
        if entry.kind == "block":
            block = decode(entry.data, entry.key)
            if block.head.tenant != entry.tenant:
                raise StoreDamaged(f"{path}: block {entry.key[:6].hex()} says another tenant than its entry")
            batch.append(block)
            held += len(entry.data)
        if batch and (held >= BATCH_BYTES or entry.kind == "record"):
            blocks += tier.put(batch)
            batch, held = [], 0
        if entry.kind == "record" and tier.load_record(entry.key) is None:  # one that is there has gone on since
            records += _saved(tier, entry)
        progress(done, total)
    blocks += tier.put(batch) if batch else 0
    progress(total, total)
    return Moved(blocks, records, seen - blocks - records)


def _saved(tier: Tier, entry: Entry) -> bool:
    """Store a record; False where there is no room for it, whatever makes way. Raises StoreError."""
    try:
        tier.save_record(entry.key, entry.tenant, entry.data)
    except StoreTooLarge:
        return False
    return True
