"""A look at every byte of a store: which pages, blocks and records do not match their checksums."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from kvpager.errors import StoreDamaged
from kvpager.stored import BlockHead
from kvpager.stores.database import Database
from kvpager.stores.faults import is_damage
from kvpager.stores.header import Header
from kvpager.stores.rows import head_of, unseal

__all__ = ["Damage", "Progress", "Report", "verify"]

Progress = Callable[[int, int], None]
"""Called with how much is done, and how much there is to do."""

STEP = 16  # blocks that are read in one transaction: a longer one would keep the log from being cut off
MOST_LINES = 100  # of what SQLite says about its structure


@dataclass(frozen=True)
class Damage:
    """One thing that is damaged.

    kind     "page"; "block" where its pages can't be told apart; "head" (what is known of a block but its pages);
             "record"; "file" for the database's structure
    key      of the block or record; empty for the file
    page     which of the block's pages, for kind "page"
    message  what does not match
    """

    kind: Literal["page", "block", "head", "record", "file"]
    key: bytes
    page: int | None
    message: str


@dataclass(frozen=True)
class Report:
    """What was looked at, and what of it is damaged. `nbytes` is of heads, blocks and records, as stored."""

    blocks: int
    pages: int
    records: int
    nbytes: int
    damaged: tuple[Damage, ...]

    @property
    def blocks_damaged(self) -> list[bytes]:
        """Keys of all blocks that are damaged anywhere, each once."""
        return list(dict.fromkeys(one.key for one in self.damaged if one.kind in ("page", "block", "head")))

    @property
    def records_damaged(self) -> list[bytes]:
        """Keys of all records that are damaged."""
        return [one.key for one in self.damaged if one.kind == "record"]


def verify(database: Database, progress: Progress = lambda done, total: None) -> Report:
    """Read and check all blocks and records, and the structure of the database; changes nothing.

    What comes and goes meanwhile may be missed. `progress` counts blocks and records. Raises StoreError where the
    database can't be read at all.
    """
    damaged = list(_structure(database))
    with database.reading() as connection:
        blocks = connection.execute("SELECT id, key FROM blocks ORDER BY id").fetchall()
        records: list[bytes] = [key for (key,) in connection.execute("SELECT key FROM records")]
    counts = _Counts()
    total = len(blocks) + len(records)
    for begin in range(0, len(blocks), STEP):
        with database.reading() as connection:
            for number, key in blocks[begin : begin + STEP]:
                damaged += _block(connection, number, key, counts)
        progress(min(begin + STEP, len(blocks)), total)
    for done, key in enumerate(records, len(blocks) + 1):
        with database.reading() as connection:
            damaged += _record(connection, key, counts)
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
        blob: bytes = row[0]
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
        counts.nbytes += len(row[0]) + len(row[1])
        return [], head_of(row, key)
    except (StoreDamaged, sqlite3.DatabaseError) as error:
        return [Damage("head", key, None, _words(error))], None


def _record(connection: sqlite3.Connection, key: bytes, counts: _Counts) -> list[Damage]:
    try:
        row = connection.execute("SELECT record FROM records WHERE key = ?", (key,)).fetchone()
        if row is None:
            return []
        counts.records += 1
        counts.nbytes += len(row[0])
        unseal(key, row[0])
    except (StoreDamaged, sqlite3.DatabaseError) as error:
        return [Damage("record", key, None, _words(error))]
    return []


def _words(error: Exception) -> str:
    """What to say of damage; any other error is raised again."""
    if isinstance(error, sqlite3.Error) and not is_damage(error):
        raise error
    return str(error)
