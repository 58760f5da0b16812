"""Blocks and records in one SQLite file: durable, bounded, shared by processes, and checked whenever it is read."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, get_args

from kvpager.errors import ConfigError, StoreDamaged, StoreError, StoreFull, StoreUnavailable
from kvpager.ports import Bytes
from kvpager.stored import BlockHead, Scores, StoredBlock
from kvpager.stores.claims import Claims
from kvpager.stores.codec import decode
from kvpager.stores.database import Database
from kvpager.stores.faults import is_damage
from kvpager.stores.header import COMPRESSIONS, PREFIX_BYTES, Compression, Header, header_bytes
from kvpager.stores.index import Index
from kvpager.stores.places import Places
from kvpager.stores.quota import NOBODY, Gone, Quota
from kvpager.stores.reserve import Reserve
from kvpager.stores.rows import (
    BlockRows,
    Stamp,
    block_rows,
    bump,
    counter,
    head_of,
    insert_block,
    remove_blocks,
    seal,
    unseal,
)
from kvpager.stores.tier import TierSizes

__all__ = ["LEAST_LIMIT_BYTES", "SYNCHRONOUS", "SqliteStore", "Synchronous"]

Synchronous = Literal["normal", "full"]
SYNCHRONOUS: tuple[str, ...] = get_args(Synchronous)
LEAST_LIMIT_BYTES = 4 * 2**20
LEAST_LOG_BYTES, MOST_LOG_BYTES = 2**20, 16 * 2**20
STEP = 64  # blocks that one transaction takes away, where there are many


class SqliteStore:
    """A tier (see tier.Tier) in the file `path`, opened when it is first used.

    limit_bytes         the most on disk: database, log, index of the log, reserve and what was put aside; one batch of
                        `put` may stand beside it for a moment
    tenant_limit_bytes  the most of the rows of one tenant; None for no limit
    synchronous         "normal": what was written survives the end of the process, and a loss of power may take the last
                        transactions, never the rest. "full": it survives that too, at the price of a wait for the disk
                        with each transaction
    compression         of pages that are written; those that are there are read in whatever they are in
    itemsize            bytes of a number in the pages, by which compression goes
    busy_ms             how long one waits for another process before StoreLocked
    mend                whether a malformed database is put aside and begun anew; else it stays as it is
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
        self.damaged = 0
        self._compression, self._itemsize, self._wall = compression, itemsize, wall
        self._places = Places(path)
        self._reserve = Reserve(self._places.reserve, limit_bytes)
        log_bytes = max(LEAST_LOG_BYTES, min(MOST_LOG_BYTES, limit_bytes // 8))
        self._log_bytes = log_bytes
        self._quota = Quota(self._places, limit_bytes, tenant_limit_bytes, log_bytes, self._reserve.nbytes)
        self._index = Index(clock)
        self._touched: dict[int, int] = {}  # id -> hits, of blocks that were found and whose use is to be noted
        self._dropped = 0
        self._tick = 0
        self._claims = Claims(self._places.lock)
        self._database = Database(
            self._places,
            self._claims,
            self._opened,
            synchronous=synchronous,
            busy_ms=busy_ms,
            log_bytes=log_bytes,
            mend=mend,
            clock=clock,
        )

    # -- reading

    @property
    def tick(self) -> int:
        """The latest tick that was told by `update`, 0 for none. Raises StoreError where it can't be opened."""
        self._database.open()
        return self._tick

    @property
    def readonly(self) -> bool:
        """Whether it can only be read, as far as is known."""
        return self._database.readonly

    def open(self) -> None:
        """Open it, as every other call does where needed. Raises StoreError."""
        self._database.open()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of these blocks are there, by the index in memory. Raises StoreError."""
        self._look()
        return [self._index.get(key) is not None for key in keys]

    def heads(self, keys: Sequence[bytes]) -> list[BlockHead | None]:
        """Heads of blocks, checked, without reading a page; None for one that is not there. Raises StoreError.

        That they were found is noted with the next transaction.
        """
        self._look()
        with self._database.reading() as connection:
            return [self._head(connection, key) for key in keys]

    def get(self, keys: Sequence[bytes]) -> list[Bytes | None]:
        """Pages of blocks, uint8 [pages, page_bytes] each, all checked; None for one that is not there.

        Arrays are read-only views of what was read. Raises StoreError.
        """
        self._look()
        with self._database.reading() as connection:
            return [self._pages(connection, key) for key in keys]

    def get_pages(self, key: bytes, pages: Sequence[int]) -> list[Bytes] | None:
        """Some pages of one block, uint8 [page_bytes] each, checked; nothing else of it is read but its header.

        None where it is not there, or one of them is damaged. Raises StoreError.
        """
        self._look()
        number = self._index.get(key)
        if number is None:
            return None
        with self._database.reading() as connection:
            try:
                return _slices(connection, number, key, pages)
            except (StoreDamaged, sqlite3.Error) as error:
                if isinstance(error, sqlite3.OperationalError) and "no such rowid" in str(error):
                    self._index.discard([key])
                    return None
                self._note_damage(error)
                return None

    def load_record(self, key: bytes) -> bytes | None:
        """A record by its 32-byte key, checked; None where it is not there. Raises StoreError."""
        with self._database.reading() as connection:
            try:
                row = connection.execute("SELECT record FROM records WHERE key = ?", (key,)).fetchone()
                return None if row is None else unseal(key, row[0])
            except (StoreDamaged, sqlite3.DatabaseError) as error:
                self._note_damage(error)
                return None

    def sizes(self) -> TierSizes:
        """What is held. Raises StoreError."""
        with self._database.reading() as connection:
            row = connection.execute(
                "SELECT coalesce(sum(blocks), 0), coalesce(sum(records), 0), coalesce(sum(payload_bytes), 0) FROM tenants"
            ).fetchone()
        return TierSizes(*row, self._places.nbytes, self._quota.limit_bytes, self._dropped)

    # -- writing

    def put(self, blocks: Sequence[StoredBlock]) -> int:
        """Store blocks in one transaction; returns how many were written.

        One that is there already, or for which there is no room whatever makes way, is left out. Raises StoreError, or
        InputError for a block that is not as its head says.
        """
        made = [block_rows(block, self._compression, self._itemsize) for block in blocks]
        self._trim()
        self._take_reserve()
        with self._changing() as (connection, stamp, gone):
            added = [row for rows in made if (row := self._put(connection, rows, stamp, gone))]
        self._index.add(added)
        return len(added)

    def update(self, news: Sequence[Scores], tick: int) -> None:
        """Set scores, add hits, and note the tick; blocks that are not there are left out. Raises StoreError."""
        with self._changing() as (connection, stamp, _):
            connection.execute("UPDATE counters SET value = max(value, ?) WHERE name = 'tick'", (tick,))
            for one in news:
                row = connection.execute("SELECT id, hits FROM blocks WHERE key = ?", (one.key,)).fetchone()
                if row is None:
                    continue
                number, hits = row[0], row[1] + one.hits
                connection.execute("UPDATE scores SET scores = ? WHERE id = ?", (seal(one.key, one.scores), number))
                if one.hits:
                    connection.execute(
                        "UPDATE blocks SET hits = ?, worth = ?, used = ?, seen = ? WHERE id = ?",
                        (hits, stamp.worth(hits), stamp.use, stamp.seen, number),
                    )
        self._tick = max(self._tick, tick)

    def drop(self, keys: Sequence[bytes]) -> None:
        """Forget blocks; those that are not there are left out. Raises StoreError.

        Where the pages of one can't be deleted, because the database is malformed there, it is no longer found.
        """
        for parts in (True, False):
            try:
                with self._changing(touches=parts) as (connection, _, gone):
                    ids = [_id_of(connection, key) for key in keys]
                    try:
                        remove_blocks(connection, [number for number in ids if number is not None], parts=parts)
                    except sqlite3.DatabaseError as error:
                        if not parts or not is_damage(error):
                            raise
                        raise StoreDamaged(str(error)) from error
                    gone.keys += keys
                return
            except StoreDamaged:
                if not parts:
                    raise

    def save_record(self, key: bytes, tenant: bytes, record: bytes) -> None:
        """Store a record in the place of an older one. Raises StoreError; StoreFull where nothing may make way for it."""
        sealed = seal(key, record)
        self._trim()
        self._take_reserve()
        with self._changing() as (connection, stamp, gone):
            connection.execute("DELETE FROM records WHERE key = ?", (key,))
            if not self._quota.fit(connection, stamp, tenant, len(sealed), gone):
                raise StoreFull(f"store {self.path}: no room for a record of {len(record)} bytes, whatever makes way")
            connection.execute(
                "INSERT INTO records (key, tenant, bytes, worth, used, seen, record) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (key, tenant, len(sealed), stamp.worth(1), stamp.use, stamp.seen, sealed),
            )

    def drop_record(self, key: bytes) -> None:
        """Forget a record, if it is there. Raises StoreError."""
        with self._changing() as (connection, _, _):
            connection.execute("DELETE FROM records WHERE key = ?", (key,))

    # -- the rest

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
        if self._touched:
            with contextlib.suppress(StoreError), self._changing():
                pass
        self._database.close()
        self._claims.close()

    # -- inside

    def _opened(self, connection: sqlite3.Connection) -> None:
        self._quota.forget()
        self._touched.clear()
        self._index.load(connection)
        self._tick = counter(connection, "tick")

    def _look(self) -> None:
        self._database.open()
        if self._index.stale:
            with self._database.reading() as connection:
                self._index.refresh(connection)

    def _head(self, connection: sqlite3.Connection, key: bytes) -> BlockHead | None:
        number = self._index.get(key)
        if number is None:
            return None
        row = connection.execute(
            "SELECT head, scores, hits FROM blocks JOIN heads USING (id) JOIN scores USING (id) WHERE id = ?", (number,)
        ).fetchone()
        if row is None:
            self._index.discard([key])
            return None
        try:
            head = head_of(row, key)
        except StoreDamaged as error:
            self._note_damage(error)
            return None
        self._touched[number] = head.hits
        return head

    def _pages(self, connection: sqlite3.Connection, key: bytes) -> Bytes | None:
        number = self._index.get(key)
        if number is None:
            return None
        try:
            row = connection.execute("SELECT payload FROM payloads WHERE id = ?", (number,)).fetchone()
            if row is not None:
                return decode(row[0], key).payload
        except (StoreDamaged, sqlite3.DatabaseError) as error:
            self._note_damage(error)
            return None
        self._index.discard([key])
        return None

    def _note_damage(self, error: Exception) -> None:
        """Count one block or record that is damaged; any other error is raised again."""
        if isinstance(error, sqlite3.Error) and not is_damage(error):
            raise error
        self.damaged += 1

    @contextlib.contextmanager
    def _changing(self, touches: bool = True) -> Iterator[tuple[sqlite3.Connection, Stamp, Gone]]:
        """A transaction: what was found since the last one is noted first; what is gone leaves the index afterwards."""
        gone, drops, touched = Gone(), None, dict(self._touched)
        try:
            with self._database.writing() as connection:
                stamp = Stamp(bump(connection, "use"), counter(connection, "age"), int(self._wall()))
                if touches:
                    connection.executemany(
                        "UPDATE blocks SET worth = max(worth, ?), used = ?, seen = ? WHERE id = ?",
                        [(stamp.worth(hits), stamp.use, stamp.seen, number) for number, hits in touched.items()],
                    )
                yield connection, stamp, gone
                drops = bump(connection, "drops") if gone.keys else None
        except StoreFull:
            self._quota.forget()
            self._reserve.give_up()
            self._database.checkpoint()
            raise
        except BaseException:
            self._quota.forget()
            raise
        for number in touched:
            self._touched.pop(number, None)
        self._dropped += gone.count
        if drops is not None:
            self._index.took_away(gone.keys, drops)

    def _put(
        self, connection: sqlite3.Connection, rows: BlockRows, stamp: Stamp, gone: Gone
    ) -> tuple[bytes, int] | None:
        head = rows.head
        for key in (head.key, head.parent):  # used now: neither makes way for this or what follows
            connection.execute(
                "UPDATE blocks SET used = ?, seen = ?, worth = max(worth, ?) WHERE key = ?",
                (stamp.use, stamp.seen, stamp.worth(0), key),
            )
        if _id_of(connection, head.key) is not None:
            return None
        if not self._quota.fit(connection, stamp, head.tenant, rows.nbytes, gone):
            return None
        return head.key, insert_block(connection, rows, stamp)

    def _take_reserve(self) -> None:
        self._database.open()
        if not self._database.readonly and not self._reserve.take():
            raise StoreFull(
                f"store {self.path}: the disk is full; nothing is written until {self._reserve.nbytes} bytes are free"
            )

    def _trim(self) -> None:
        """Bring what is on disk within the limit: after a start with a lower one, or where the log has grown."""
        self._database.open()
        if self._database.readonly or not self._quota.over:
            return
        self._database.checkpoint()
        if self._quota.over:
            self._places.forget_aside()
        before = self._places.nbytes + 1
        while self._quota.over and self._places.nbytes < before:
            before = self._places.nbytes
            with self._changing() as (connection, stamp, gone):
                self._quota.shrink(connection, stamp, STEP, gone)
            self._database.vacuum(before - self._quota.limit_bytes)
            self._database.checkpoint()


def _id_of(connection: sqlite3.Connection, key: bytes) -> int | None:
    row = connection.execute("SELECT id FROM blocks WHERE key = ?", (key,)).fetchone()
    return None if row is None else int(row[0])


def _slices(connection: sqlite3.Connection, number: int, key: bytes, pages: Sequence[int]) -> list[Bytes]:
    with connection.blobopen("payloads", "payload", number, readonly=True) as blob:
        size = header_bytes(blob.read(PREFIX_BYTES))
        if size > len(blob):
            raise StoreDamaged(f"block {key[:6].hex()} is cut off in its header")
        blob.seek(0)
        header = Header.parse(blob.read(size))
        if header.head.key != key:
            raise StoreDamaged(f"block {header.name} lies where block {key[:6].hex()} should")
        found = []
        for page in pages:
            begin, length = header.page_range(page)
            blob.seek(begin)
            found.append(header.page(page, blob.read(length)))
        return found
