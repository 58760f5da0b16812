"""Taking blocks and records out of a store: by key, by tenant, by age, or until it is small enough."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from kvpager.stores.change import Change
from kvpager.stores.changes import Changes
from kvpager.stores.faults import is_damage
from kvpager.stores.rows import id_of, remove_blocks

__all__ = ["drop_blocks", "erase", "prune_older", "prune_to", "purge"]

DOOMED = "SELECT id, coalesce(length(payload), 0) FROM doomed LEFT JOIN payloads USING (id) LIMIT ?"


def drop_blocks(changes: Changes, keys: Sequence[bytes]) -> None:
    """Forget blocks by key; where the database is malformed in the pages of one, only its small row goes.

    Raises StoreError.
    """

    def drop(change: Change) -> None:
        for key in keys:
            number = id_of(change.connection, key)
            if number is not None and not _remove_whole(change, number):
                change.connection.execute("DELETE FROM blocks WHERE id = ?", (number,))
        change.gone += keys

    changes.remove(drop)


def drop_rows(changes: Changes, blocks: Sequence[int], records: Sequence[int]) -> None:
    """The same for blocks and records by the ids of their rows. Raises StoreError."""

    def drop(change: Change) -> None:
        for number in blocks:
            change.gone += [
                key for (key,) in change.connection.execute("SELECT key FROM blocks WHERE id = ?", (number,))
            ]
            if not _remove_whole(change, number):
                change.connection.execute("DELETE FROM blocks WHERE id = ?", (number,))
        change.connection.executemany("DELETE FROM records WHERE id = ?", [(number,) for number in records])

    changes.remove(drop)


def erase(changes: Changes, tenant: bytes) -> int:
    """Forget all blocks and records of a tenant, and overwrite them; returns how many there were. Raises StoreError."""

    def forget(change: Change) -> int:
        connection, whose = change.connection, (tenant,)
        connection.execute("INSERT OR IGNORE INTO doomed SELECT id FROM blocks WHERE tenant = ?", whose)
        change.gone += [key for (key,) in connection.execute("SELECT key FROM blocks WHERE tenant = ?", whose)]
        connection.execute("PRAGMA secure_delete = ON").fetchall()  # records are overwritten right here
        try:
            connection.execute("DELETE FROM blocks WHERE tenant = ?", whose)
            records: int = connection.execute("DELETE FROM records WHERE tenant = ?", whose).rowcount
        finally:
            connection.execute("PRAGMA secure_delete = FAST").fetchall()
        return len(change.gone) + records

    count = changes.remove(forget)
    purge(changes)
    return count


def purge(changes: Changes) -> None:
    """Overwrite what is left of blocks that were erased, and give the room back to the disk. Raises StoreError."""

    def some(change: Change) -> int:
        connection = change.connection
        ids, size = [], 0
        for number, length in connection.execute(DOOMED, (changes.step,)):
            ids.append(number)
            size += length
            if size > changes.log_bytes // 2:  # what is overwritten goes through the log
                break
        connection.execute("PRAGMA secure_delete = ON").fetchall()
        try:
            for number in ids:
                _remove_whole(change, number)
        finally:
            connection.execute("PRAGMA secure_delete = FAST").fetchall()
        connection.executemany("DELETE FROM doomed WHERE id = ?", [(number,) for number in ids])
        return len(ids)

    while changes.remove(some):
        changes.checkpoint()
    changes.give_back()


def prune_older(changes: Changes, before: int, tenant: bytes | None = None) -> int:
    """Forget what was last used before that time, in seconds since 1970; returns how many. Raises StoreError.

    A block stays while one after it stays.
    """
    whose, values = ("", (before,)) if tenant is None else (" AND tenant = ?", (before, tenant))

    def some(change: Change) -> int:
        connection = change.connection
        records: int = connection.execute(f"DELETE FROM records WHERE seen < ?{whose}", values).rowcount
        rows = connection.execute(
            f"SELECT id, key FROM blocks WHERE seen < ?{whose}"
            " AND NOT EXISTS (SELECT 1 FROM blocks AS next WHERE next.parent = blocks.key) LIMIT ?",
            (*values, changes.step),
        ).fetchall()
        remove_blocks(connection, [number for number, _ in rows])
        change.gone += [key for _, key in rows]
        return records + len(rows)

    total = 0
    while count := changes.remove(some):
        total += count
    changes.give_back()
    return total


def prune_to(changes: Changes, nbytes: int) -> int:
    """Forget what is worth least until all is within so many bytes on disk; returns how many. Raises StoreError."""

    def some(change: Change) -> tuple[bool, int]:
        done = changes.quota.shrink(change, changes.step, nbytes)
        return done or not change.dropped, change.dropped

    changes.fit()
    total, done = 0, False
    while not done:
        done, count = changes.remove(some)
        total += count
    changes.give_back()
    return total


def _remove_whole(change: Change, number: int) -> bool:
    """Delete a block with all its parts; False, and nothing is done, where the database is malformed there."""
    connection = change.connection
    connection.execute("SAVEPOINT whole")
    try:
        remove_blocks(connection, [number])
    except sqlite3.DatabaseError as error:
        if not is_damage(error):
            raise
        connection.execute("ROLLBACK TO whole")
        return False
    finally:
        if connection.in_transaction:
            connection.execute("RELEASE whole")
    return True
