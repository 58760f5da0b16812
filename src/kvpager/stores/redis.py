"""Blocks and records in a Redis that several nodes share: bounded, checked whenever they are read, in bounded time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from kvpager.errors import StoreDamaged
from kvpager.ports import Bytes
from kvpager.stored import TENANT_BYTES, BlockHead, Fence, Scores, StoredBlock
from kvpager.stores.codec import encode
from kvpager.stores.header import Header
from kvpager.stores.known import Known
from kvpager.stores.redis_books import BLOCK, RECORD, Books, Entry
from kvpager.stores.redis_claims import CLAIM_S, RedisClaims
from kvpager.stores.redis_client import RedisClient
from kvpager.stores.redis_links import Command, Gone, fenced, redis_py
from kvpager.stores.redis_names import SAVE, STORE, TICK, Names
from kvpager.stores.redis_settings import RedisSettings
from kvpager.stores.redis_url import redis_place
from kvpager.stores.redis_values import as_bytes, as_number, block_of, header_of, learned_by, whole_header
from kvpager.stores.rows import seal, unseal
from kvpager.stores.tier import TierSizes

__all__ = ["RedisStore", "no_fence"]

_log = logging.getLogger("kvpager.stores")
READ_BYTES, WRITE_BYTES = 2**20, 4 * 2**20
"""Of values that one round trip reads or writes; both were measured (docs/decisions/0011-redis-store.md)."""
_HEAD_BYTES = 2048  # how much of a value is read for its header at first; it follows what headers turn out to have
_MOST_TOUCHED = 4096


def no_fence() -> Fence | None:
    """For a writer that nobody else may put out."""
    return None


class RedisStore:
    """A tier (see tier.FarTier) in the Redis at `url`, opened when it is first used.

    A block is one value, written once, never changed; its scores and hits are a small hash beside it. Everything ends
    `ttl_s` after its last use. Values are written behind their entry in the books, see redis_books.

    fence  what a writer must still hold, or None: it is asked before each write, and on one server (not on a cluster)
           checked there in the same script that writes. Who does not hold it any more gets StoreUnavailable, "fenced"
    """

    name = "redis"

    def __init__(
        self,
        url: str,
        settings: RedisSettings | None = None,
        *,
        fence: Callable[[], Fence | None] = no_fence,
        claim_s: float = CLAIM_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigError for the URL, and MissingDependency; nothing is connected yet."""
        self.place = redis_place(url)
        self.settings = settings if settings is not None else RedisSettings()
        redis_py()
        self.client = RedisClient(self.place, self.settings.timeout_s, self.settings.connections)
        self.names = Names(self.place.prefix)
        self.books = Books(self.client, self.names, self.settings.limit_bytes, self.settings.ttl_s)
        self.tick = 0
        self._damaged = 0
        self._fence = fence
        self._claims = RedisClaims(self.client, self.names, self.settings.ttl_s, claim_s)
        self._known = Known(clock)
        self._head_bytes, self._blob_bytes = _HEAD_BYTES, READ_BYTES
        self._touched: dict[bytes, Entry] = {}
        self._lock = threading.Lock()  # of `_touched` and `_damaged`

    @property
    def damaged(self) -> int:
        """Blocks and records that did not match their checksums or keys, since this was made."""
        return self._damaged

    def open(self) -> None:
        """See whether it answers, and what it holds. Raises StoreError."""
        tick = self.client.run([("GET", self._tick_name)])[0]
        self.tick = max(self.tick, as_number(tick))
        self.books.look()

    def probe(self) -> None:
        """See whether reading works again; what was known before is not believed any more. Raises StoreError."""
        self.client.run([("GET", self._tick_name)])
        self._known.forget()

    # -- reading

    def known(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of these blocks are known to be there, without asking."""
        return [is_there is True for is_there in self._known.get(keys)]

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of these blocks are there: as it was lately, or asked for, all together. Raises StoreError."""
        there = self._known.get(keys)
        asked = list(dict.fromkeys(key for key, is_there in zip(keys, there, strict=True) if is_there is None))
        if asked:
            replies = self.client.run([("EXISTS", self.names.block(key)) for key in asked])
            found = {key: reply == 1 for key, reply in zip(asked, replies, strict=True)}
            self._known.note(list(found), list(found.values()))
            there = [found.get(key, is_there) for key, is_there in zip(keys, there, strict=True)]
        return [is_there is True for is_there in there]

    def heads(self, keys: Sequence[bytes]) -> list[BlockHead | None]:
        """Heads of blocks, checked, with what was learned since; no page is read. Raises StoreError.

        That they were found is noted with the next write.
        """
        if not keys:
            return []
        size, names = self._head_bytes, self.names
        replies = self.client.run(
            [("GETRANGE", names.block(key), 0, size - 1) for key in keys]
            + [("HMGET", names.scores(key), "s", "h") for key in keys]
        )
        starts, learned = [as_bytes(reply) for reply in replies[: len(keys)]], replies[len(keys) :]
        longer = [i for i, start in enumerate(starts) if start and whole_header(start) > len(start)]
        if longer:
            sizes = [whole_header(starts[i]) for i in longer]
            self._head_bytes = max(self._head_bytes, *sizes)
            commands: list[Command] = [
                ("GETRANGE", names.block(keys[i]), 0, size - 1) for i, size in zip(longer, sizes, strict=True)
            ]
            for i, reply in zip(longer, self.client.run(commands), strict=True):
                starts[i] = as_bytes(reply)
        found = [self._head(*one) for one in zip(keys, starts, learned, strict=True)]
        self._known.note(keys, [head is not None for head in found])
        return found

    def get(self, keys: Sequence[bytes]) -> list[Bytes | None]:
        """Pages of blocks, uint8 [pages, page_bytes] each, all checked; None for one that is not there.

        Arrays are read-only views of what was read. Raises StoreError.
        """
        found: list[Bytes | None] = []
        while len(found) < len(keys):
            some = keys[len(found) : len(found) + max(1, READ_BYTES // self._blob_bytes)]
            replies = self.client.run([("GET", self.names.block(key)) for key in some])
            blobs = [as_bytes(reply) for reply in replies]
            self._blob_bytes = max((len(blob) for blob in blobs if blob), default=self._blob_bytes)
            blocks = [self._block(key, blob) for key, blob in zip(some, blobs, strict=True)]
            self._known.note(some, [block is not None for block in blocks])
            found += [None if block is None else block.payload for block in blocks]
        return found

    def load_record(self, key: bytes) -> bytes | None:
        """A record by its 32-byte key, checked; None where it is not there. Raises StoreError."""
        sealed = as_bytes(self.client.run([("GET", self.names.record(key))])[0])
        if not sealed:
            return None
        try:
            record = unseal(key, sealed[TENANT_BYTES:])
        except StoreDamaged:
            self._rotten()
            return None
        self._touch(Entry(RECORD, key, len(sealed)))
        return record

    def sizes(self) -> TierSizes:
        """What all nodes have stored, as the books said last; nothing is asked."""
        return self.books.sizes

    # -- writing

    def put(self, blocks: Sequence[StoredBlock]) -> int:
        """Store blocks; returns how many were written.

        One that is there, or whose node of a cluster is gone, is left out. Raises StoreError; what was written before
        stays: a block is whole or not there.
        """
        there = self.contains([block.head.key for block in blocks])
        new = {block.head.key: block for block, is_there in zip(blocks, there, strict=True) if not is_there}
        fence = self._held()
        written = 0
        batch: list[tuple[BlockHead, bytes]] = []
        for block in new.values():
            batch.append((block.head, encode(block, self.settings.compression, self.settings.itemsize)))
            if sum(len(blob) for _, blob in batch) >= WRITE_BYTES:
                written += self._write(batch, fence)
                batch = []
        return written + (self._write(batch, fence) if batch else 0)

    def update(self, news: Sequence[Scores], tick: int) -> None:
        """Set scores, add hits, and note the tick; blocks that are not there are left out. Raises StoreError."""
        self._held()
        there = self.contains([one.key for one in news])
        commands: list[Command] = []
        for one, is_there in zip(news, there, strict=True):
            if is_there:
                name = self.names.scores(one.key)
                commands.append(("HSET", name, "s", seal(one.key, one.scores)))
                commands.append(("HINCRBY", name, "h", one.hits))
                commands.append(("EXPIRE", name, self.settings.ttl_s))
        if tick > self.tick:
            commands.append(("EVAL", TICK, 1, self._tick_name, tick, 2 * self.settings.ttl_s))
        if commands:
            self.client.run(commands, patient=True)
        self.tick = max(self.tick, tick)
        self._flush_touched()

    def drop(self, keys: Sequence[bytes]) -> None:
        """Forget blocks; those that are not there are left out. Raises StoreError."""
        self._held()
        self._known.note(keys, [False] * len(keys))
        self._unlink([(BLOCK, key) for key in keys])
        self.books.forget(BLOCK, keys)

    def save_record(self, key: bytes, tenant: bytes, record: bytes) -> None:
        """Store a record in the place of an older one. Raises StoreError.

        Where another has claimed it since this process did, or holds it, it is left out: that one's is newer.
        """
        self._held()
        value = tenant + seal(key, record)
        self._make_way(self.books.use([Entry(RECORD, key, len(value))]))
        if not self._save(key, value):
            _log.warning("store redis: a record was not saved: another node has claimed it since")

    def drop_record(self, key: bytes) -> None:
        """Forget a record, if it is there, and nobody else has claimed it. Raises StoreError."""
        if self._save(key, b""):
            self.books.forget(RECORD, [key])

    def erase(self, tenant: bytes) -> int:
        """Forget all blocks and records of a tenant; returns how many there were. Raises StoreError.

        All keys are looked through, so that what the books don't know is found too.
        """
        self._held()
        self._known.forget()
        count = 0
        for kind in (BLOCK, RECORD):
            for keys in self.stored_keys(kind):
                gone = [key for key, whose in zip(keys, self.whose(kind, keys), strict=True) if whose == tenant]
                if gone:
                    self._unlink([(kind, key) for key in gone])
                    self.books.forget(kind, gone)
                    count += len(gone)
        return count

    def stored_keys(self, kind: bytes) -> Iterator[list[bytes]]:
        """Keys of all blocks or records that are there, some at a time. Raises StoreError."""
        for names in self.client.keys(self.names.all(kind.decode())):
            keys = [key for name in names if (key := self.names.key(name)) is not None]
            if keys:
                yield keys

    def whose(self, kind: bytes, keys: Sequence[bytes]) -> list[bytes | None]:
        """The tenants of blocks or records; None for those that are gone. Raises StoreError."""
        begin = Header.TENANT_AT if kind == BLOCK else 0
        commands: list[Command] = [("GETRANGE", self._name(kind, key), begin, begin + TENANT_BYTES - 1) for key in keys]
        return [as_bytes(reply) or None for reply in self.client.run(commands, patient=True)]

    def claim(self, key: bytes) -> bool:
        """Become the one that may write this record, until `release`; False where another is. Raises StoreError.

        A claim ends some seconds after its process, or when Redis could not be reached for so long.
        """
        return self._claims.take(key)

    def release(self, key: bytes) -> None:
        """Let others claim a record, soon; nothing happens where it was not claimed here."""
        self._claims.give_back(key)

    def close(self) -> None:
        """Note what was found, end all claims and connections; idempotent. Nothing is raised."""
        try:
            self._flush_touched()
        except Exception:
            _log.debug("store redis: what was used last could not be noted")
        self._claims.close()
        self.client.close()

    # -- inside

    @property
    def _tick_name(self) -> str:
        return f"{self.place.prefix}:tick"

    def _name(self, kind: bytes, key: bytes) -> str:
        return self.names.block(key) if kind == BLOCK else self.names.record(key)

    def _head(self, key: bytes, start: bytes, learned: object) -> BlockHead | None:
        if not start:
            return None
        try:
            header = header_of(key, start)
        except StoreDamaged:
            self._rotten()
            return None
        payload = header.blob_bytes - header.header_bytes
        self._touch(Entry(BLOCK, key, header.blob_bytes, payload, header.head.depth))
        return learned_by(header.head, learned)

    def _block(self, key: bytes, blob: bytes) -> StoredBlock | None:
        if not blob:
            return None
        try:
            return block_of(key, blob)
        except StoreDamaged:
            self._rotten()
            return None

    def _rotten(self) -> None:
        with self._lock:
            self._damaged += 1

    def _touch(self, entry: Entry) -> None:
        with self._lock:
            if len(self._touched) < _MOST_TOUCHED:
                self._touched[entry.kind + entry.key] = entry

    def _flush_touched(self) -> None:
        """Note what was used since the last time: it is kept for longer."""
        with self._lock:
            touched, self._touched = self._touched, {}
        if touched:
            ttl, names = self.settings.ttl_s, self.names
            commands: list[Command] = []
            for entry in touched.values():
                if entry.kind == BLOCK:
                    commands += [("EXPIRE", names.block(entry.key), ttl), ("EXPIRE", names.scores(entry.key), ttl)]
                else:
                    commands.append(("EXPIRE", names.record(entry.key), ttl))
            self.client.run(commands, patient=True)
            self._make_way(self.books.use(touched.values()))

    def _write(self, batch: Sequence[tuple[BlockHead, bytes]], fence: Fence | None) -> int:
        entries = [Entry(BLOCK, head.key, len(blob), head.pages * head.page_bytes, head.depth) for head, blob in batch]
        gone = self.books.use(entries)
        self._make_way(gone)
        keep = [(head.key, blob) for head, blob in batch if (BLOCK, head.key) not in gone]
        commands = [self._store(key, blob, fence) for key, blob in keep]
        replies = self.client.run(commands, patient=True) if commands else []
        written = [not isinstance(reply, Gone) for reply in replies]
        self._known.note([key for key, _ in keep], written)
        return sum(written)

    def _store(self, key: bytes, blob: bytes, fence: Fence | None) -> Command:
        if fence is None or self.place.kind == "cluster":
            return ("SET", self.names.block(key), blob, "EX", self.settings.ttl_s)
        return ("EVAL", STORE, 2, fence.key, self.names.block(key), fence.epoch, blob, self.settings.ttl_s)

    def _save(self, key: bytes, value: bytes) -> bool:
        """Put a record in its place (no bytes: away); returns whether this process may."""
        fence = self._held()
        keys = [self.names.record(key), self.names.claim(key), self.names.last(key)]
        epoch = ""
        if fence is not None and self.place.kind != "cluster":
            keys.append(fence.key)
            epoch = str(fence.epoch)
        command: Command = ("EVAL", SAVE, len(keys), *keys, self._claims.token(key), value, self.settings.ttl_s, epoch)
        return bool(self.client.run([command], patient=True)[0] == 1)

    def _held(self) -> Fence | None:
        """What this writer must hold, and does as far as Redis said just now. Raises StoreError."""
        fence = self._fence()
        if fence is not None and as_bytes(self.client.run([("GET", fence.key)])[0]) != str(fence.epoch).encode():
            raise fenced(self.place)
        return fence

    def _make_way(self, gone: Sequence[tuple[bytes, bytes]]) -> None:
        self._known.note([key for kind, key in gone if kind == BLOCK], [False] * sum(kind == BLOCK for kind, _ in gone))
        self._unlink(gone)

    def _unlink(self, things: Sequence[tuple[bytes, bytes]]) -> None:
        """Take values away, each with what belongs to it."""
        names = self.names
        commands: list[Command] = []
        for kind, key in things:
            if kind == BLOCK:
                commands.append(("UNLINK", names.block(key), names.scores(key)))
            else:
                commands.append(("UNLINK", names.record(key)))
        if commands:
            self.client.run(commands, patient=True)
