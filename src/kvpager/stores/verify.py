"""A look at every byte of a store: which pages, blocks and records do not match their checksums."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from kvpager.errors import StoreDamaged
from kvpager.stored import BlockHead
from kvpager.stores.database import Database
from kvpager.stores.faults import is_damage
from kvpager.stores.header import Header
from kvpager.stores.rows import blob_of, head_of, unseal
from kvpager.stores.sound import SOUND_BLOCK, SOUND_RECORD

__all__ = ["Damage", "Progress", "Report", "verify"]

Progress = Callable[[int, int], None]
"""Called with how much is done, and how much there is to do."""

STEP = 16  # blocks that are read in one transaction: a longer one would keep the log from being cut off
MOST_LINES = 100  # of what SQLite says about its structure
NOT_OURS = "its row is not as kvpager writes it"


@dataclass(frozen=True)
class Damage:
    """One thing that is damaged.

    kind     "page"; "block" where its pages can't be told apart; "head" (what is known of a block but its pages);
             "record"; "file" for the database's structure
    key      of the block or record, as bytes whatever it is; empty for the file
    row      the id of its row; 0 for the file
    page     which of the block's pages, for kind "page"
    message  what does not match
    """

    kind: Literal["page", "block", "head", "record", "file"]
    key: bytes
    page: int | None
    message: str
    row: int = 0


@dataclass(frozen=True)
class Report:
    """What was looked at, and what of it is damaged. `nbytes` is of heads, blocks and records, as stored."""

    blocks: int
    pages: int
    records: int
    nbytes: int
    damaged: tuple[Damage, ...]

    def rows_damaged(self, table: Literal["blocks", "records"]) -> list[int]:
        """Ids of all rows of blocks, or of records, that are damaged anywhere, each once."""
        kinds = ("page", "block", "head") if table == "blocks" else ("record",)
        return list(dict.fromkeys(one.row for one in self.damaged if one.kind in kinds))


def verify(database: Database, progress: Progress = lambda done, total: None) -> Report:
    """Read and check all blocks and records, and the structure of the database; changes nothing.

    What comes and goes meanwhile may be missed. `progress` counts blocks and records. Raises StoreError where the
    database can't be read at all.
    """
    damaged = list(_structure(database))
    with database.reading() as connection:
        blocks = connection.execute(f"SELECT id, key, {SOUND_BLOCK} FROM blocks ORDER BY id").fetchall()
        records = connection.execute(f"SELECT id, key, {SOUND_RECORD} FROM records ORDER BY id").fetchall()
    counts = _Counts()
    total = len(blocks) + len(records)
    for begin in range(0, len(blocks), STEP):
        with database.reading() as connection:
            for number, key, sound in blocks[begin : begin + STEP]:
                found = (
                    _block(connection, number, key, counts) if sound else [Damage("block", _name(key), None, NOT_OURS)]
                )
                damaged += [replace(one, row=number) for one in found]
        progress(min(begin + STEP, len(blocks)), total)
    for done, (number, key, sound) in enumerate(records, len(blocks) + 1):
        with database.reading() as connection:
            found = _record(connection, key, counts) if sound else [Damage("record", _name(key), None, NOT_OURS)]
        damaged += [replace(one, row=number) for one in found]
        progress(done, total)
    return Report(counts.blocks, counts.pages, counts.records, counts.nbytes, tuple(damaged))


@dataclass
class _Counts:
    blocks: int = 0
    pages: int = 0
    records: int = 0
    nbytes: int = 0


def _structure(database: Database) -> Iterator[Damage]:
    with database.reading() as connection:
        try:
            lines = [line for (line,) in connection.execute(f"PRAGMA quick_check({MOST_LINES})")]
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            lines = [str(error)]
    for line in lines:
        if line != "ok":
            yield Damage("file", b"", None, line)


def _block(connection: sqlite3.Connection, number: int, key: bytes, counts: _Counts) -> list[Damage]:
    found, head = _head(connection, number, key, counts)
    try:
        row = connection.execute("SELECT payload FROM payloads WHERE id = ?", (number,)).fetchone()
        if row is None:
            there = connection.execute("SELECT 1 FROM blocks WHERE id = ?", (number,)).fetchone()
            return [Damage("block", key, None, "its pages are missing")] if there else []
        blob = blob_of(row[0])
        counts.blocks += 1
        counts.nbytes += len(blob)
        header = Header.parse(blob)
    except (StoreDamaged, sqlite3.DatabaseError) as error:
        return [*found, Damage("block", key, None, _words(error))]
    counts.pages += header.head.pages
    if header.head.key != key or header.alone:
        return [*found, Damage("block", key, None, f"block {header.name} lies in its place")]
    if head is not None and (head.pages, head.page_bytes) != (header.head.pages, header.head.page_bytes):
        found.append(Damage("head", key, None, "it speaks of other pages"))
    if len(blob) > header.blob_bytes:
        found.append(Damage("block", key, None, f"it has {len(blob)} bytes, and {header.blob_bytes} are its own"))
    found += [Damage("page", key, page, "it does not match its checksum") for page in header.damaged(blob)]
    return found


def _head(
    connection: sqlite3.Connection, number: int, key: bytes, counts: _Counts
) -> tuple[list[Damage], BlockHead | None]:
    try:
        row = connection.execute(
            "SELECT head, scores, hits FROM blocks LEFT JOIN heads USING (id) LEFT JOIN scores USING (id) WHERE id = ?",
            (number,),
        ).fetchone()
        if row is None:
            return [], None
        if row[0] is None or row[1] is None:
            return [Damage("head", key, None, "its head or its scores are missing")], None
        head = head_of(row, key)
        counts.nbytes += len(row[0]) + len(row[1])
        return [], head
    except (StoreDamaged, sqlite3.DatabaseError) as error:
        return [Damage("head", key, None, _words(error))], None


def _record(connection: sqlite3.Connection, key: bytes, counts: _Counts) -> list[Damage]:
    try:
        row = connection.execute("SELECT record FROM records WHERE key = ?", (key,)).fetchone()
        if row is None:
            return []
        counts.records += 1
        counts.nbytes += len(unseal(key, row[0]))
    except (StoreDamaged, sqlite3.DatabaseError) as error:
        return [Damage("record", key, None, _words(error))]
    return []


def _name(key: object) -> bytes:
    """A key that is none, so that it can be told."""
    return key if isinstance(key, bytes) else str(key).encode()


def _words(error: Exception) -> str:
    """What to say of damage; any other error is raised again."""
    if isinstance(error, sqlite3.Error) and not is_damage(error):
        raise error
    return str(error)
