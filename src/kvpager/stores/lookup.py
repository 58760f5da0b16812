"""Reading of blocks: by the index in memory, checked, and a miss where anything does not match."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from kvpager.errors import StoreDamaged
from kvpager.ports import Bytes
from kvpager.stored import BlockHead, StoredBlock
from kvpager.stores.codec import decode
from kvpager.stores.database import Database
from kvpager.stores.faults import is_damage
from kvpager.stores.header import PREFIX_BYTES, Header, header_bytes
from kvpager.stores.index import Index
from kvpager.stores.rows import blob_of, head_of, unseal

__all__ = ["Lookup"]


class Lookup:
    """What is read of blocks and records, in any number of threads.

    damaged  blocks and records that did not match, and were a miss for it
    """

    def __init__(self, database: Database, index: Index) -> None:
        self.damaged = 0
        self._database, self._index = database, index

    def look(self) -> None:
        """Open the database where it is closed, and see from time to time what other processes have added."""
        self._database.open()
        if self._index.stale:
            with self._database.reading() as connection:
                self._index.refresh(connection)

    def heads(self, keys: Sequence[bytes]) -> tuple[list[BlockHead | None], dict[int, int]]:
        """Heads of blocks, and the hits of those that were found by their ids. Raises StoreError."""
        self.look()
        with self._database.reading() as connection:
            found = [self._head(connection, key) for key in keys]
        return [one and one[1] for one in found], {one[0]: one[1].hits for one in found if one}

    def pages(self, keys: Sequence[bytes]) -> list[Bytes | None]:
        """All pages of each block. Raises StoreError."""
        self.look()
        with self._database.reading() as connection:
            return [self._pages(connection, key) for key in keys]

    def slices(self, key: bytes, pages: Sequence[int]) -> list[Bytes] | None:
        """Some pages of a block. Raises StoreError."""
        self.look()
        number = self._index.get(key)
        with self._database.reading() as connection:
            try:
                if number is None or not self._there(connection, number, key):
                    return None
                return _slices(connection, number, key, pages)
            except (StoreDamaged, sqlite3.DatabaseError) as error:
                self._note(error)
                return None

    def whole(self, connection: sqlite3.Connection, key: bytes) -> StoredBlock | None:
        """A block with all that is known of it."""
        found, payload = self._head(connection, key), self._pages(connection, key)
        return None if found is None or payload is None else StoredBlock(found[1], payload)

    def record(self, connection: sqlite3.Connection, key: bytes) -> bytes | None:
        """A record."""
        try:
            row = connection.execute("SELECT record FROM records WHERE key = ?", (key,)).fetchone()
            return None if row is None else unseal(key, row[0])
        except (StoreDamaged, sqlite3.DatabaseError) as error:
            self._note(error)
            return None

    def _head(self, connection: sqlite3.Connection, key: bytes) -> tuple[int, BlockHead] | None:
        number = self._index.get(key)
        if number is None:
            return None
        try:
            row = connection.execute(
                "SELECT head, scores, hits FROM blocks LEFT JOIN heads USING (id) LEFT JOIN scores USING (id)"
                " WHERE id = ?",
                (number,),
            ).fetchone()
            if row is not None:
                return number, head_of(row, key)
        except (StoreDamaged, sqlite3.DatabaseError) as error:
            self._note(error)
            return None
        self._index.discard([key])
        return None

    def _pages(self, connection: sqlite3.Connection, key: bytes) -> Bytes | None:
        number = self._index.get(key)
        if number is None:
            return None
        try:
            if not self._there(connection, number, key):
                return None
            row = connection.execute("SELECT payload FROM payloads WHERE id = ?", (number,)).fetchone()
            return decode(blob_of(row and row[0]), key).payload
        except (StoreDamaged, sqlite3.DatabaseError) as error:
            self._note(error)
            return None

    def _there(self, connection: sqlite3.Connection, number: int, key: bytes) -> bool:
        """Whether a block that the index names is there; if not, others took it away."""
        there = connection.execute("SELECT 1 FROM blocks WHERE id = ?", (number,)).fetchone() is not None
        if not there:
            self._index.discard([key])
        return there

    def _note(self, error: Exception) -> None:
        """Count something that is damaged. Raised again is any other error, and one that says that the file is cut off:
        then what is written would be lost as well.
        """
        if isinstance(error, sqlite3.Error) and (not is_damage(error) or self._database.places.cut_off):
            raise error
        self.damaged += 1


def _slices(connection: sqlite3.Connection, number: int, key: bytes, pages: Sequence[int]) -> list[Bytes]:
    kind = connection.execute("SELECT typeof(payload) FROM payloads WHERE id = ?", (number,)).fetchone()
    if kind != ("blob",):
        raise StoreDamaged(f"block {key[:6].hex()} has no pages")
    with connection.blobopen("payloads", "payload", number, readonly=True) as blob:
        size = header_bytes(blob.read(PREFIX_BYTES))
        blob.seek(0)
        header = Header.parse(blob.read(min(size, len(blob))))
        if header.head.key != key:
            raise StoreDamaged(f"block {header.name} lies where block {key[:6].hex()} should")
        if header.alone or header.blob_bytes != len(blob):
            raise StoreDamaged(f"block {header.name} has {len(blob)} bytes, and its header says otherwise")
        found = []
        for page in pages:
            begin, length = header.page_range(page)
            blob.seek(begin)
            found.append(header.page(page, blob.read(length)))
        return found
