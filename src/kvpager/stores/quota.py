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
from collections import Counter, deque
from typing import Literal, NamedTuple

from kvpager.stored import TENANT_BYTES
from kvpager.stores.change import SMALL_ROW_BYTES, Change
from kvpager.stores.places import Places
from kvpager.stores.rows import counter, remove_blocks, set_counter
from kvpager.stores.schema import PAGE_BYTES
from kvpager.stores.sound import recount

__all__ = ["MARGIN_BYTES", "NOBODY", "Quota", "Room", "Shares"]

NOBODY = bytes(TENANT_BYTES)
SMALL_BYTES = 16 * PAGE_BYTES  # what a transaction writes beside its blocks, and for those that make way
MARGIN_BYTES = 2**16 + SMALL_BYTES  # and the index of the log
LEAST_LOG, MOST_LOG = 2**18, 2**23
PLANNED = 64  # a plan is good for this part of the limit
MOST_WORTH = 64  # a block is worth no more than this beyond the age

Room = Literal["there", "later", "none"]
"""Whether there is room: "later" when this transaction is done, which has made way for as much as it should."""


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
    height: int  # how many follow it, one after the other
    id: int
    own_used: object  # as its row says: if that has changed, it was used since
    is_record: bool
    loose: bool = False  # whether it may go though something follows it


class Quota:
    """Bytes on disk, all included, and those of each tenant.

    The database may fill what the limit leaves beside the log and the reserve. The log goes beyond its share by at most
    one transaction: the blocks of a batch, and what it takes to make way for them. That is bounded as the log is; where
    it would be more, there are several transactions. Bytes of a tenant are those of its rows; what is nobody's in
    particular has no limit of its own.
    """

    def __init__(self, places: Places, limit_bytes: int, tenant_limit_bytes: int | None, shares: Shares) -> None:
        self.limit_bytes = limit_bytes
        self.budget = limit_bytes - sum(shares) - MARGIN_BYTES - max(0, shares.log - SMALL_BYTES)
        self._most_bytes = max(SMALL_BYTES, shares.log)
        self._places = places
        self._tenant_limit = tenant_limit_bytes
        self._plan: list[_Victim] = []

    def forget(self) -> None:
        """Forget what was planned: a transaction was undone, or the database is another one."""
        self._plan.clear()

    def over(self, nbytes: int = 0) -> bool:
        """Whether more is on disk than the limit, or would be with so many bytes more."""
        return self._places.nbytes + nbytes > self.limit_bytes

    def fit(self, change: Change, tenant: bytes, nbytes: int, *, alone: bool = False, instead: int = 0) -> Room:
        """Whether there is room for so many bytes of a tenant, which others make way for unless it is `alone`.

        instead  bytes of its own that go when these come
        """
        needed = nbytes + nbytes // 64 + PAGE_BYTES
        excess = self._excess(change, tenant, nbytes, instead)
        if needed > self.budget or excess > nbytes:
            return "none"
        if excess > 0:
            room = "none" if alone else self._free_of(change, tenant, excess)
            if room != "there":
                return room
        while used_bytes(change.connection) - instead + needed > self.budget:
            if alone:
                return "none"
            if self.heavy(change):
                return "later"
            if not self._one_less(change, needed):
                return "none"
        return "there"

    def _excess(self, change: Change, tenant: bytes, nbytes: int, instead: int) -> int:
        """Bytes by which a tenant would be over its limit; more than `nbytes` where nothing of its own can make way."""
        if self._tenant_limit is None or tenant == NOBODY:
            return 0
        if nbytes > self._tenant_limit:
            return nbytes + 1
        held = tenant_bytes(change.connection, tenant)
        if not 0 <= held <= 2 * used_bytes(change.connection):
            recount(change.connection)
            held = tenant_bytes(change.connection, tenant)
        return held - instead + nbytes - self._tenant_limit

    def shrink(self, change: Change, most: int, nbytes: int | None = None) -> bool:
        """Let at most so many go; whether all will then be within the limit (or so many bytes) on disk."""
        goal = self.budget if nbytes is None else min(nbytes - self.limit_bytes, 0) + self.budget
        for _ in range(most):
            if used_bytes(change.connection) <= goal or self.heavy(change) or not self._one_less(change, 0):
                break
        return used_bytes(change.connection) <= goal

    def heavy(self, change: Change) -> bool:
        """Whether a transaction writes as much to the log as one should, beside the blocks that it adds."""
        return change.log_bytes >= self._most_bytes

    def _one_less(self, change: Change, needed: int) -> bool:
        for fresh in (False, True):
            if fresh:
                self._plan = _order(change, needed + self.limit_bytes // PLANNED)
            while self._plan:
                if _let_go(change, self._plan.pop()):
                    return True
        return False

    def _free_of(self, change: Change, tenant: bytes, nbytes: int) -> Room:
        goal = tenant_bytes(change.connection, tenant) - nbytes
        plan = _order(change, nbytes, tenant)
        while plan:
            if self.heavy(change):
                return "later"
            _let_go(change, plan.pop())
            if tenant_bytes(change.connection, tenant) <= goal:
                return "there"
        return "none"


def used_bytes(connection: sqlite3.Connection) -> int:
    """Bytes of the database's pages that hold something."""
    pages: int = connection.execute("PRAGMA page_count").fetchone()[0]
    free: int = connection.execute("PRAGMA freelist_count").fetchone()[0]
    return (pages - free) * PAGE_BYTES


def tenant_bytes(connection: sqlite3.Connection, tenant: bytes) -> int:
    """Bytes of a tenant's rows."""
    row = connection.execute("SELECT CAST(bytes AS INTEGER) FROM tenants WHERE tenant = ?", (tenant,)).fetchone()
    return 0 if row is None else int(row[0])


def _order(change: Change, nbytes: int, tenant: bytes | None = None) -> list[_Victim]:
    """The first to make way, of at least so many bytes in all; the very first one last.

    What rows say that was not written by kvpager counts as the least, and keeps nobody from making way.
    """
    where, values = ("", ()) if tenant is None else (" WHERE tenant = ?", (tenant,))
    found: list[tuple[_Victim, int]] = []
    rows = {
        key: (number, parent, _valued(change, worth, used), used, _size(size))
        for number, key, parent, worth, used, size in change.connection.execute(
            f"SELECT id, key, parent, worth, used, bytes FROM blocks{where}", values
        )
    }
    after = Counter(parent for _, parent, *_ in rows.values())
    followed: dict[object, tuple[int, int, int]] = {}  # what follows a block asks of it
    leaves = deque(key for key in rows if not after[key])
    while leaves:
        key = leaves.popleft()
        number, parent, own, used, size = rows.pop(key)
        worth, last, height = followed.get(key, (-1, -1, 0))
        value = max(own, (worth, last))
        found.append((_Victim(*value, height, number, used, False), size))
        worth, last, higher = followed.get(parent, (-1, -1, 0))
        followed[parent] = (*max(value, (worth, last)), max(height + 1, higher))
        after[parent] -= 1
        if not after[parent] and parent in rows:
            leaves.append(parent)
    # rows of which each follows another one, in a circle, can be nobody's
    found += [(_Victim(0, 0, 0, number, used, False, True), size) for number, _, _, used, size in rows.values()]
    for number, worth, used, size in change.connection.execute(
        f"SELECT id, worth, used, bytes FROM records{where}", values
    ):
        found.append((_Victim(*_valued(change, worth, used), 0, number, used, True), _size(size)))
    found = sorted((one for one in found if one[0].used < change.stamp.use), key=lambda one: one[0][:4])
    total = count = 0
    while count < len(found) and total < nbytes:
        total += found[count][1]
        count += 1
    return [victim for victim, _ in reversed(found[:count])]


def _valued(change: Change, worth: object, used: object) -> tuple[int, int]:
    """What a row says of its worth and last use; 0 for what this store can't have written by now."""
    stamp = change.stamp
    return (
        worth if isinstance(worth, int) and 0 <= worth <= stamp.age + MOST_WORTH else 0,
        used if isinstance(used, int) and 0 <= used <= stamp.use else 0,
    )


def _size(nbytes: object) -> int:
    return nbytes if isinstance(nbytes, int) and nbytes > 0 else 0


def _let_go(change: Change, victim: _Victim) -> bool:
    """Delete it, unless it was used since, or something follows it now."""
    connection = change.connection
    if victim.is_record:
        rows = connection.execute(
            "DELETE FROM records WHERE id = ? AND used IS ? RETURNING key, NULL, bytes, 0",
            (victim.id, victim.own_used),
        ).fetchall()
    else:
        last = "" if victim.loose else " AND NOT EXISTS (SELECT 1 FROM blocks AS next WHERE next.parent = blocks.key)"
        rows = connection.execute(
            f"DELETE FROM blocks WHERE id = ? AND used IS ?{last} RETURNING key, parent, bytes, payload_bytes",
            (victim.id, victim.own_used),
        ).fetchall()
        remove_blocks(connection, [victim.id] if rows else [])
        change.gone += [key for key, *_ in rows]
    for key, parent, nbytes, payload in rows:
        change.orders(key, parent)
        change.rewrites("blocks", victim.id, SMALL_ROW_BYTES)
        change.rewrites("payloads", victim.id, _size(payload))
        change.rewrites("heads", victim.id, _size(nbytes) - _size(payload))
        change.rewrites("scores", victim.id, _size(nbytes) - _size(payload))
        set_counter(connection, "age", max(counter(connection, "age"), victim.worth))
    change.dropped += len(rows)
    return bool(rows)
