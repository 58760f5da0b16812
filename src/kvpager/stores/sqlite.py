"""Blocks and records in one SQLite file: durable, bounded, shared by processes, and checked whenever it is read."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Literal, get_args

from kvpager.errors import ConfigError, InputError, StoreError, StoreTooLarge, StoreUnavailable
from kvpager.ports import Bytes
from kvpager.stored import BlockHead, Scores, StoredBlock
from kvpager.stores.change import Change
from kvpager.stores.changes import Changes
from kvpager.stores.claims import Claims
from kvpager.stores.database import Database
from kvpager.stores.header import COMPRESSIONS, Compression
from kvpager.stores.index import Index
from kvpager.stores.lookup import Lookup
from kvpager.stores.moving import Moved, export_to, import_from
from kvpager.stores.places import Places
from kvpager.stores.quota import Quota, Room, Shares
from kvpager.stores.removing import drop_blocks, drop_rows, erase, prune_older, prune_to, purge
from kvpager.stores.reserve import Reserve
from kvpager.stores.rows import (
    BlockRows,
    block_rows,
    counter,
    id_of,
    insert_block,
    insert_record,
    remove_record,
    rescore,
    seal,
    set_counter,
    touch,
    touch_record,
)
from kvpager.stores.sound import mend as mend_rows
from kvpager.stores.tier import TierSizes
from kvpager.stores.verify import Progress, Report, verify

__all__ = ["LEAST_LIMIT_BYTES", "SYNCHRONOUS", "SqliteStore", "Synchronous", "TenantSizes"]

Synchronous = Literal["normal", "full"]
SYNCHRONOUS: tuple[str, ...] = get_args(Synchronous)
LEAST_LIMIT_BYTES = 4 * 2**20
COUNT = "max(0, CAST({} AS INTEGER))"  # a sum, whatever somebody has written there
SUMS = ("blocks", "records", "bytes", "payload_bytes")


@dataclass(frozen=True)
class TenantSizes:
    """What one tenant has: blocks, records, bytes of their rows, and bytes of the blocks' pages among them."""

    tenant: bytes
    blocks: int
    records: int
    bytes: int
    payload_bytes: int


class SqliteStore:
    """A tier (see tier.Tier) in the file `path`, opened when it is first used.

    limit_bytes         the most on disk: database, log, index of the log, reserve and what was put aside; one batch of
                        `put` may stand beside it for a moment
    tenant_limit_bytes  the most of the rows of one tenant; None for no limit
    synchronous         "normal": what was written survives the end of the process; a loss of power may take the last
                        transactions, never the rest. "full": it survives that too, at the price of a wait for the
                        disk with each transaction
    compression         of pages that are written; those that are there are read in whatever they are in
    itemsize            bytes of a number in the pages, by which compression goes
    busy_ms             how long one waits for another process before StoreLocked
    mend                whether a malformed database is put aside and begun anew, and rows that can't be kvpager's are
                        forgotten when it is opened; else it stays as it is
    guest               whether it only looks and forgets: then the reserve is left to those who write blocks
    clock, wall         seconds: monotonic, and since 1970. Only `prune` by age goes by the latter

    Threads: those that read may be many; one at a time writes (a second waits). `claim` and `release` belong to one.
    Raises ConfigError; StoreErrors come from its methods.
    """

    name = "sqlite"

    def __init__(
        self,
        path: str | Path,
        *,
        limit_bytes: int,
        tenant_limit_bytes: int | None = None,
        synchronous: Synchronous = "normal",
        compression: Compression = "none",
        itemsize: int = 2,
        busy_ms: int = 250,
        mend: bool = True,
        guest: bool = False,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        if limit_bytes < LEAST_LIMIT_BYTES:
            raise ConfigError(f"the store's limit is {limit_bytes} bytes; at least {LEAST_LIMIT_BYTES} are needed")
        if tenant_limit_bytes is not None and tenant_limit_bytes <= 0:
            raise ConfigError(f"the store's limit for a tenant is {tenant_limit_bytes} bytes, and must be above zero")
        if synchronous not in SYNCHRONOUS:
            raise ConfigError(f"synchronous is {synchronous!r}, and one of {', '.join(SYNCHRONOUS)} is allowed")
        if compression not in COMPRESSIONS:
            raise ConfigError(f"compression is {compression!r}, and one of {', '.join(COMPRESSIONS)} is allowed")
        self.path = Path(path)
        self._compression, self._itemsize, self._wall, self._mend = compression, itemsize, wall, mend
        self._places = Places(path)
        shares = Shares.of(limit_bytes, self._places.disk_bytes)
        reserve = Reserve(self._places.reserve, shares.reserve, guest)
        self._quota = Quota(self._places, limit_bytes, tenant_limit_bytes, shares)
        self._index = Index(clock)
        self._tick = 0
        self._unfinished = False
        self._claims = Claims(self._places.lock)
        self._database = Database(
            self._places,
            self._claims,
            self._opened,
            synchronous=synchronous,
            busy_ms=busy_ms,
            log_bytes=shares.log,
            mend=mend,
            clock=clock,
        )
        self._lookup = Lookup(self._database, self._index)
        self._changes = Changes(self._database, self._places, self._quota, reserve, self._index, wall, shares.log)

    # -- reading

    @property
    def tick(self) -> int:
        """The latest tick that was told by `update`, 0 for none. Raises StoreError where it can't be opened."""
        self._database.open()
        return self._tick

    @property
    def damaged(self) -> int:
        """Blocks and records that did not match their checksums or keys, since this was made."""
        return self._lookup.damaged

    @property
    def readonly(self) -> bool:
        """Whether it can only be read, as far as is known."""
        return self._database.readonly

    def open(self) -> None:
        """Open it, as every other call does where needed. Raises StoreError."""
        self._database.open()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of these blocks are there, by the index in memory. Raises StoreError."""
        self._lookup.look()
        return [self._index.get(key) is not None for key in keys]

    def heads(self, keys: Sequence[bytes]) -> list[BlockHead | None]:
        """Heads of blocks, checked, without reading a page; None for one that is not there. Raises StoreError.

        That they were found is noted with the next transaction.
        """
        heads, touched = self._lookup.heads(keys)
        self._changes.touched.update(touched)
        return heads

    def get(self, keys: Sequence[bytes]) -> list[Bytes | None]:
        """Pages of blocks, uint8 [pages, page_bytes] each, all checked; None for one that is not there.

        Arrays are read-only views of what was read. Raises StoreError.
        """
        return self._lookup.pages(keys)

    def get_pages(self, key: bytes, pages: Sequence[int]) -> list[Bytes] | None:
        """Some pages of one block, uint8 [page_bytes] each, checked; nothing else of it is read but its header.

        None where it is not there, or one of them is damaged. Raises StoreError.
        """
        return self._lookup.slices(key, pages)

    def load_record(self, key: bytes) -> bytes | None:
        """A record by its 32-byte key, checked; None where it is not there. Raises StoreError."""
        with self._database.reading() as connection:
            return self._lookup.record(connection, key)

    def sizes(self) -> TierSizes:
        """What is held. Raises StoreError."""
        with self._database.reading() as connection:
            blocks, records, _, payload_bytes = connection.execute(
                f"SELECT {', '.join(COUNT.format(f'total({name})') for name in SUMS)} FROM tenants"
            ).fetchone()
        return TierSizes(
            blocks, records, payload_bytes, self._places.nbytes, self._quota.limit_bytes, self._changes.dropped
        )

    def tenants(self) -> list[TenantSizes]:
        """What each tenant has, who has most first. Raises StoreError."""
        with self._database.reading() as connection:
            rows = connection.execute(
                f"SELECT tenant, {', '.join(map(COUNT.format, SUMS))} FROM tenants WHERE typeof(tenant) = 'blob'"
                " ORDER BY 4 DESC, 1"
            ).fetchall()
        return [TenantSizes(*row) for row in rows]

    # -- writing

    def put(self, blocks: Sequence[StoredBlock]) -> int:
        """Store blocks; returns how many were written.

        One transaction, or several where so much makes way that the log would outgrow its bounds. A block that is there
        already, or for which there is no room whatever makes way, is left out. Raises StoreError, and what an earlier
        transaction wrote stays, or InputError for a block that is not as its head says.
        """
        made = [block_rows(block, self._compression, self._itemsize) for block in blocks]
        self._database.open()
        if self._unfinished:  # a process ended while it was erasing
            purge(self._changes)
            self._unfinished = False
        self._changes.prepare(sum(rows.nbytes for rows in made))
        left, written = deque(made), 0
        while left:
            with self._changes.transaction() as change:
                added = self._put_some(change, left)
            self._index.add(added)
            written += len(added)
        return written

    def update(self, news: Sequence[Scores], tick: int) -> None:
        """Set scores, add hits, and note the tick; blocks that are not there are left out. Raises StoreError.

        Many are several transactions, so that the log stays within its bounds.
        """
        self._database.open()
        found = [(number, one) for one in news if (number := self._index.get(one.key)) is not None]
        found.sort(key=itemgetter(0))  # rows beside each other share pages
        left = deque(found)
        while True:
            with self._changes.transaction() as change:
                set_counter(change.connection, "tick", max(counter(change.connection, "tick"), tick))
                while left and not self._quota.heavy(change):
                    rescore(change, *left.popleft())
            if not left:
                break
        self._tick = max(self._tick, tick)

    def drop(self, keys: Sequence[bytes]) -> None:
        """Forget blocks; those that are not there are left out. Raises StoreError.

        Where the pages of one can't be deleted, because the database is malformed there, it is no longer found.
        """
        drop_blocks(self._changes, keys)

    def save_record(self, key: bytes, tenant: bytes, record: bytes) -> None:
        """Store a record in the place of an older one. Raises StoreError: StoreTooLarge where nothing may make way."""
        sealed = seal(key, record)
        self._changes.prepare(len(sealed))
        room: Room = "later"
        while room == "later":
            with self._changes.transaction() as change:
                instead = touch_record(change, key)  # which keeps it, until there is room for the new one
                room = self._quota.fit(change, tenant, len(sealed), instead=instead)
                if room == "none":
                    raise StoreTooLarge(
                        f"store {self.path}: no room for a record of {len(record)} bytes, whatever makes way"
                    )
                if room == "there":
                    remove_record(change, key)
                    insert_record(change, key, tenant, sealed)

    def drop_damaged(self, report: Report) -> None:
        """Forget the blocks and records that `verify` found damaged, whatever their keys are. Raises StoreError."""
        drop_rows(self._changes, report.rows_damaged("blocks"), report.rows_damaged("records"))

    def drop_record(self, key: bytes) -> None:
        """Forget a record, if it is there. Raises StoreError."""
        self._changes.remove(lambda change: remove_record(change, key))

    def erase(self, tenant: bytes) -> int:
        """Forget all blocks and records of a tenant; returns how many there were. Raises StoreError.

        When it returns their bytes were overwritten and are in the file no more. Where it raises, either all are still
        there or none is found; what is left of their bytes then is overwritten by the next call that erases.
        """
        return erase(self._changes, tenant)

    # -- the rest

    def prune(
        self, *, to_bytes: int | None = None, older_seconds: float | None = None, tenant: bytes | None = None
    ) -> int:
        """Forget some, and give the room back to the disk; returns how many blocks and records. Raises StoreError.

        older_seconds  what was last used longer ago, by the wall clock
        tenant         only of that tenant; without an age, all of it (see `erase`)
        to_bytes       what is worth least, until all is within so many bytes on disk; of everybody
        """
        if to_bytes is not None and tenant is not None:
            raise InputError("prune: to_bytes is of the whole store, and can't be asked for with a tenant")
        count = 0
        if older_seconds is not None:
            count += prune_older(self._changes, int(self._wall() - older_seconds), tenant)
        elif tenant is not None:
            count += self.erase(tenant)
        if to_bytes is not None:
            count += prune_to(self._changes, to_bytes)
        return count

    def verify(self, progress: Progress = lambda done, total: None) -> Report:
        """Check every page, block and record, and the database's structure; changes nothing. Raises StoreError."""
        return verify(self._database, progress)

    def export(
        self, path: str | Path, tenant: bytes | None = None, progress: Progress = lambda done, total: None
    ) -> Moved:
        """Write blocks and records (of a tenant) to an archive, for `import_` elsewhere. Raises StoreError."""
        self._lookup.look()
        return export_to(
            Path(path),
            self._database,
            self._lookup,
            tenant=tenant,
            compression=self._compression,
            itemsize=self._itemsize,
            progress=progress,
        )

    def import_(self, path: str | Path, progress: Progress = lambda done, total: None) -> Moved:
        """Store what an archive holds; what is there already stays as it is. Raises StoreError."""
        return import_from(Path(path), self, progress)

    def claim(self, key: bytes) -> bool:
        """Become the one that may write this record, until `release`, `close` or the process's end; never waits.

        False where another store, in this process or another one, has claimed it, or this one already. What can only be
        read needs no claim: then it is True. Raises StoreError.
        """
        self._database.open()
        if self._database.readonly:
            return True
        try:
            return self._claims.take(key)
        except OSError as error:
            raise StoreUnavailable(*self._places.explain(error)) from error

    def release(self, key: bytes) -> None:
        """Let others claim a record; nothing happens where it was not claimed here."""
        self._claims.give_back(key)

    def close(self) -> None:
        """Note what was found, close all files and end all claims; idempotent. Nothing is raised."""
        with contextlib.suppress(StoreError):
            while self._changes.touched:
                with self._changes.transaction():
                    pass
        self._database.close()
        self._claims.close()

    # -- inside

    def _opened(self, connection: sqlite3.Connection) -> None:
        self._changes.forget()
        if self._mend and not self._database.readonly:
            self._lookup.damaged += mend_rows(connection)
        self._unfinished = connection.execute("SELECT 1 FROM doomed").fetchone() is not None
        self._index.load(connection)
        self._tick = counter(connection, "tick")

    def _put_some(self, change: Change, left: deque[BlockRows]) -> list[tuple[bytes, int]]:
        """Write the first of these blocks, as many as one transaction should, and take them off."""
        added: list[tuple[bytes, int]] = []
        while left and not (added and self._quota.heavy(change)):
            rows, room = left[0], "none"
            head = rows.head
            touch(change, (head.key, head.parent))  # neither makes way for this one or for what follows
            if id_of(change.connection, head.key) is None:
                alone = head.depth > 0 and id_of(change.connection, head.parent) is None
                room = self._quota.fit(change, head.tenant, rows.nbytes, alone=alone)
            if room == "later":
                break
            if room == "there":
                added.append((head.key, insert_block(change, rows)))
            left.popleft()
        return added
