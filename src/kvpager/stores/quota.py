"""Who makes way when a store is full.

A block is worth `age + 1 + bits of its hits` when it is used. The age is the worth of the last one that made way, so
what was used often and is used no more falls behind in time: LFU with dynamic aging (Arlitt et al., 2000), with the
logarithm of the hits, so that a thousand of them outlast ten times the store's content and not a thousand times. Among
equals the least recently used goes first, by a counter in the database and not by a clock.

A block whose parent is gone can't be found. So a block counts as no less, and as used no earlier, than any after it,
and goes only when none is after it; one that comes alone, without the one before it, makes nobody go. What the running
transaction uses stays.
"""

from __future__ import annotations

import sqlite3
from typing import NamedTuple

from kvpager.stored import TENANT_BYTES
from kvpager.stores.change import Change
from kvpager.stores.places import Places
from kvpager.stores.rows import remove_blocks
from kvpager.stores.schema import PAGE_BYTES

__all__ = ["MARGIN_BYTES", "NOBODY", "Quota", "Shares"]

NOBODY = bytes(TENANT_BYTES)
MARGIN_BYTES = 2**16 + 16 * PAGE_BYTES  # the index of the log, and what a transaction writes beside its blocks
LEAST_LOG, MOST_LOG = 2**18, 2**23
PLANNED = 64  # a plan is good for this part of the limit


class Shares(NamedTuple):
    """What of a store's limit is for the log and for the reserve (bytes); the rest is the database's.

    The log grows to its share before it is moved to the database, and by one transaction beyond it (a batch of 8 MiB).
    The reserve holds both, so that the move never wants for room; on a small disk less of both has to do.
    """

    log: int
    reserve: int

    @classmethod
    def of(cls, limit_bytes: int, disk_bytes: int) -> Shares:
        """For a store of that limit on a disk of that size."""
        most = min(limit_bytes, disk_bytes)
        return cls(
            log=max(LEAST_LOG, min(MOST_LOG, most // 16)),
            reserve=max(2 * LEAST_LOG, min(MOST_LOG + 12 * 2**20, most // 8)),
        )


class _Victim(NamedTuple):
    """One that may make way, in the order of the first three."""

    worth: int
    used: int
    height: int  # less for deeper blocks
    id: int
    own_used: int  # as its row says: if that has changed, it was used since
    is_record: bool


class Quota:
    """Bytes on disk, all included, and those of each tenant.

    The database may fill what the limit leaves beside the log and the reserve. The log goes beyond its share by at most
    one transaction. Bytes of a tenant are those of its rows; what is nobody's in particular has no limit of its own.
    """

    def __init__(self, places: Places, limit_bytes: int, tenant_limit_bytes: int | None, shares: Shares) -> None:
        self.limit_bytes = limit_bytes
        self.budget = limit_bytes - sum(shares) - MARGIN_BYTES
        self._places = places
        self._tenant_limit = tenant_limit_bytes
        self._plan: list[_Victim] = []

    def forget(self) -> None:
        """Forget what was planned: a transaction was undone, or the database is another one."""
        self._plan.clear()

    def over(self, nbytes: int = 0) -> bool:
        """Whether more is on disk than the limit, or would be with so many bytes more."""
        return self._places.nbytes + nbytes > self.limit_bytes

    def fit(self, change: Change, tenant: bytes, nbytes: int, alone: bool = False) -> bool:
        """Whether there is room for so many bytes of a tenant, which others make way for unless it is `alone`."""
        needed = nbytes + nbytes // 64 + PAGE_BYTES
        excess = self._excess(change, tenant, nbytes)
        if needed > self.budget or excess > nbytes:
            return False
        if excess > 0 and (alone or not self._free_of(change, tenant, excess)):
            return False
        while used_bytes(change.connection) + needed > self.budget:
            if alone or not self._one_less(change, needed):
                return False
        return True

    def _excess(self, change: Change, tenant: bytes, nbytes: int) -> int:
        """Bytes by which a tenant would be over its limit; more than `nbytes` where nothing of its own can make way."""
        if self._tenant_limit is None or tenant == NOBODY:
            return 0
        if nbytes > self._tenant_limit:
            return nbytes + 1
        return tenant_bytes(change.connection, tenant) + nbytes - self._tenant_limit

    def shrink(self, change: Change, most: int, nbytes: int | None = None) -> bool:
        """Let at most so many go; whether all will then be within the limit (or so many bytes) on disk."""
        goal = self.budget if nbytes is None else min(nbytes - self.limit_bytes, 0) + self.budget
        for _ in range(most):
            if used_bytes(change.connection) <= goal or not self._one_less(change, 0):
                break
        return used_bytes(change.connection) <= goal

    def _one_less(self, change: Change, needed: int) -> bool:
        for fresh in (False, True):
            if fresh:
                self._plan = _order(change, needed + self.limit_bytes // PLANNED)
            while self._plan:
                if _let_go(change, self._plan.pop()):
                    return True
        return False

    def _free_of(self, change: Change, tenant: bytes, nbytes: int) -> bool:
        goal = tenant_bytes(change.connection, tenant) - nbytes
        plan = _order(change, nbytes, tenant)
        while plan:
            _let_go(change, plan.pop())
            if tenant_bytes(change.connection, tenant) <= goal:
                return True
        return False


def used_bytes(connection: sqlite3.Connection) -> int:
    """Bytes of the database's pages that hold something."""
    pages: int = connection.execute("PRAGMA page_count").fetchone()[0]
    free: int = connection.execute("PRAGMA freelist_count").fetchone()[0]
    return (pages - free) * PAGE_BYTES


def tenant_bytes(connection: sqlite3.Connection, tenant: bytes) -> int:
    """Bytes of a tenant's rows."""
    row = connection.execute("SELECT bytes FROM tenants WHERE tenant = ?", (tenant,)).fetchone()
    return 0 if row is None else int(row[0])


def _order(change: Change, nbytes: int, tenant: bytes | None = None) -> list[_Victim]:
    """The first to make way, of at least so many bytes in all; the very first one last."""
    where, values = ("", ()) if tenant is None else (" WHERE tenant = ?", (tenant,))
    blocks = change.connection.execute(
        f"SELECT id, key, parent, depth, worth, used, bytes FROM blocks{where} ORDER BY depth DESC", values
    )
    least = (-1, -1)
    followed: dict[bytes, tuple[int, int]] = {}
    found: list[tuple[_Victim, int]] = []
    for number, key, parent, depth, worth, used, size in blocks:
        value = max((worth, used), followed.get(key, least))
        if parent:
            followed[parent] = max(value, followed.get(parent, least))
        found.append((_Victim(*value, -depth, number, used, False), size))
    for number, worth, used, size in change.connection.execute(
        f"SELECT id, worth, used, bytes FROM records{where}", values
    ):
        found.append((_Victim(worth, used, 0, number, used, True), size))
    found = sorted(one for one in found if one[0].used < change.stamp.use)
    total = count = 0
    while count < len(found) and total < nbytes:
        total += found[count][1]
        count += 1
    return [victim for victim, _ in reversed(found[:count])]


def _let_go(change: Change, victim: _Victim) -> bool:
    """Delete it, unless it was used since, or something follows it now."""
    if victim.is_record:
        rows = change.connection.execute(
            "DELETE FROM records WHERE id = ? AND used = ? RETURNING key", (victim.id, victim.own_used)
        ).fetchall()
    else:
        rows = change.connection.execute(
            "DELETE FROM blocks WHERE id = ? AND used = ?"
            " AND NOT EXISTS (SELECT 1 FROM blocks AS next WHERE next.parent = blocks.key) RETURNING key",
            (victim.id, victim.own_used),
        ).fetchall()
        remove_blocks(change.connection, [victim.id] if rows else [])
        change.gone += [key for (key,) in rows]
    if rows:
        change.connection.execute("UPDATE counters SET value = max(value, ?) WHERE name = 'age'", (victim.worth,))
    change.dropped += len(rows)
    return bool(rows)
