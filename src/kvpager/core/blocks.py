"""Blocks: rows of the page table, their reference counts, their chain keys, and the prefix index.

A block key is SHA-256 over length-prefixed fields, untruncated: format version, namespace, exact or
approximate with the settings that decide it, the parent block's key, and the block's tokens. Nothing in it
is specific to a process, so that another one finds the same block.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvpager.ports import Bytes
from kvpager.stored import TENANT_BYTES

__all__ = ["Blocks", "KeyMaker", "Name", "Prefix", "fields", "packed", "tenant", "tenant_of"]

_FORMAT = b"kvpager-block-1"


def fields(*parts: bytes) -> bytes:
    """Length-prefixed, so that ("a", "bc") and ("ab", "c") differ."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def packed(tokens: list[int]) -> bytes:
    """Token ids as keys are made of them: little-endian int64."""
    return np.asarray(tokens, "<i8").tobytes()


def tenant_of(root: bytes) -> bytes:
    """16 bytes that tell whose the blocks under a root are, and not what the salt is; zeros without a salt."""
    return hashlib.sha256(fields(_FORMAT, b"tenant", root)).digest()[:TENANT_BYTES] if root else bytes(TENANT_BYTES)


def tenant(salt: bytes) -> bytes:
    """As `tenant_of`, by the salt."""
    return tenant_of(KeyMaker.root(salt))


class KeyMaker:
    """Makes chain keys for one pager: `namespace` and `exact` or `approximate` say what the bytes depend on."""

    def __init__(self, namespace: str, approximate: str) -> None:
        self.namespace = namespace
        self._namespace = namespace.encode("utf-8", "surrogatepass")
        self._numerics = {False: b"exact", True: b"approximate:" + approximate.encode()}

    @staticmethod
    def root(salt: bytes) -> bytes:
        """What stands for the parent of a first block: b"" without a salt, else 32 bytes that are no block's key."""
        return hashlib.sha256(fields(_FORMAT, b"salt", salt)).digest() if salt else b""

    def private(self, root: bytes, parent: bytes, tokens: bytes, pages: Bytes) -> bytes:
        """The 32-byte key of a block that only its own sequence goes on with: of its pages, which say how they came."""
        material = hashlib.sha256(fields(_FORMAT, self._namespace, b"private", root, parent, tokens))
        material.update(np.ascontiguousarray(pages).data)
        return material.digest()

    def key(self, parent: bytes, tokens: bytes, approximate: bool) -> bytes:
        """The 32-byte key of a block with `tokens` (little-endian int64) after the block `parent` (b"" for none)."""
        material = fields(_FORMAT, self._namespace, self._numerics[approximate], parent, tokens)
        return hashlib.sha256(material).digest()


@dataclass
class Name:
    """What the index knows of a full block.

    key, parent  its own and the one of the block before it, or what stands for that; root: of its sequence's first
    depth        which block of its sequence it is
    tokens       its token ids, little-endian int64
    hits         how often it was shared since the store was told
    """

    key: bytes
    parent: bytes
    root: bytes
    depth: int
    tokens: bytes
    approximate: bool
    hits: int = 0


@dataclass(frozen=True)
class Prefix:
    """A run of blocks found for some tokens: their rows and keys, and how many of the first are exact."""

    rows: list[int]
    keys: list[bytes]
    exact: int

    def first(self, count: int) -> Prefix:
        """The first `count` blocks of it."""
        return Prefix(self.rows[:count], self.keys[:count], min(self.exact, count))


class Blocks:
    """Rows, reference counts and the prefix index. Rows that nobody holds any more go to `release`, many at once."""

    most_rows: int | None = None
    """Blocks that are only kept for reuse make way before there are more rows than this."""
    leaving: Callable[[list[int]], None] | None = None
    """Told of rows that are about to be released, while they have their names."""

    def __init__(
        self, keys: KeyMaker, page_size: int, cached_tokens: int, release: Callable[[list[int]], None]
    ) -> None:
        self.keys = keys
        self._page_size = page_size
        self._most_cached = cached_tokens // page_size
        self._release = release
        self._free: list[int] = []
        self._entries: dict[int, Name] = {}
        self._index: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self.references: list[int] = []

    @property
    def rows(self) -> int:
        """Rows ever handed out: the table's least size."""
        return len(self.references)

    @property
    def cached(self) -> int:
        """Full blocks that no sequence holds, kept for reuse."""
        return len(self._cached)

    @property
    def cached_rows(self) -> list[int]:
        """Their rows."""
        return list(self._cached)

    @property
    def nbytes(self) -> int:
        """Bytes of keys, tokens and counts, as the arrays they stand for (not Python's own overhead)."""
        return 8 * self.rows + len(self._entries) * (64 + 8 * self._page_size)

    def take(self) -> int:
        """A row for a new block, with one reference."""
        if not self._free and self.most_rows is not None and self.rows >= self.most_rows:
            self.reclaim()
        if self._free:
            row = self._free.pop()
            self.references[row] = 1
            return row
        self.references.append(1)
        return len(self.references) - 1

    def hold(self, row: int) -> None:
        """One more reference to a block."""
        if self.references[row] == 0:
            del self._cached[row]
        self.references[row] += 1

    def share(self, row: int) -> None:
        """One more reference to a named block, by a sequence that has found it."""
        self.hold(row)
        self._entries[row].hits += 1

    def drop(self, row: int) -> None:
        """One reference less; an indexed block may stay for reuse, any other is released."""
        self.drop_all([row])

    def drop_all(self, rows: list[int]) -> None:
        """As `drop` for several, one after the other; what is released is released together."""
        gone = []
        for row in rows:
            assert self.references[row] > 0, "a block was dropped more often than held"
            self.references[row] -= 1
            if self.references[row]:
                continue
            if row not in self._entries or not self._most_cached:
                gone.append(row)
                continue
            self._cached[row] = None
            if len(self._cached) > self._most_cached:
                gone.append(self._cached.popitem(last=False)[0])
        self._forget(gone)

    def reclaim(self) -> bool:
        """Release the cached block that was left longest ago; False when there is none."""
        if not self._cached:
            return False
        self._forget([self._cached.popitem(last=False)[0]])
        return True

    def unname(self, row: int) -> None:
        """Make a block unfindable: its pages are not what its name says. It is released once nobody holds it."""
        if row in self._cached:
            del self._cached[row]
            self._forget([row])
            return
        self._unindex(row)

    def _unindex(self, row: int) -> None:
        entry = self._entries.pop(row, None)
        if entry is not None and self._index.get(entry.key) == row:
            del self._index[entry.key]

    def _forget(self, rows: list[int]) -> None:
        if not rows:
            return
        if self.leaving is not None:
            self.leaving(rows)
        for row in rows:
            self._unindex(row)
        self._release(rows)
        self._free += rows

    def register(self, row: int, name: Name) -> bool:
        """Name a full block and make it findable; False when it has a name, or another block has this one."""
        if name.key in self._index or row in self._entries:
            return False
        self._index[name.key] = row
        self._entries[row] = name
        return True

    def find(self, key: bytes) -> int | None:
        """The row of the block with this key."""
        return self._index.get(key)

    def name(self, row: int) -> Name | None:
        """A block's name, if it has one."""
        return self._entries.get(row)

    @property
    def named(self) -> list[int]:
        """Rows of all blocks that have a name."""
        return list(self._entries)

    def forget(self, root: bytes) -> int:
        """Make all blocks under `root` unfindable; returns how many there were."""
        rows = [row for row, name in self._entries.items() if name.root == root]
        for row in rows:
            self.unname(row)
        return len(rows)

    def root(self, salt: bytes) -> bytes:
        """The parent of the first blocks under `salt`: what other salts have registered is never found."""
        return self.keys.root(salt)

    def match(self, tokens: list[int], root: bytes = b"") -> Prefix:
        """The longest run of full blocks held for these tokens after `root`, the last token always left out."""
        found = Prefix([], [], 0)
        parent, approximate, exact = root, False, 0
        for start in range(0, (len(tokens) - 1) // self._page_size * self._page_size, self._page_size):
            row = self._find(parent, packed(tokens[start : start + self._page_size]), approximate)
            if row is None:
                break
            entry = self._entries[row]
            parent, approximate = entry.key, entry.approximate
            exact += not approximate
            found.rows.append(row)
            found.keys.append(parent)
        return Prefix(found.rows, found.keys, exact)

    def _find(self, parent: bytes, tokens: bytes, approximate: bool) -> int | None:
        for kind in (False, True):
            if kind >= approximate:  # nothing after an approximate block is exact
                row = self._index.get(self.keys.key(parent, tokens, kind))
                # tokens are compared too, so that even a collision of keys could not serve foreign pages
                if row is not None and self._entries[row].tokens == tokens:
                    return row
        return None

    def check(self, held: dict[int, int]) -> None:
        """Assert that counts are what the sequences hold (row -> times), and each row is held, cached or free."""
        free = set(self._free)
        assert len(free) == len(self._free), "a row stands twice in the free list"
        for row, count in enumerate(self.references):
            assert count == held.get(row, 0), f"block row {row} has {count} references, {held.get(row, 0)} holders"
            places = (count > 0) + (row in self._cached) + (row in free)
            assert places == 1, f"block row {row} stands in {places} places"
        for key, row in self._index.items():
            assert self._entries[row].key == key, "the prefix index names a block with another key"
