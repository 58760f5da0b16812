"""Which blocks a store has, in memory: the key of each and where its rows are."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable

from kvpager.stores.rows import counter

__all__ = ["Index"]

KEYED = "typeof(key) = 'blob'"  # what has another key can't be asked for

LOOK_SECONDS = 0.2  # how often one looks for blocks that other processes have added
RELOAD_SECONDS = 5.0  # how often the whole is read again, where others have taken blocks away


class Index:
    """Ids of rows by key. Ids only grow and are never used again, so an entry is right, or what it names is gone.

    Blocks that other processes add are found within LOOK_SECONDS of being asked for. One that they took away is found
    out when it is read, or within RELOAD_SECONDS. Any thread may read; changes come from `refresh` and whoever writes.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ids: dict[bytes, int] = {}
        self._last = 0
        self._drops = 0
        self._looked = self._loaded = clock()

    def __len__(self) -> int:
        return len(self._ids)

    def get(self, key: bytes) -> int | None:
        """The id of a block's rows."""
        return self._ids.get(key)

    def load(self, connection: sqlite3.Connection) -> None:
        """All blocks anew; no page is read, but the index by key alone."""
        ids = dict(connection.execute(f"SELECT key, id FROM blocks WHERE {KEYED}"))
        self._drops = counter(connection, "drops")
        self._last = max(ids.values(), default=0)
        self._ids = ids
        self._looked = self._loaded = self._clock()

    @property
    def stale(self) -> bool:
        """Whether it is time for `refresh`."""
        return not 0 <= self._clock() - self._looked < LOOK_SECONDS

    def refresh(self, connection: sqlite3.Connection) -> None:
        """Take up what other processes have changed."""
        self._looked = self._clock()
        if not 0 <= self._looked - self._loaded < RELOAD_SECONDS and counter(connection, "drops") != self._drops:
            self.load(connection)
            return
        rows = connection.execute(
            f"SELECT key, id FROM blocks WHERE id > ? AND {KEYED} ORDER BY id", (self._last,)
        ).fetchall()
        self.add(rows)
        if rows:
            self._last = rows[-1][1]

    def add(self, rows: Iterable[tuple[bytes, int]]) -> None:
        """Blocks that were written. Others may have written before this process did, and are still to be looked for."""
        for key, number in rows:
            self._ids[key] = number

    def discard(self, keys: Iterable[bytes]) -> None:
        """Blocks that turned out not to be there."""
        for key in keys:
            self._ids.pop(key, None)

    def took_away(self, keys: Iterable[bytes], drops: int) -> None:
        """Blocks that this process took away, and the number of that transaction."""
        self.discard(keys)
        if drops == self._drops + 1:
            self._drops = drops
