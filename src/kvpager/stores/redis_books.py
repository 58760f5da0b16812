"""The books of a store in Redis: what is there, how large, used when; they bound what all nodes together store."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvpager.errors import StoreUnavailable
from kvpager.stores.redis_client import RedisClient
from kvpager.stores.redis_links import Command, Gone
from kvpager.stores.redis_names import FORGET, RESERVE, Names
from kvpager.stores.redis_values import as_number
from kvpager.stores.tier import TierSizes

__all__ = ["BLOCK", "RECORD", "Books", "Entry"]

BLOCK, RECORD = b"b", b"r"
KEY_BYTES_HELD = 512
"""What a key, its place in the books and Redis's own overhead take beside a value, about."""
_SUMS = ("b", "r", "payload", "bytes", "dropped")
_PARTS = 16  # of a cluster: a node that is gone takes its part of the books with it


class Entry(NamedTuple):
    """What the books hold: BLOCK or RECORD and the key, bytes of the value, of pages in it, and a block's depth."""

    kind: bytes
    key: bytes
    size: int
    payload: int = 0
    depth: int = 0


class Books:
    """Least recently used makes way, a block before those that it follows on. Use is counted, never timed.

    They are kept in Redis and changed by scripts there, so all nodes share them; values are written beside them. A node
    that ends in between leaves a value which the books don't know: it ends with its time, or is taken up when it is
    found again. What Redis itself let go of (time, maxmemory) stays in the books until it makes way.
    """

    def __init__(self, client: RedisClient, names: Names, limit_bytes: int, ttl_s: int) -> None:
        self._client, self._names = client, names
        self._parts = _PARTS if client.place.kind == "cluster" else 1
        self._limit_bytes, self._ttl_s = limit_bytes, ttl_s
        self._lock = threading.Lock()
        self._held = [TierSizes() for _ in range(self._parts)]

    @property
    def sizes(self) -> TierSizes:
        """What is held by all nodes, as the books said last."""
        with self._lock:
            held = list(self._held)
        return TierSizes(
            sum(one.blocks for one in held),
            sum(one.records for one in held),
            sum(one.payload_bytes for one in held),
            sum(one.bytes for one in held),
            self._limit_bytes,
            sum(one.dropped for one in held),
        )

    def use(self, entries: Iterable[Entry]) -> list[tuple[bytes, bytes]]:
        """Note that these are there and used now; returns kind and key of what is to make way. Raises StoreError."""
        by_part: dict[int, list[str | bytes | int]] = defaultdict(list)
        for entry in entries:
            size = entry.size + KEY_BYTES_HELD
            by_part[self._part(entry.key)] += [entry.kind + entry.key, size, entry.payload, entry.depth]
        return self._reserve(by_part, self._limit_bytes)

    def shrink(self, limit_bytes: int) -> list[tuple[bytes, bytes]]:
        """Make room until so many bytes are left; returns what is to make way, as `use` does. Raises StoreError."""
        return self._reserve({part: [] for part in range(self._parts)}, limit_bytes)

    def look(self) -> None:
        """Ask for what is held; nothing is written. Raises StoreError."""
        names = [self._names.books(part)[2] for part in range(self._parts)]
        replies = self._client.run([("HMGET", name, *_SUMS) for name in names])
        for part, reply in enumerate(replies):
            if isinstance(reply, list):
                self._note(part, reply)

    def _reserve(self, by_part: dict[int, list[str | bytes | int]], limit_bytes: int) -> list[tuple[bytes, bytes]]:
        limit = limit_bytes // self._parts
        commands: list[Command] = [
            ("EVAL", RESERVE, 3, *self._names.books(part), limit, 2 * self._ttl_s, *told)
            for part, told in by_part.items()
        ]
        gone: list[tuple[bytes, bytes]] = []
        replies = self._client.run(commands, patient=True) if commands else []
        for part, reply in zip(by_part, replies, strict=True):
            if isinstance(reply, Gone):
                continue
            if not isinstance(reply, list) or len(reply) != 2:
                raise StoreUnavailable("io", f"Redis at {self._client.place} answers what makes no sense")
            members, sums = reply
            gone += [(member[:1], member[1:]) for member in members]
            self._note(part, sums)
        return gone

    def _note(self, part: int, sums: Sequence[bytes | None]) -> None:
        blocks, records, payload, held, dropped = map(as_number, sums)
        with self._lock:
            self._held[part] = TierSizes(blocks, records, payload, held, 0, dropped)

    def forget(self, kind: bytes, keys: Sequence[bytes]) -> None:
        """These are not there any more. Raises StoreError."""
        by_part: dict[int, list[bytes]] = defaultdict(list)
        for key in keys:
            by_part[self._part(key)].append(kind + key)
        commands: list[Command] = [
            ("EVAL", FORGET, 3, *self._names.books(part), *members) for part, members in by_part.items()
        ]
        if commands:
            self._client.run(commands, patient=True)

    def _part(self, key: bytes) -> int:
        return key[0] % self._parts
