"""Transactions of a store: what each of them notes, makes room for, and leaves behind on a full disk."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from typing import TypeVar

from kvpager.errors import StoreError, StoreFull, StoreLocked, StoreUnavailable
from kvpager.stores.change import SMALL_ROW_BYTES, Change, Stamp
from kvpager.stores.database import Database
from kvpager.stores.index import Index
from kvpager.stores.places import Places
from kvpager.stores.quota import Quota
from kvpager.stores.reserve import Reserve
from kvpager.stores.rows import bump, counter
from kvpager.stores.sound import numbers_spent, put_right

__all__ = ["Changes"]

STEP, TIGHT_STEP = 64, 8
MOST_BLOCKS = 2**32
VACUUM_BYTES = 16 * 2**20

T = TypeVar("T")


class Changes:
    """The one way to write to a store's database.

    touched  hits of blocks by id that were found, whose use the next transaction notes
    dropped  blocks and records that made way for others since this was made
    log_bytes  how far the log grows
    """

    def __init__(
        self,
        database: Database,
        places: Places,
        quota: Quota,
        reserve: Reserve,
        index: Index,
        wall: Callable[[], float],
        log_bytes: int,
    ) -> None:
        self.log_bytes = log_bytes
        self.quota = quota
        self.touched: dict[int, int] = {}
        self.dropped = 0
        self._database, self._places, self._reserve, self._index, self._wall = database, places, reserve, index, wall

    def forget(self) -> None:
        """Forget what belongs to a database that was there before."""
        self.quota.forget()
        self.touched.clear()

    @contextlib.contextmanager
    def transaction(self, touches: bool = True) -> Iterator[Change]:
        """A transaction, undone where anything is raised; what is gone leaves the index when it is done.

        After StoreFull the log is moved to the database, with the help of the reserve. Raises StoreError.
        """
        drops, found, noted = None, dict(self.touched) if touches else {}, list[int]()
        try:
            with self._database.writing() as connection:
                stamp = Stamp(bump(connection, "use", 2), counter(connection, "age"), int(self._wall()))
                change = Change(connection, stamp, blocks=_blocks(connection))
                noted = self._touch(change, found)
                yield change
                drops = bump(connection, "drops") if change.gone else None
        except StoreFull:
            self.quota.forget()
            if self._renumbered():
                raise
            self._reserve.give_up()
            self._database.checkpoint()
            with contextlib.suppress(OSError):
                self._reserve.take()
            raise
        except BaseException:
            self.quota.forget()
            raise
        for number in noted:
            self.touched.pop(number, None)
        self.dropped += change.dropped
        if drops is not None:
            self._index.took_away(change.gone, drops)

    def _renumbered(self) -> bool:
        """Whether it was no disk that was full: somebody has written the last id that there is, which is put right."""
        with contextlib.suppress(StoreError), self._database.writing() as connection:
            if numbers_spent(connection):
                return put_right(connection) >= 0
        return False

    def _touch(self, change: Change, touched: dict[int, int]) -> list[int]:
        """Note uses, as many as leave the transaction something else to do; returns of which blocks."""
        stamp, noted = change.stamp, []
        for number in sorted(touched):
            if 2 * change.log_bytes >= self.log_bytes:
                break
            change.rewrites("blocks", number, SMALL_ROW_BYTES)
            noted.append(number)
        change.connection.executemany(
            "UPDATE blocks SET worth = max(worth, ?), used = ?, seen = ? WHERE id = ?",
            [(stamp.worth(touched[number]), stamp.use - 1, stamp.seen, number) for number in noted],
        )
        return noted

    def remove(self, change: Callable[[Change], T], touches: bool = True) -> T:
        """A transaction that takes something away; on a full disk it is tried again with the room of the reserve.

        Room that it made is given back to the disk where that is full. Raises StoreError.
        """
        try:
            with self.transaction(touches) as running:
                done = change(running)
        except StoreFull:
            self._reserve.give_up()
            with self.transaction(touches=False) as running:
                done = change(running)
        if not self._reserve.held:
            with contextlib.suppress(StoreError, OSError):
                self.give_back(self.log_bytes // 2)
                self._reserve.take()
        return done

    @property
    def step(self) -> int:
        """How many blocks a transaction takes away where there are many; few on a full disk, where its log lies too."""
        return STEP if self._reserve.held else TIGHT_STEP

    def checkpoint(self) -> None:
        """Cut off the log, as far as readers and the disk allow."""
        self._database.checkpoint()

    def fit(self) -> None:
        """Give back what the reserve has beyond its share of the limit."""
        self._reserve.fit()

    def give_back(self, step: int = VACUUM_BYTES) -> None:
        """Give the database's free pages back to the disk. Raises StoreError."""
        self._database.checkpoint()
        while self._database.vacuum(step) and self._database.checkpoint():
            pass

    def prepare(self, nbytes: int) -> None:
        """What comes before so many bytes are written: the reserve is there, and what is on disk is within the limit.

        The latter matters after a start with a lower limit, and where the log has grown under a reader. Raises
        StoreError: StoreFull where the disk has no room for the reserve, StoreLocked where a reader stays.
        """
        self._database.look()
        if self._database.readonly:
            return  # the transaction says so
        if self._places.has_aside and self.quota.over(nbytes):
            self._places.forget_aside()
        if self.quota.over():
            self.fit()
            self._trim()
        if not self._take():
            path, needed = self._places.path, self._reserve.nbytes
            raise StoreFull(f"store {path}: the disk is full; it is written to again when {needed} bytes are free")

    def _take(self) -> bool:
        try:
            return self._reserve.take()
        except OSError as error:
            raise StoreUnavailable(*self._places.explain(error)) from error

    def _trim(self) -> None:
        self._database.checkpoint()
        more = True
        while self.quota.over() and more:
            with self.transaction() as change:
                more = not self.quota.shrink(change, self.step) and change.dropped > 0
            self.give_back()
        if self.quota.over():
            raise StoreLocked(f"store {self._places.path}: somebody reads it, and its log can't be cut off for so long")


def _blocks(connection: sqlite3.Connection) -> int:
    """How many blocks there are, as the sums say."""
    row: tuple[int] = connection.execute("SELECT CAST(total(blocks) AS INTEGER) FROM tenants").fetchone()
    return min(max(0, row[0]), MOST_BLOCKS)
