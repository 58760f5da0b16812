"""What others may have written into the rows of a store: told apart from what kvpager writes, and put right."""

from __future__ import annotations

import sqlite3

from kvpager.stored import KEY_BYTES, TENANT_BYTES
from kvpager.stores.rows import COUNTERS, MOST, MOST_HITS, counter, remove_blocks, set_counter

__all__ = ["SOUND_BLOCK", "SOUND_RECORD", "mend", "numbers_spent", "put_right", "recount"]

MOST_BYTES = 2**40  # of a block or a record


def _blob(column: str, *sizes: int) -> str:
    return f"typeof({column}) = 'blob' AND length({column}) IN ({', '.join(map(str, sizes))})"


def _number(column: str, most: int) -> str:
    return f"typeof({column}) = 'integer' AND {column} BETWEEN 0 AND {most}"


_EITHER = (_blob("key", KEY_BYTES), _blob("tenant", TENANT_BYTES), _number("bytes", MOST_BYTES), _number("id", MOST))

SOUND_BLOCK = " AND ".join(
    [*_EITHER, _blob("parent", 0, KEY_BYTES), _number("payload_bytes", MOST_BYTES), _number("hits", MOST_HITS)]
)
"""SQL: whether a row of `blocks` may be kvpager's. What orders its use is left out: that is judged when it is read."""

SOUND_RECORD = " AND ".join([*_EITHER, "typeof(record) = 'blob'"])
"""SQL: whether a row of `records` may be."""

_SUMS = f"""SELECT tenant, total(blocks), total(records), total(bytes), total(payload) FROM (
    SELECT tenant, 1 AS blocks, 0 AS records, bytes, payload_bytes AS payload FROM blocks WHERE {SOUND_BLOCK}
    UNION ALL SELECT tenant, 0, 1, bytes, 0 FROM records WHERE {SOUND_RECORD}) GROUP BY tenant"""
_NEXT = "FROM sqlite_sequence WHERE typeof(seq) <> 'integer' OR seq NOT BETWEEN 0 AND ?"


def mend(connection: sqlite3.Connection) -> int:
    """Forget all rows that can't be kvpager's, and put counters and sums right; returns how many rows there were.

    One transaction, and none where there is nothing to do. The small rows are read, and no page.
    """
    if not _unsound(connection):
        return 0
    connection.execute("BEGIN IMMEDIATE")
    try:
        count = put_right(connection)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return count


def put_right(connection: sqlite3.Connection) -> int:
    """The same, inside a transaction."""
    blocks = [number for (number,) in connection.execute(f"SELECT id FROM blocks WHERE NOT ({SOUND_BLOCK})")]
    remove_blocks(connection, blocks)
    records = connection.execute(f"DELETE FROM records WHERE NOT ({SOUND_RECORD})").rowcount
    for name in COUNTERS:
        set_counter(connection, name, counter(connection, name))
    if blocks:
        set_counter(connection, "drops", counter(connection, "drops") + 1)
    for name in connection.execute(f"SELECT name {_NEXT}", (MOST,)).fetchall():
        last = f"(SELECT coalesce(max(id), 0) FROM {'blocks' if name == ('blocks',) else 'records'})"
        connection.execute(f"UPDATE sqlite_sequence SET seq = {last} WHERE name = ?", name)
    recount(connection)
    return len(blocks) + records


def numbers_spent(connection: sqlite3.Connection) -> bool:
    """Whether there are no more ids, which SQLite tells as it tells a full disk."""
    most = (MOST,)
    return (
        connection.execute(f"SELECT 1 {_NEXT}", most).fetchone() is not None
        or connection.execute("SELECT 1 FROM blocks WHERE id > ?", most).fetchone() is not None
        or connection.execute("SELECT 1 FROM records WHERE id > ?", most).fetchone() is not None
    )


def recount(connection: sqlite3.Connection) -> None:
    """Make the sums of all tenants those of their rows."""
    sums = _sums(connection)
    connection.execute("DELETE FROM tenants")
    connection.executemany(
        "INSERT INTO tenants (tenant, blocks, records, bytes, payload_bytes) VALUES (?, ?, ?, ?, ?)", sums
    )


def _unsound(connection: sqlite3.Connection) -> bool:
    """Whether there is anything to put right."""
    held = connection.execute("SELECT tenant, blocks, records, bytes, payload_bytes FROM tenants").fetchall()
    counters = dict(connection.execute("SELECT name, value FROM counters"))
    return (
        any(counters.get(name) != counter(connection, name) for name in COUNTERS)
        or numbers_spent(connection)
        or set(held) != set(_sums(connection))
        or connection.execute(f"SELECT 1 FROM blocks WHERE NOT ({SOUND_BLOCK})").fetchone() is not None
        or connection.execute(f"SELECT 1 FROM records WHERE NOT ({SOUND_RECORD})").fetchone() is not None
    )


def _sums(connection: sqlite3.Connection) -> list[tuple[bytes, int, int, int, int]]:
    return [(tenant, *map(int, sums)) for tenant, *sums in connection.execute(_SUMS)]
