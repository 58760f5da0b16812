"""Blocks and records as rows: what is written to the tables, and how it is checked when it is read."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvpager.errors import StoreDamaged
from kvpager.stored import BlockHead, Scores, StoredBlock
from kvpager.stores.change import SMALL_ROW_BYTES, Change
from kvpager.stores.codec import encode, encode_head
from kvpager.stores.header import Compression, Header
from kvpager.stores.packages import xxh3

__all__ = [
    "COUNTERS",
    "MOST",
    "MOST_HITS",
    "BlockRows",
    "blob_of",
    "block_rows",
    "bump",
    "counter",
    "head_of",
    "id_of",
    "insert_block",
    "insert_record",
    "remove_blocks",
    "remove_record",
    "rescore",
    "seal",
    "set_counter",
    "touch",
    "touch_record",
    "unseal",
]

COUNTERS = ("use", "age", "drops", "tick")
MOST = 2**62
"""What counts things counts no further; what says more was not written by kvpager."""

MOST_HITS = 2**63 - 1

_SUM_BYTES = 8
_ROW_BYTES = 400  # of the small row, its entries in indices, and what SQLite keeps for each of the others
_PARTS = ("heads", "scores", "payloads")


@dataclass(frozen=True)
class BlockRows:
    """A block as it is stored: its head without scores, its scores, its pages with their checksums."""

    head: BlockHead
    packed: bytes
    scores: bytes
    payload: bytes

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in the database, but for what is lost at the ends of pages."""
        return len(self.packed) + len(self.scores) + len(self.payload) + _ROW_BYTES


def block_rows(block: StoredBlock, compression: Compression, itemsize: int) -> BlockRows:
    """A block made ready to be written; raises InputError, see codec.encode."""
    head = block.head
    bare = replace(head, digest_kind="", digest=b"", scores=b"", hits=0)
    return BlockRows(
        head,
        encode_head(replace(head, scores=b"", hits=0)),
        seal(head.key, head.scores),
        encode(StoredBlock(bare, block.payload), compression, itemsize),
    )


def insert_block(change: Change, rows: BlockRows) -> int:
    """Write a block that is not there; returns its id."""
    head, stamp, connection = rows.head, change.stamp, change.connection
    number = connection.execute(
        "INSERT INTO blocks (key, parent, tenant, depth, bytes, payload_bytes, hits, worth, used, seen)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            head.key,
            head.parent,
            head.tenant,
            head.depth,
            rows.nbytes,
            head.pages * head.page_bytes,
            head.hits,
            stamp.worth(head.hits),
            stamp.use,
            stamp.seen,
        ),
    ).lastrowid
    assert number is not None
    for table, data in zip(_PARTS, (rows.packed, rows.scores, rows.payload), strict=True):
        connection.execute(f"INSERT OR REPLACE INTO {table} VALUES (?, ?)", (number, data))
    change.orders(head.key, head.parent)
    return number


def insert_record(change: Change, key: bytes, tenant: bytes, sealed: bytes) -> None:
    """Write a record that is not there, sealed for its key."""
    stamp = change.stamp
    change.connection.execute(
        "INSERT INTO records (key, tenant, bytes, worth, used, seen, record) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (key, tenant, len(sealed) + _ROW_BYTES, stamp.worth(1), stamp.use, stamp.seen, sealed),
    )


def touch_record(change: Change, key: bytes) -> int:
    """Note that a record is used now; returns its bytes, 0 where it is not there."""
    row = change.connection.execute(
        "UPDATE records SET used = ? WHERE key = ? RETURNING CAST(bytes AS INTEGER)", (change.stamp.use, key)
    ).fetchall()
    return max(0, row[0][0]) if row else 0


def remove_record(change: Change, key: bytes) -> None:
    """Delete a record, if it is there."""
    change.connection.execute("DELETE FROM records WHERE key = ?", (key,))


def touch(change: Change, keys: Iterable[bytes]) -> None:
    """Note that blocks are used now; those that are not there are left out."""
    stamp = change.stamp
    change.connection.executemany(
        "UPDATE blocks SET used = ?, seen = ?, worth = max(worth, ?) WHERE key = ?",
        [(stamp.use, stamp.seen, stamp.worth(0), key) for key in keys],
    )


def rescore(change: Change, number: int, news: Scores) -> None:
    """Set the scores of the block with this id and add its hits, if it is there."""
    connection, stamp = change.connection, change.stamp
    change.rewrites("scores", number, len(news.scores))
    change.rewrites("blocks", number, SMALL_ROW_BYTES)
    connection.execute("UPDATE scores SET scores = ? WHERE id = ?", (seal(news.key, news.scores), number))
    if not news.hits:
        return
    row = connection.execute("SELECT hits FROM blocks WHERE id = ?", (number,)).fetchone()
    if row is not None:
        hits = min(MOST_HITS, (row[0] if isinstance(row[0], int) and row[0] > 0 else 0) + news.hits)
        connection.execute(
            "UPDATE blocks SET hits = ?, worth = ?, used = ?, seen = ? WHERE id = ?",
            (hits, stamp.worth(hits), stamp.use, stamp.seen, number),
        )


def id_of(connection: sqlite3.Connection, key: bytes) -> int | None:
    """The id of a block's rows; None where it is not there."""
    row = connection.execute("SELECT id FROM blocks WHERE key = ?", (key,)).fetchone()
    return None if row is None else int(row[0])


def remove_blocks(connection: sqlite3.Connection, ids: Sequence[int]) -> None:
    """Delete blocks by id, with heads, scores and pages."""
    numbers = [(number,) for number in ids]
    for table in ("blocks", *_PARTS):
        connection.executemany(f"DELETE FROM {table} WHERE id = ?", numbers)


def head_of(row: tuple[object, object, object], key: bytes) -> BlockHead:
    """The head of a row of (head, scores, hits); raises StoreDamaged where it is not that of this block."""
    packed, scores, hits = blob_of(row[0]), blob_of(row[1]), row[2]
    if not isinstance(hits, int) or hits < 0:
        raise StoreDamaged(f"the hits of block {key[:6].hex()} are no number that could be")
    header = Header.parse(packed)
    head = header.head
    if header.header_bytes != len(packed):
        raise StoreDamaged(
            f"the head of block {header.name} has {len(packed)} bytes, and {header.header_bytes} are its own"
        )
    if head.key != key:
        raise StoreDamaged(f"the head of block {head.key[:6].hex()} lies where that of {key[:6].hex()} should")
    return head.rescored(unseal(key, scores), hits)


def seal(key: bytes, data: bytes) -> bytes:
    """Data with a checksum that its key goes into as well."""
    return xxh3()(key + data).to_bytes(_SUM_BYTES, "little") + data


def unseal(key: bytes, stored: object) -> bytes:
    """The data; raises StoreDamaged where it was changed, cut off, or sealed for another key."""
    sealed = blob_of(stored)
    data = sealed[_SUM_BYTES:]
    if len(sealed) < _SUM_BYTES or xxh3()(key + data).to_bytes(_SUM_BYTES, "little") != sealed[:_SUM_BYTES]:
        raise StoreDamaged(f"{len(sealed)} bytes stored for {key[:6].hex()} do not match their checksum")
    return data


def blob_of(value: object) -> bytes:
    """What was read, if it is bytes; raises StoreDamaged for NULL, text and numbers."""
    if not isinstance(value, bytes):
        raise StoreDamaged(f"bytes should be stored, and it is {type(value).__name__}")
    return value


def counter(connection: sqlite3.Connection, name: str) -> int:
    """A counter's value; 0 where it is missing, or can't be one."""
    row = connection.execute("SELECT value FROM counters WHERE name = ?", (name,)).fetchone()
    return row[0] if row is not None and isinstance(row[0], int) and 0 <= row[0] <= MOST else 0


def set_counter(connection: sqlite3.Connection, name: str, value: int) -> None:
    """Set a counter, which is made where it is missing."""
    connection.execute("INSERT OR REPLACE INTO counters VALUES (?, ?)", (name, value))


def bump(connection: sqlite3.Connection, name: str, by: int = 1) -> int:
    """Add to a counter; returns its value."""
    value = counter(connection, name) + by
    set_counter(connection, name, value)
    return value
