"""The tables of the SQLite store, and how a database of an earlier version becomes one of this version.

Small rows (`blocks`, `records` but for the record itself) are what finding and choosing victims read. Heads and scores
are apart from the pages, so that a restart selects without reading a page, and scores apart from heads, so that news
about a block write one kilobyte and not its digest too.
"""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Sequence

from kvpager.errors import StoreForeign

__all__ = ["APPLICATION_ID", "MIGRATIONS", "PAGE_BYTES", "VERSION", "is_ours", "migrate"]

APPLICATION_ID = int.from_bytes(b"KVPG", "big")
PAGE_BYTES = 2**15
"""A block of 90 pages of 4 KiB costs 0.8 % more than its bytes; 8 KiB pages are slower, 64 KiB ones cost 7 %."""


def _count(table: str, event: str, row: str, blocks: int, records: int) -> str:
    """A trigger that keeps the sums of a tenant, whatever adds a row or takes it away."""
    sign = blocks + records
    payload = f"{sign} * {row}.payload_bytes" if blocks else "0"
    return f"""CREATE TRIGGER {table}_{event.lower()} AFTER {event} ON {table} BEGIN
        INSERT INTO tenants VALUES ({row}.tenant, {blocks}, {records}, {sign} * {row}.bytes, {payload})
        ON CONFLICT (tenant) DO UPDATE SET blocks = blocks + excluded.blocks, records = records + excluded.records,
            bytes = bytes + excluded.bytes, payload_bytes = payload_bytes + excluded.payload_bytes;
        DELETE FROM tenants WHERE tenant = {row}.tenant AND blocks = 0 AND records = 0;
    END"""


_FIRST = (
    # use: two for each transaction, the first for what was found before it; orders uses. age: see quota.
    # drops: counts transactions that took blocks away.
    "CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
    "INSERT INTO counters VALUES ('use', 0), ('age', 0), ('drops', 0), ('tick', 0)",
    """CREATE TABLE tenants (
        tenant BLOB PRIMARY KEY,
        blocks INTEGER NOT NULL,
        records INTEGER NOT NULL,
        bytes INTEGER NOT NULL,
        payload_bytes INTEGER NOT NULL
    ) WITHOUT ROWID""",
    # seen: seconds since 1970 of the last use, for people who prune; nothing else reads it
    """CREATE TABLE blocks (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        key BLOB NOT NULL UNIQUE,
        parent BLOB NOT NULL,
        tenant BLOB NOT NULL,
        depth INTEGER NOT NULL,
        bytes INTEGER NOT NULL,
        payload_bytes INTEGER NOT NULL,
        hits INTEGER NOT NULL,
        worth INTEGER NOT NULL,
        used INTEGER NOT NULL,
        seen INTEGER NOT NULL
    )""",
    "CREATE INDEX blocks_parent ON blocks (parent)",
    "CREATE TABLE heads (id INTEGER PRIMARY KEY, head BLOB NOT NULL)",
    "CREATE TABLE scores (id INTEGER PRIMARY KEY, scores BLOB NOT NULL)",
    "CREATE TABLE payloads (id INTEGER PRIMARY KEY, payload BLOB NOT NULL)",
    """CREATE TABLE records (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        key BLOB NOT NULL UNIQUE,
        tenant BLOB NOT NULL,
        bytes INTEGER NOT NULL,
        worth INTEGER NOT NULL,
        used INTEGER NOT NULL,
        seen INTEGER NOT NULL,
        record BLOB NOT NULL
    )""",
    # ids of blocks that were erased, whose heads, scores and payloads are still to be overwritten
    "CREATE TABLE doomed (id INTEGER PRIMARY KEY)",
    _count("blocks", "INSERT", "new", 1, 0),
    _count("blocks", "DELETE", "old", -1, 0),
    _count("records", "INSERT", "new", 0, 1),
    _count("records", "DELETE", "old", 0, -1),
)

MIGRATIONS: tuple[tuple[str, ...], ...] = (_FIRST,)
"""Statements that lead from user_version n to n + 1; from 0 they make the tables."""

VERSION = len(MIGRATIONS)


def migrate(connection: sqlite3.Connection, migrations: Sequence[Sequence[str]] = MIGRATIONS) -> int:
    """Bring a database that is no newer to the last version, in one transaction; returns the version it had.

    An empty one gets its application_id as well. Nothing is done where another process was quicker. Raises StoreForeign
    where that was another application.
    """
    connection.execute("BEGIN")
    try:
        # Begins to write. By itself it would leave an empty database of nobody's, for others to see, in an empty file.
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL").fetchall()
        before: int = connection.execute("PRAGMA user_version").fetchone()[0]
        application: int = connection.execute("PRAGMA application_id").fetchone()[0]
        if application != APPLICATION_ID and (application or _shape(connection)):
            raise StoreForeign(f"another application has made a database here (id {application}), which stays as it is")
        if before < len(migrations):
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            for statements in migrations[before:]:
                for statement in statements:
                    connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {len(migrations)}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return before


def is_ours(connection: sqlite3.Connection) -> bool:
    """Whether a database has this version's tables, indices and triggers, each as it is made here.

    What others have added is no matter, but for triggers, which could do anything.
    """
    if connection.execute("PRAGMA user_version").fetchone()[0] != VERSION:
        return False
    there, ours = _shape(connection), _ours()
    return ours <= there and not any(kind == "trigger" for kind, *_ in there - ours)


@functools.cache
def _ours() -> frozenset[tuple[str, ...]]:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    try:
        migrate(connection)
        return _shape(connection)
    finally:
        connection.close()


def _shape(connection: sqlite3.Connection) -> frozenset[tuple[str, ...]]:
    """What there is, and how it was made; without what SQLite makes for itself."""
    return frozenset(
        connection.execute(
            "SELECT type, name, tbl_name, sql FROM sqlite_schema WHERE substr(name, 1, 7) <> 'sqlite_'"
        ).fetchall()
    )
