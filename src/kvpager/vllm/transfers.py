"""The worker's side: blocks out of vLLM's cache into the store, and back."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence

from kvpager.stored import BlockHead, BlockStore, Scores, StoredBlock
from kvpager.vllm.counts import Counts
from kvpager.vllm.pages import Pages
from kvpager.vllm.plan import Load, Plan, Save

__all__ = ["Transfers"]

_log = logging.getLogger("kvpager.vllm")
_AT_ONCE = 4  # blocks a read
_SHARE = 0.02  # of a processor, for writing while answers are computed: each step waits for all processors
_LOOK_S = 1.0  # the store is asked for its sizes no more often
_IDLE_S = 0.01  # a step that computes nothing waits so long for what is being loaded


class Transfers:
    """Carries plans out, one a step, in the order `begin`, (vLLM's forward pass), `load`, `save`, `take_*`.

    store   what is saved into and loaded from; closed by `close`
    pages   vLLM's blocks
    rank    of this worker, by which it chooses among keys
    yields  told as each step begins what share of a processor writing may take until the next one does: 1 for all
    clock   seconds, for what is counted

    All methods belong to the worker's thread; one thread of its own loads.
    """

    def __init__(
        self,
        store: BlockStore,
        pages: Pages,
        rank: int = 0,
        yields: Callable[[float], None] = lambda share: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = Counts()
        self._store, self._pages, self._rank, self._yields, self._clock = store, pages, rank, yields, clock
        self._looked = -_LOOK_S
        self._offered: deque[Save] = deque()
        self._whole_room = store.room
        self._changed = threading.Condition()
        self._loads: deque[Load] = deque()
        self._going: dict[str, bool] = {}  # requests whose loads have not ended; whether they are called off
        self._ended: set[str] = set()
        self._lost: set[int] = set()
        self._told_lost: set[int] = set()  # those of them whose requests `take_loaded` has told
        self._closing = False
        self._thread: threading.Thread | None = None

    # -- a step

    def begin(self, plan: Plan) -> None:
        """Before vLLM fills blocks anew: what is left of requests that have ended is saved now, or never."""
        self._yields(1.0 if plan.idle else 0.0 if plan.prompts else _SHARE)
        ended = set(plan.ended)
        if not ended:
            return
        with self._changed:
            self._going.update({name: True for name in ended if name in self._going})
        if any(save.request in ended for save in self._offered):
            self._save()
            left = [save for save in self._offered if save.request not in ended]
            self.counts.add("skipped_blocks", len(self._offered) - len(left))
            self._offered = deque(left)

    def load(self, plan: Plan) -> None:
        """Begin what is to be loaded. A step with nothing else to do waits a moment for it, so that it doesn't spin."""
        with self._changed:
            for load in plan.loads:
                self._loads.append(load)
                self._going[load.request] = False
            if self._loads and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvpager-vllm-loader", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            if plan.idle and self._going:
                self._changed.wait_for(lambda: bool(self._ended), _IDLE_S)

    def save(self, plan: Plan) -> None:
        """Copy out what is full after this step's forward pass, as far as the store has room."""
        self._offered += plan.saves
        self._save()

    def take_loaded(self) -> set[str]:
        """Requests whose loads have ended since the last call, well or not."""
        with self._changed:
            ended, self._ended = self._ended, set()
            self._told_lost |= self._lost
            self._lost = set()
            return ended

    def take_lost(self) -> set[int]:
        """Numbers of the blocks that could not be loaded, each once: of loads that `take_loaded` has told have ended.

        One that ends between the two calls is told by the next pair: a loss and its load's end belong to one step.
        """
        with self._changed:
            lost, self._told_lost = self._told_lost, set()
            return lost

    def take_counts(self) -> dict[str, float]:
        """What happened since the last call, see counts.COUNTERS and GAUGES; empty for nothing."""
        now = self._clock()
        if now - self._looked >= _LOOK_S:
            self._looked = now
            self._look()
        return self.counts.take()

    def close(self) -> None:
        """End loading, write what waits, and close the store; idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._store.close()

    # -- saving

    def _save(self) -> None:
        while self._offered:
            save = self._offered[0]
            key = save.keys[self._rank]
            if not self._store.contains([key])[0]:
                room = self._store.room
                if room < min(self._pages.nbytes + len(save.tokens), self._whole_room) or not room:
                    return
                if not self._store.put([self._block(save, key)]):
                    return
                self.counts.add("saved_blocks", 1)
                self.counts.add("saved_bytes", self._pages.nbytes)
            self._offered.popleft()

    def _block(self, save: Save, key: bytes) -> StoredBlock:
        pages = self._pages
        head = BlockHead(
            key=key,
            parent=save.parents[self._rank],
            tenant=save.tenant,
            depth=save.depth,
            tokens=save.tokens,
            approximate=False,
            layout=pages.layout,
            pages=pages.count,
            page_bytes=pages.page_bytes,
        )
        return StoredBlock(head, pages.read(save.block))

    # -- loading, in its own thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or bool(self._loads))
                if self._closing:
                    return
                load = self._loads.popleft()
            began = self._clock()
            try:
                done = self._fill(load)
            except Exception:  # vLLM waits for this request: it must end whatever happens
                _log.exception("a load of %d blocks failed; they are computed", len(load.blocks))
                done = 0
            self.counts.add("load_seconds", self._clock() - began)
            with self._changed:
                called_off = self._going.pop(load.request)
                if not called_off:
                    self._lost.update(load.blocks[done:])
                    self.counts.add("lost_blocks", len(load.blocks) - done)
                self._ended.add(load.request)
                self._changed.notify_all()
            news = [Scores(ranks[self._rank], b"", 1) for ranks in load.keys[:done]]
            self._store.update(news, self._store.tick)

    def _fill(self, load: Load) -> int:
        """Read blocks, the first first; returns how many are there, all before the first that is not."""
        for start in range(0, len(load.blocks), _AT_ONCE):
            if self._called_off(load.request):
                return start
            part = slice(start, start + _AT_ONCE)
            keys = [ranks[self._rank] for ranks in load.keys[part]]
            filled = self._fill_some(keys, load.blocks[part])
            self.counts.add("loaded_blocks", filled)
            self.counts.add("loaded_bytes", filled * self._pages.nbytes)
            if filled < len(load.blocks[part]):
                return start + filled
        return len(load.blocks)

    def _fill_some(self, keys: Sequence[bytes], blocks: Collection[int]) -> int:
        pages = self._pages
        heads = self._store.heads(keys)
        payloads = self._store.get(keys)
        for done, (key, block, head, payload) in enumerate(zip(keys, blocks, heads, payloads, strict=True)):
            if head is None or payload is None:
                return done
            if head.layout != pages.layout or payload.shape != (pages.count, pages.page_bytes):
                self._store.drop([key])
                return done
            pages.write(block, payload)
        return len(blocks)

    def _called_off(self, request: str) -> bool:
        with self._changed:
            return self._closing or self._going[request]

    def _look(self) -> None:
        stats = self._store.stats()
        self.counts.total("stored_blocks", stats.stored)
        self.counts.total("damaged_blocks", stats.damaged)
        self.counts.total("store_errors", sum(stats.errors.values()))
        self.counts.set(
            {
                "store_bytes": stats.bytes,
                "store_blocks": stats.blocks,
                "waiting_blocks": stats.waiting,
                "store_usable": int(stats.state == "ok"),
            }
        )
