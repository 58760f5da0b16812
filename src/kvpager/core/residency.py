"""Moving pages between frames and swap: faults, evictions, write-behind, release."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import numpy.typing as npt

from kvpager.config import PagerConfig
from kvpager.core.pagetable import ABSENT, PageTable
from kvpager.core.policies import Policy
from kvpager.core.pool import FramePool
from kvpager.core.scorer import AttentionScorer
from kvpager.core.victims import Clock, Victims
from kvpager.errors import PageLost, SwapError
from kvpager.ports import Bytes, FrameStorage, IntArray, Swap
from kvpager.stats import Latencies

__all__ = ["Clock", "Counters", "Residency"]

WRITE_BATCH = 1024  # pages written to swap at once, so that a write-behind needs little memory


@dataclass
class Counters:
    """What has happened so far; see stats.PagerStats for the words."""

    recalls: int = 0
    evictions: int = 0
    discards: int = 0
    swap_writes: int = 0
    faults: int = 0
    tiles: int = 0
    pages_attended: int = 0
    prefix_tokens_hit: int = 0
    store_tokens_hit: int = 0
    store_pages: int = 0
    store_lost: int = 0
    coverage_sum: float = 0.0
    most_tokens: int = 0


class Residency:
    """Which pages are in the pool, and how others get in and out.

    `give_up(count)` is asked for frames in discard mode, where nothing can be evicted. `reclaim()` lets go of one
    block that is only kept for reuse, and says whether there was one. `bring(rows)`, where there is a store, has it
    write blocks' pages to swap that are nowhere else (see `adopt`), and raises PageLost for those that it has lost.
    """

    bring: Callable[[IntArray], None] | None = None

    def __init__(
        self,
        config: PagerConfig,
        table: PageTable,
        pool: FramePool,
        storage: FrameStorage,
        swap: Swap | None,
        policy: Policy,
        scorer: AttentionScorer,
        give_up: Callable[[int], None],
        reclaim: Callable[[], bool],
    ) -> None:
        self.pool, self.storage, self.swap = pool, storage, swap
        self.policy, self.scorer = policy, scorer
        self.table = table
        self.clock = Clock()
        self.counters = Counters()
        self.latencies = Latencies()
        self._heads = np.arange(table.heads)
        self._victims = Victims(pool, table, policy, scorer, self.clock, config.seed)
        self._give_up, self._reclaim = give_up, reclaim
        # below this many free frames, new pages are written to swap as they fill, once anything had to leave
        self._watermark = pool.frames // 8

    @property
    def nbytes(self) -> int:
        """Bytes of the pool's books, and of the order in which pages are to leave."""
        return self.pool.nbytes + self._victims.nbytes

    def place(self, rows: IntArray, layer: int) -> IntArray:
        """Frames for the new pages of all heads of `rows` in `layer`: int64 [n, H], not evictable yet.

        Raises PoolExhausted, or SwapError when victims can't be written, with nothing placed.
        """
        flat = self.table.flat(rows[:, None], layer, self._heads)
        frames = self.pool.allocate(flat.ravel(), self.make_room).reshape(flat.shape)
        self.table.frame[rows, layer] = frames
        return frames

    def fault(self, flat: IntArray) -> tuple[IntArray, IntArray]:
        """Bring pages (flat indices, [n]) into the pool together: their frames, and the indices of those absent before.

        Made for thousands of pages at once, of one sequence or of a whole batch (see `room`); a page may stand in
        `flat` several times, as sequences that share a block want it. They stay there until the next call that needs
        room; nothing that runs needs to be pinned for it. Raises PageLost, PoolExhausted or SwapError with nothing
        brought in; pages that made way for them stay readable in swap.
        """
        table = self.table.frame.reshape(-1)
        frames = table[flat].astype(np.int64)
        absent = (frames == ABSENT).nonzero()[0]
        if absent.size:
            begun = perf_counter()
            back = flat[absent]
            self._recall(self._once(back), frames[frames != ABSENT])
            frames[absent] = table[back]
            self.table.expired.reshape(-1)[back // self.table.heads] = False
            self.latencies.fault.add(perf_counter() - begun)
        return frames, absent

    def _once(self, flat: IntArray) -> IntArray:
        """Absent pages, each once: their places in the table tell twins apart faster than sorting does."""
        table, marks = self.table.frame.reshape(-1), np.arange(len(flat), dtype=np.int32)
        table[flat] = marks
        last = table[flat] == marks
        table[flat] = ABSENT
        return flat if last.all() else flat[last]

    def _recall(self, flat: IntArray, needed: IntArray) -> None:
        """Read absent pages [n], each once, back into frames; the frames `needed` beside them are not taken."""
        assert self.swap is not None, "a page is absent though nothing is ever evicted"
        table, pool = self.table, self.pool
        places = table.frame.reshape(-1)
        elsewhere = flat[table.slot.reshape(-1)[flat] == ABSENT]
        if elsewhere.size:
            assert self.bring is not None, "a page is neither in the pool nor in swap"
            self.bring(np.unique(elsewhere // (table.layers * table.heads)))
            came = places[flat] != ABSENT
            needed = np.concatenate([needed, places[flat[came]]])
            flat = flat[~came]
            self.counters.recalls += int(came.sum())
        slots = table.slot.reshape(-1)[flat].astype(np.int64)
        pool.pinned[needed] = True
        try:
            taken = pool.allocate(flat, self.make_room)
        finally:
            pool.pinned[needed] = False
        try:
            if self.storage.memory is None:
                self.storage.load(taken, self.swap.read(slots))
            else:
                self.swap.read(slots, self.storage.memory, taken)
        except BaseException as error:
            pool.free(taken)
            if isinstance(error, PageLost):
                # a swap that doesn't say which slots: any of these pages may be the one
                gone = flat[np.isin(slots, error.slots)] if error.slots else flat
                error.rows = tuple(np.unique(gone // (table.layers * table.heads)).tolist())
            raise
        places[flat] = taken
        pool.evictable[taken] = True
        self.counters.recalls += len(taken)
        self.counters.faults += 1

    def prefetch(self, flat: IntArray) -> None:
        """Tell swap which of these pages [n] will be read soon."""
        if self.swap is not None:
            absent = flat[self.table.frame.reshape(-1)[flat] == ABSENT]
            if absent.size:
                self.swap.prefetch(self.table.slot.reshape(-1)[absent].astype(np.int64))

    def make_room(self, count: int) -> None:
        """Evict up to `count` pages, those of least score; dirty ones are written to swap first.

        Where swap can take no more, only clean pages leave; where there are too few of them, blocks that are only
        kept for reuse give back their frames and slots. SwapError when that is not enough either.
        """
        if self.swap is None:
            self._give_up(count)
            return
        wanted = self.pool.free_count + count
        while (short := wanted - self.pool.free_count) > 0:
            frames = self._victims.least(short)
            try:
                self._write(frames)
            except SwapError:
                victims = self.pool.victims()
                frames = self._victims.among(victims[self._clean(victims)], short)
                if len(frames) < short:
                    if self._reclaim():
                        continue
                    raise
            self.leave(frames)
            return

    def _clean(self, frames: IntArray) -> npt.NDArray[np.bool_]:
        """Which frames' pages swap holds already."""
        clean: npt.NDArray[np.bool_] = self.table.slot.reshape(-1)[self.pool.pages(frames)] != ABSENT
        return clean

    def _write(self, frames: IntArray) -> None:
        """Write those of the frames to swap that it does not hold yet."""
        assert self.swap is not None
        slots = self.table.slot.reshape(-1)
        dirty = frames[~self._clean(frames)]
        for start in range(0, len(dirty), WRITE_BATCH):
            batch = dirty[start : start + WRITE_BATCH]
            slots[self.pool.pages(batch)] = self._put(batch)
            self.counters.swap_writes += len(batch)

    def _put(self, frames: IntArray) -> IntArray:
        """Write frames to swap; returns their slots."""
        assert self.swap is not None
        memory = self.storage.memory
        return self.swap.write(self.storage.dump(frames)) if memory is None else self.swap.write(memory, frames)

    def write_behind(self) -> None:
        """Make pages clean ahead of need, once pages have had to leave; a failing swap is left for the eviction."""
        if self.swap is not None and self.counters.evictions and self.pool.free_count < self._watermark:
            try:
                self._write(self.pool.victims())
            except SwapError:
                # nothing is lost: the pages stay in their frames, and an eviction that needs one will say so
                return

    def adopt(self, row: int, pages: Bytes) -> None:
        """Take in a block's pages that came from elsewhere, uint8 [layers * H, page_bytes]: those that are nowhere yet.

        They go to frames while plenty are free, else to swap. Raises SwapError with nothing changed, but that blocks
        kept for reuse may have made way.
        """
        assert self.swap is not None
        frames, slots = self.table.frame[row].reshape(-1), self.table.slot[row].reshape(-1)
        missing = np.flatnonzero((frames == ABSENT) & (slots == ABSENT))
        if self.pool.free_count - len(missing) > self._watermark:
            taken = self.pool.allocate(row * len(frames) + missing)
            self.storage.load(taken, pages[missing] if len(missing) < len(pages) else pages)
            frames[missing] = taken
            self.pool.evictable[taken] = True
            return
        while True:
            try:
                slots[missing] = self.swap.write(pages, missing)
                break
            except SwapError:
                if not self._reclaim():
                    raise
        self.counters.swap_writes += len(missing)

    def pages_of(self, row: int) -> Bytes:
        """A copy of a full block's pages, uint8 [layers * H, page_bytes], from frames and swap. Raises PageLost."""
        frames, slots = (table[row].reshape(-1).astype(np.int64) for table in (self.table.frame, self.table.slot))
        resident = frames != ABSENT
        if resident.all():
            return self.storage.dump(frames)
        assert self.swap is not None, "a page is absent though nothing is ever evicted"
        pages = np.empty((len(frames), self.storage.page_bytes), np.uint8)
        pages[resident] = self.storage.dump(frames[resident])
        absent = np.flatnonzero(~resident)
        self.swap.read(slots[absent], pages, absent)
        return pages

    def store(self, opened: IntArray, full: IntArray) -> IntArray:
        """Write frames to swap: all of `opened`, whose slots are returned, and of `full` those it does not hold yet.

        Nothing leaves the pool. Raises SwapError with nothing changed.
        """
        assert self.swap is not None
        slots = self.table.slot.reshape(-1)
        dirty = self.pool.pages(full[~self._clean(full)])
        stash = self.swap.write(self.storage.suspend(opened)) if opened.size else np.empty(0, np.int64)
        try:
            self._write(full)
        except SwapError:
            undone = dirty[slots[dirty] != ABSENT]
            self.swap.free(np.concatenate([stash, slots[undone]]))
            slots[undone] = ABSENT
            self.counters.swap_writes -= len(undone)
            raise
        self.counters.swap_writes += len(opened)
        return stash

    def restore(self, flat: IntArray, stash: IntArray) -> None:
        """Open pages [n] that `store` wrote come back into frames, and their slots are free.

        Raises PoolExhausted, PageLost or SwapError with nothing changed.
        """
        assert self.swap is not None
        if not flat.size:
            return
        pieces = self.swap.read(stash)
        self.storage.resume(self.reopen(flat), pieces)
        self.swap.free(stash)
        self.counters.recalls += len(flat)

    def reopen(self, flat: IntArray) -> IntArray:
        """Frames [n] for open pages [n], which the caller fills. Raises PoolExhausted or SwapError, nothing changed."""
        frames = self.pool.allocate(flat, self.make_room)
        self.table.frame.reshape(-1)[flat] = frames
        return frames

    def leave(self, frames: IntArray) -> None:
        """Take pages that swap holds out of the pool."""
        flat = self.pool.pages(frames)
        self.table.frame.reshape(-1)[flat] = ABSENT
        np.add.at(self.table.left, flat // (self.table.layers * self.table.heads), 1)
        self.pool.free(frames)
        self.counters.evictions += len(frames)

    def release(self, rows: IntArray, layer: int | slice = slice(None)) -> None:
        """Give back the frames and slots of blocks that nobody holds, or of their pages in one layer."""
        frames, slots = self.table.frame[rows, layer], self.table.slot[rows, layer]
        resident, stored = (held[held != ABSENT].astype(np.int64) for held in (frames, slots))
        if resident.size:
            self.pool.free(resident)
            self.storage.finish(resident)
        if stored.size and self.swap is not None:
            self.swap.free(stored)
        self.table.clear(rows, layer)

    def free(self, flat: IntArray) -> None:
        """Give back the frames of pages that nobody sees any more (discard mode), or that were parked while open."""
        frames = self.table.frame.reshape(-1)
        gone = frames[flat].astype(np.int64)
        self.storage.finish(gone)
        self.pool.free(gone)
        frames[flat] = ABSENT

    def check(self, beside: int = 0) -> None:
        """Assert that frames, the page table and swap agree; so many slots are in use `beside` the table's."""
        self.pool.check()
        frames = self.table.frame.reshape(-1)
        resident = np.flatnonzero(frames != ABSENT)
        assert len(resident) == self.pool.used, f"{len(resident)} pages resident, {self.pool.used} frames in use"
        owners = self.pool.pages(frames[resident].astype(np.int64))
        assert (owners == resident).all(), "the page table and the pool disagree on a frame"
        slots = self.table.slot[self.table.slot != ABSENT]
        assert len(np.unique(slots)) == len(slots), "two pages have one slot in swap"
        if self.swap is not None:
            held = len(slots) + beside
            assert held == self.swap.used, f"{held} pages in swap, {self.swap.used} slots in use"
