"""A transaction that is running, as those see it who write in it."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field

__all__ = ["Change", "Stamp"]


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
    """

    connection: sqlite3.Connection
    stamp: Stamp
    gone: list[bytes] = field(default_factory=list)
    dropped: int = 0
