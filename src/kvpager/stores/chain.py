"""A chain of tiers as one store of blocks: what a pager is given."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvpager.errors import ConfigError
from kvpager.ports import Bytes
from kvpager.stats import StoreStats
from kvpager.stored import BlockHead, Erasing, Scores, StoredBlock
from kvpager.stores.backlog import Erase
from kvpager.stores.level import Level
from kvpager.stores.limits import Limits
from kvpager.stores.prefetch import Prefetcher
from kvpager.stores.shared import Far, Shared
from kvpager.stores.tier import Tier

__all__ = ["Chain"]

LOOK_SECONDS = 1.0  # how often a look at the state is one at the nearest tier


class Chain:
    """Tiers, the nearest first, as a stored.BlockStore: nothing that happens to them is raised.

    Writing is behind: each tier has a thread that writes what waits for it. What waits is found as if it were written.
    Reading is done by the owner's thread, tier after tier; blocks found in a farther one are put into the nearer ones.
    Blocks that `prefetch` names are read by a thread of its own. A tier that fails, or is slow, again and again is left
    alone for a while, and every read of it is a miss at once. The last tier may be a far one, which nodes share: there
    go the blocks that its publishing says. What happens is counted in `stats` and logged under
    "kvpager.stores", once for each kind until all is well again, without tokens or keys.
    """

    def __init__(
        self,
        openers: Sequence[Callable[[], Tier]],
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
        far: Far | None = None,
    ) -> None:
        """`openers` open the near tiers; one that fails now is opened later.

        `clock`: seconds, for how long calls take and pauses last; never for what is kept. Raises ConfigError for no
        tiers, and MissingDependency where an opener does.
        """
        if not openers and far is None:
            raise ConfigError("openers: a chain needs at least one tier")
        self._limits = limits if limits is not None else Limits()
        self._levels = [Level(opener, self._limits, clock) for opener in openers]
        self._shared = None if far is None else Shared(far, self._limits, clock, self._near_blocks)
        if self._shared is not None:
            self._levels.append(self._shared.level)
        self._ahead = Prefetcher(self._fetch, self._limits.prefetch_bytes, self._limits.slow_s)
        self._clock = clock
        self._looked = clock()
        self._hits = 0
        self._misses = 0
        self._read_bytes = 0
        self._closed = False

    @property
    def tick(self) -> int:
        """The latest tick that scores in any tier speak of, 0 for none."""
        return max(level.tick for level in self._levels)

    @property
    def room(self) -> int:
        """Bytes of blocks that `put` would take now."""
        return 0 if self._closed else self._levels[0].room

    @property
    def states(self) -> dict[str, str]:
        """Of each tier; the nearest one is looked at once a second for it, so that a lost file is noticed."""
        now = self._clock()
        if not self._closed and not 0 <= now - self._looked < LOOK_SECONDS:
            self._looked = now
            self._levels[0].contains([])
        return {name: level.guard.state for name, level in zip(self._names, self._levels, strict=True)}

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of these blocks are there, as far as the tiers' indexes say."""
        there = [False] * len(keys)
        for level in self._levels:
            rest = [i for i, is_there in enumerate(there) if not is_there]
            for i, is_there in zip(rest, level.contains([keys[i] for i in rest]), strict=True):
                there[i] = is_there
        return there

    def heads(self, keys: Sequence[bytes]) -> list[BlockHead | None]:
        """Heads of blocks; None for a miss. Counts hits and misses."""
        found: list[BlockHead | None] = [None] * len(keys)
        for level in self._levels:
            rest = [i for i, head in enumerate(found) if head is None]
            for i, head in zip(rest, level.heads([keys[i] for i in rest]), strict=True):
                found[i] = head
            missed = sum(found[i] is None for i in rest)
            level.hits += len(rest) - missed
            level.misses += missed
        hits = sum(head is not None for head in found)
        self._hits += hits
        self._misses += len(keys) - hits
        return found

    def get(self, keys: Sequence[bytes]) -> list[Bytes | None]:
        """Pages of blocks, uint8 [pages, page_bytes] each, all checked; None for a miss, which is counted."""
        found = self._ahead.take(keys)
        rest = [i for i, payload in enumerate(found) if payload is None]
        for i, payload in zip(rest, self._fetch([keys[i] for i in rest]), strict=True):
            found[i] = payload
        self._misses += sum(payload is None for payload in found)
        self._read_bytes += sum(payload.nbytes for payload in found if payload is not None)
        return found

    def put(self, blocks: Sequence[StoredBlock]) -> int:
        """Take blocks to be stored; returns how many of the first the nearest tier takes, or has."""
        if self._closed:
            return 0
        if not self._near:
            return self._shared.put(blocks) if self._shared is not None else 0
        taken = self._levels[0].put(blocks)
        for level in self._near[1:]:
            level.put(blocks[:taken])  # one that can't keep up holds nobody else back
        if self._shared is not None:
            self._shared.put(blocks[:taken])
        return taken

    def wants(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of these blocks `put` would keep now."""
        if self._near or self._shared is None:
            return [not is_there for is_there in self._levels[0].contains(keys)]
        return self._shared.wants(keys)

    def publish(self, keys: Sequence[bytes]) -> None:
        """These blocks go to the far tier, whatever is published else; without one nothing happens."""
        if self._shared is not None and not self._closed:
            self._shared.publish(keys, bool(self._near))

    def update(self, news: Sequence[Scores], tick: int) -> list[bytes]:
        """Note newer scores of blocks, and the tick that they speak of; returns blocks that may be offered again."""
        if self._closed:
            return []
        for level in self._levels:
            level.update(news, tick)
        return [] if self._shared is None else self._shared.count(news, bool(self._near))

    def drop(self, keys: Sequence[bytes]) -> None:
        """Forget blocks."""
        self._ahead.forget(keys)
        if self._shared is not None:
            self._shared.forget(keys)
        if not self._closed:
            for level in reversed(self._levels):  # what is read ahead must not come back from a farther one
                level.drop(keys)

    def prefetch(self, keys: Sequence[bytes]) -> None:
        """Blocks that `get` will be asked for soon, the most wanted first."""
        if not self._closed:
            self._ahead.want(keys)

    def load_record(self, key: bytes) -> bytes | None:
        """A record, from the nearest tier that has it; None for a miss."""
        for level in self._levels:
            record = level.load_record(key)
            if record is not None:
                return record
        return None

    def save_record(self, key: bytes, tenant: bytes, record: bytes) -> bool:
        """Take a record to be stored after all blocks that were taken before it; False where no tier takes it."""
        if self._closed:
            return False
        taken = [level.save_record(key, tenant, record) for level in self._levels]
        return any(taken)

    def drop_record(self, key: bytes) -> None:
        """Forget a record."""
        if not self._closed:
            for level in self._levels:
                level.drop_record(key)

    def claim(self, key: bytes) -> bool:
        """Become the one that may write this record, in all tiers; False where another is."""
        for count, level in enumerate(self._levels):
            if not level.claim(key):
                for earlier in self._levels[:count]:
                    earlier.release(key)
                return False
        return True

    def release(self, key: bytes) -> None:
        """Let others claim a record."""
        for level in self._levels:
            level.release(key)

    def erase(self, tenant: bytes) -> Erasing:
        """Begin to forget all of a tenant. It has ended after `erase_s` at the latest, and goes on behind then.

        Counted are blocks and records in the tier that had the most.
        """
        self._ahead.forget()
        if self._shared is not None:
            self._shared.forget()
        works = [] if self._closed else [level.erase(tenant) for level in reversed(self._levels)]
        return _Erasing(works, time.monotonic() + self._limits.erase_s)

    def yields(self, share: float) -> None:
        """The share of a processor that writing may take, below 1 while the owner computes with all of them.

        Blocks are written later then, if there is room.
        """
        for level in self._levels:
            level.writer.yields(share)

    def flush(self, timeout: float) -> bool:
        """Wait until nothing waits to be written, for so many seconds at most; returns whether that is so."""
        ends = time.monotonic() + timeout
        shared = self._shared is None or self._shared.flush(timeout)
        written = [level.writer.flush(max(0.0, ends - time.monotonic())) for level in self._levels]
        return shared and all(written)

    def stats(self) -> StoreStats:
        """Counters of the chain, and sizes of the nearest tier; failures of all, and each tier by itself."""
        tiers = [level.stats() for level in self._levels]
        errors: Counter[str] = Counter()
        for tier in tiers:
            errors.update(tier.errors)
        return replace(
            tiers[0],
            state=next((tier.state for tier in tiers if tier.state != "ok"), "ok"),
            hits=self._hits,
            misses=self._misses,
            read_bytes=self._read_bytes,
            damaged=sum(tier.damaged for tier in tiers),
            errors=dict(errors),
            tiers=dict(zip(self._names, tiers, strict=True)),
        )

    def close(self) -> None:
        """Write what waits, as far as that takes no longer than `close_s`, and close the tiers; idempotent."""
        if self._closed:
            return
        self._closed = True
        ended = self._ahead.stop(self._limits.slow_s)
        if self._shared is not None:
            self._shared.stop(self._limits.slow_s)
        ends = time.monotonic() + self._limits.close_s
        for level in self._levels:
            level.close(max(0.0, ends - time.monotonic()), ended)

    def _fetch(self, keys: Sequence[bytes]) -> list[Bytes | None]:
        """Pages of blocks from the tiers; what a farther one has is put into the nearer ones. Any thread."""
        found: list[Bytes | None] = [None] * len(keys)
        for place, level in enumerate(self._levels):
            rest = [i for i, payload in enumerate(found) if payload is None]
            if not rest:
                break
            for i, payload in zip(rest, level.get([keys[i] for i in rest]), strict=True):
                found[i] = payload
            here = [i for i in rest if found[i] is not None]
            if place and here:
                self._promote(place, [keys[i] for i in here], [found[i] for i in here])
        return found

    @property
    def _names(self) -> list[str]:
        near = ["local", *(f"local-{number}" for number in range(2, len(self._near) + 1))][: len(self._near)]
        return near if self._shared is None else [*near, "shared"]

    @property
    def _near(self) -> list[Level]:
        return self._levels if self._shared is None else self._levels[:-1]

    def _near_blocks(self, keys: Sequence[bytes]) -> list[StoredBlock]:
        """Blocks that near tiers have. Any thread."""
        found: list[StoredBlock] = []
        for level in self._near:
            found += level.blocks(keys)
            there = {block.head.key for block in found}
            keys = [key for key in keys if key not in there]
        return found

    def _promote(self, place: int, keys: Sequence[bytes], payloads: Sequence[Bytes | None]) -> None:
        blocks = [
            StoredBlock(head, payload)
            for head, payload in zip(self._levels[place].heads(keys), payloads, strict=True)
            if head is not None and payload is not None
        ]
        for level in self._levels[:place]:
            level.put(blocks)


class _Erasing:
    """See stored.Erasing."""

    def __init__(self, works: Sequence[Erase], ends: float) -> None:
        self._works, self._ends = works, ends

    @property
    def ended(self) -> bool:
        return all(work.done.is_set() for work in self._works) or time.monotonic() >= self._ends

    def wait(self) -> int:
        for work in self._works:
            work.done.wait(max(0.0, self._ends - time.monotonic()))
        return max((work.count for work in self._works), default=0)
