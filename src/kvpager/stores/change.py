"""A transaction that is running, as those see it who write in it."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field

from kvpager.stores.schema import PAGE_BYTES

__all__ = ["SMALL_ROW_BYTES", "Change", "Stamp"]


INDEXED = 400  # entries in a page of an index, at least
SMALL_ROW_BYTES = 200  # of a row of `blocks`, about


@dataclass(frozen=True)
class Stamp:
    """What a transaction notes with the rows that it uses: its number, the quota's age, seconds since 1970."""

    use: int
    age: int
    seen: int

    def worth(self, hits: int) -> int:
        """What a block that is used now is worth, see quota."""
        return self.age + 1 + hits.bit_length()


@dataclass
class Change:
    """One transaction.

    gone     keys of blocks that it takes away
    dropped  how many blocks and records make way in it for others
    blocks   how many there are, about: tells how large the indices are
    """

    connection: sqlite3.Connection
    stamp: Stamp
    gone: list[bytes] = field(default_factory=list)
    dropped: int = 0
    blocks: int = 0
    _pages: set[tuple[str, int]] = field(default_factory=set)

    @property
    def log_bytes(self) -> int:
        """About what it writes to the log for what it changes in small rows, and for what it takes away.

        A page of the database goes there whole, once, however little of it is changed. Rows beside each other share
        pages, so the least is written for what came together; keys in an index are beside each other by chance.
        """
        return len(self._pages) * PAGE_BYTES

    def rewrites(self, table: str, number: int, nbytes: int) -> None:
        """A row with this id, of so many bytes, is changed or taken away."""
        self._pages.add((table, number * min(max(1, nbytes), PAGE_BYTES) // PAGE_BYTES))

    def orders(self, *keys: object) -> None:
        """Entries of an index come or go; what is no key counts like any other."""
        leaves = 1 + self.blocks // INDEXED
        for place, key in enumerate(keys):
            if isinstance(key, bytes) and key:
                self._pages.add((f"index {place}", int.from_bytes(key[:4], "big") * leaves >> 32))
