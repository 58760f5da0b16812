"""What waits to be written to one tier, and counts as written for those who read."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvpager.stored import BlockHead, Scores, StoredBlock

__all__ = ["Backlog", "Drop", "DropRecord", "Erase", "News", "Put", "Save", "Work", "size_of"]


@dataclass(eq=False)
class Put:
    """A block to be stored.

    size   bytes of memory that it holds
    taken  whether it is being written
    """

    block: StoredBlock
    size: int
    taken: bool = False


@dataclass(eq=False)
class Save:
    """A record to be stored."""

    key: bytes
    tenant: bytes
    record: bytes
    tries: int = 0


@dataclass(eq=False)
class Drop:
    """Blocks to be forgotten."""

    keys: list[bytes]
    tries: int = 0


@dataclass(eq=False)
class DropRecord:
    """A record to be forgotten."""

    key: bytes
    tries: int = 0


@dataclass(eq=False)
class Erase:
    """All of a tenant to be forgotten.

    count  how many there were, once `done` is set
    """

    tenant: bytes
    count: int = 0
    done: threading.Event = field(default_factory=threading.Event)


@dataclass(eq=False)
class News:
    """Newer scores of blocks, at most one for each, and the latest tick."""

    scores: list[Scores]
    tick: int


T = TypeVar("T")
Work = list[Put] | Save | Drop | DropRecord | Erase | News
_MOST_NEWS = 1024  # they wait for a pause between blocks, until there are so many


def size_of(block: StoredBlock) -> int:
    """Bytes of memory that a block holds while it waits."""
    head = block.head
    return block.payload.nbytes + len(head.tokens) + len(head.digest) + len(head.scores)


class Backlog:
    """Blocks and records in the order they came, and what is to be forgotten, which goes first.

    Forgetting a thing also calls off what waits of it, so that it may overtake all that waits; what comes after it
    is written after it. What has been taken to be written still counts as waiting until it is `done`.

    Safe to use from several threads; one of them `take`s. `changed` is notified when there is more to do or less.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.bytes = 0
        self.taken: Work | None = None
        self._blocks: dict[bytes, Put] = {}
        self._records: dict[bytes, Save] = {}
        self._writes: deque[Put | Save] = deque()
        self._forgets: deque[Drop | DropRecord | Erase] = deque()
        self._gone: dict[bytes, Drop] = {}
        self._gone_records: dict[bytes, DropRecord] = {}
        self._erased: dict[bytes, Erase] = {}
        self._leaving: set[bytes] = set()  # records that others may claim once what waits of them is written
        self._news: dict[bytes, Scores] = {}
        self._tick = 0
        self._told_tick = 0
        self._telling: dict[bytes, Scores] = {}  # news that are being written

    # ---- what those who read see

    @property
    def count(self) -> int:
        """Blocks that wait."""
        return len(self._blocks)

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing is being written."""
        with self.changed:
            return self.taken is None and not (self._writes or self._forgets or self._has_news())

    @property
    def forgets(self) -> bool:
        """Whether something is to be forgotten."""
        return bool(self._forgets)

    @property
    def tick(self) -> int:
        """The latest tick that was told, 0 for none."""
        return self._tick

    def block(self, key: bytes) -> StoredBlock | None:
        """A block that waits."""
        put = self._blocks.get(key)
        return None if put is None else put.block

    def head(self, key: bytes) -> BlockHead | None:
        """The head of a block that waits, with the newest scores."""
        put = self._blocks.get(key)
        return None if put is None else self._renewed(put.block.head)

    def heads(
        self, keys: Sequence[bytes], read: Callable[[Sequence[bytes]], list[BlockHead | None]], wait_s: float
    ) -> list[BlockHead | None]:
        """Heads that `read` reads from the tier, as they will be when all that waits is written.

        Nothing else is begun to be written meanwhile, and news of these blocks that are just being written are waited
        for, at most for `wait_s`: what is read would else have them already, or not yet.
        """
        with self.changed:
            if not self._telling.keys().isdisjoint(keys):
                self.changed.wait_for(lambda: self._telling.keys().isdisjoint(keys), wait_s)
            return [None if head is None else self._sees(head) for head in read(keys)]

    def hides(self, key: bytes) -> bool:
        """Whether the tier's own block of this key is to be forgotten."""
        return key in self._gone

    def record(self, key: bytes) -> tuple[bool, bytes | None]:
        """Whether it is known here how a record will be, and how: None for one that is to be forgotten."""
        save = self._records.get(key)
        if save is not None:
            return True, save.record
        return key in self._gone_records, None

    # ---- claims

    def hold_on(self, key: bytes) -> bool:
        """Whether a record's claim is to be kept until what waits of it is written; then `left` tells it."""
        with self.changed:
            waits = key in self._records or key in self._gone_records
            if waits:
                self._leaving.add(key)
            return waits

    def take_back(self, key: bytes) -> bool:
        """Whether a record's claim was to be given up, and is not any more."""
        with self.changed:
            held = key in self._leaving
            self._leaving.discard(key)
            return held

    def left(self, give_up: Callable[[bytes], None]) -> None:
        """Give up the claims of records of which nothing waits any more."""
        with self.changed:
            free = self._leaving - self._records.keys() - self._gone_records.keys()
            self._leaving -= free
            for key in free:
                give_up(key)

    # ---- what comes in

    def put(self, block: StoredBlock, size: int) -> None:
        """A block that is not there."""
        put = Put(block, size)
        with self.changed:
            self._blocks[block.head.key] = put
            self._forget_news([block.head.key])  # of one that was not there
            self._writes.append(put)
            self.bytes += size
            self.changed.notify_all()

    def save(self, key: bytes, tenant: bytes, record: bytes) -> None:
        """A record, in the place of an older one."""
        save = Save(key, tenant, record)
        with self.changed:
            self._records[key] = save
            self._writes.append(save)
            self.bytes += len(record)
            self.changed.notify_all()

    def update(self, news: Sequence[Scores], tick: int) -> None:
        """Newer scores: those of blocks that wait go into their heads."""
        with self.changed:
            self._tick = max(self._tick, tick)
            for new in news:
                put = self._blocks.get(new.key)
                if put is not None and not put.taken:
                    head = put.block.head
                    put.block = StoredBlock(head.rescored(new.scores, head.hits + new.hits), put.block.payload)
                    continue
                _merge(self._news, new)
            self.changed.notify_all()

    def drop(self, keys: Sequence[bytes]) -> None:
        """Forget blocks."""
        work = Drop(list(keys))
        with self.changed:
            self._call_off(set(keys))
            self._forget_news(keys)
            self._gone.update(dict.fromkeys(keys, work))
            self._forgets.append(work)
            self.changed.notify_all()

    def drop_record(self, key: bytes) -> None:
        """Forget a record."""
        work = DropRecord(key)
        with self.changed:
            self._call_off_records({key})
            self._gone_records[key] = work
            self._forgets.append(work)
            self.changed.notify_all()

    def erase(self, tenant: bytes) -> Erase:
        """Forget all of a tenant; what waits of it is forgotten now, and counted."""
        work = Erase(tenant)
        with self.changed:
            blocks = {key for key, put in self._blocks.items() if put.block.head.tenant == tenant}
            records = {key for key, save in self._records.items() if save.tenant == tenant}
            work.count = self._call_off(blocks) + self._call_off_records(records)
            self._erased[tenant] = work
            self._forgets.append(work)
            self.changed.notify_all()
        return work

    # ---- what goes out

    def take(self, most_bytes: int) -> Work | None:
        """What is to be done next: blocks of up to so many bytes, but at least one, at once; None for nothing."""
        with self.changed:
            self.taken = self._next(most_bytes)
            return self.taken

    def ripe(self, most_bytes: int) -> bool:
        """Whether there is something to do that nothing is gained by waiting for: not a few blocks, or news."""
        with self.changed:
            return bool(self._forgets) or self.bytes >= most_bytes or bool(self._records)

    def done(self) -> None:
        """What was taken has been written, or is given up: it waits no longer."""
        with self.changed:
            work, self.taken = self.taken, None
            if isinstance(work, list):
                for put in work:
                    self.bytes -= put.size
                    _remove(self._blocks, put.block.head.key, put)
            elif isinstance(work, Save):
                self.bytes -= len(work.record)
                _remove(self._records, work.key, work)
            elif isinstance(work, Drop):
                for key in work.keys:
                    _remove(self._gone, key, work)
            elif isinstance(work, DropRecord):
                _remove(self._gone_records, work.key, work)
            elif isinstance(work, Erase):
                _remove(self._erased, work.tenant, work)
                work.done.set()
            elif work is not None:
                self._telling.clear()
                self._told_tick = work.tick
            self.changed.notify_all()

    def keep(self) -> None:
        """What was taken could not be written now: it comes first again."""
        with self.changed:
            work, self.taken = self.taken, None
            if isinstance(work, list):
                for put in reversed(work):
                    put.taken = False
                    if self._blocks.get(put.block.head.key) is put:
                        self._writes.appendleft(put)
                    else:
                        self.bytes -= put.size  # called off meanwhile
            elif isinstance(work, Save):
                if self._records.get(work.key) is work:
                    self._writes.appendleft(work)
                else:
                    self.bytes -= len(work.record)
            elif isinstance(work, News):
                later, self._news, self._telling = self._news, self._telling, {}
                for new in later.values():
                    _merge(self._news, new)
            elif work is not None:
                self._forgets.appendleft(work)
            self.changed.notify_all()

    def _next(self, most_bytes: int) -> Work | None:
        if self._forgets:
            return self._forgets.popleft()
        if len(self._news) >= _MOST_NEWS:
            return self._take_news()
        puts: list[Put] = []
        size = 0
        while self._writes:
            work = self._writes[0]
            if isinstance(work, Save):
                if not puts:
                    self._writes.popleft()
                    return work
                break
            if puts and size + work.size > most_bytes:
                break
            self._writes.popleft()
            work.taken = True
            puts.append(work)
            size += work.size
        if puts:
            return puts
        return self._take_news() if self._has_news() else None

    def _take_news(self) -> News:
        self._telling, self._news = self._news, {}
        return News(list(self._telling.values()), self._tick)

    def _has_news(self) -> bool:
        return bool(self._news) or self._tick > self._told_tick

    def _forget_news(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._news.pop(key, None)
            self._telling.pop(key, None)

    def _sees(self, head: BlockHead) -> BlockHead | None:
        """The tier's head of a block as it will be."""
        gone = head.key in self._gone or head.tenant in self._erased
        return None if gone else self._renewed(head)

    def _renewed(self, head: BlockHead) -> BlockHead:
        """With the scores that are to be written."""
        for news in (self._telling.get(head.key), self._news.get(head.key)):
            if news is not None:
                head = head.rescored(news.scores, head.hits + news.hits)
        return head

    def _call_off(self, keys: set[bytes]) -> int:
        """Blocks are not to be written any more; returns how many that spares (what is being written, it does not)."""
        off = {put for key in keys if (put := self._blocks.pop(key, None)) is not None and not put.taken}
        if off:
            self._writes = deque(work for work in self._writes if work not in off)
            self.bytes -= sum(put.size for put in off)
        return len(off)

    def _call_off_records(self, keys: set[bytes]) -> int:
        """The same for records."""
        spared = sum(self._records.pop(key) is not self.taken for key in keys & self._records.keys())
        off = {work for work in self._writes if isinstance(work, Save) and work.key in keys}
        if off:
            self._writes = deque(work for work in self._writes if work not in off)
            self.bytes -= sum(len(save.record) for save in off)
        return spared


def _merge(news: dict[bytes, Scores], new: Scores) -> None:
    """Put newer scores in the place of older ones; hits add up."""
    older = news.get(new.key)
    hits = new.hits + (0 if older is None else older.hits)
    news[new.key] = Scores(new.key, new.scores, hits)


def _remove(items: dict[bytes, T], key: bytes, item: T) -> None:
    """Take an item out, if it is still the one of this key."""
    if items.get(key) is item:
        del items[key]
