"""The parts of one pager, wired together, and their sizes."""

from __future__ import annotations

import numpy as np

from kvpager.config import DEFAULT_POOL_BYTES, KVShape, PagerConfig, parse_size
from kvpager.core.attention import Attender
from kvpager.core.blocks import Blocks, KeyMaker
from kvpager.core.digest import make_digest
from kvpager.core.keeping import Keeper
from kvpager.core.pagetable import ABSENT, PageTable, grown
from kvpager.core.policies import make
from kvpager.core.pool import FramePool
from kvpager.core.residency import Residency
from kvpager.core.scorer import AttentionScorer
from kvpager.core.sequence import Sequence, Step
from kvpager.errors import ConfigError, PoolExhausted
from kvpager.ports import Digest, IntArray, Kernel, Swap
from kvpager.stored import BlockStore
from kvpager.swap import SLAB_BYTES, open_swap

__all__ = ["State", "approximate_settings"]

SLOT_BOOKS = 13  # bytes of swap's own books a slot: checksum, free list, a flag
PAGE_TABLE_BYTES = 8  # bytes of the page table a page: frame and slot
FRAME_BOOKS = 12  # bytes of the pool's own books a frame: owner, free stack, two flags, the order to leave in


def approximate_settings(config: PagerConfig) -> str:
    """All that the bytes of an approximate block depend on besides its tokens."""
    return (
        f"budget={config.budget_pages},digest={config.digest},tile={config.tile},sample={config.sample},"
        f"page={config.page_size},sink={config.sink_pages},recent={config.recent_pages},scoring=2"
    )


class State:
    """Everything that a pager owns. `step` is the open transaction, if any."""

    def __init__(
        self, shape: KVShape, config: PagerConfig, kernel: Kernel, swap: Swap | None, store: BlockStore | None = None
    ) -> None:
        self.shape, self.config, self.kernel = shape, config, kernel
        self.page_bytes = shape.page_bytes(config.page_size)
        # from the shape alone: a group that depended on the pool would let the pool's size change the arithmetic
        self.group_pages = config.group_pages or min(256, max(8, 4 * shape.layers * shape.kv_heads))
        self.digest: Digest | None = None
        if config.budget is not None and config.mode == "recall":
            kind = (config.digest, shape.layers, shape.kv_heads, shape.head_dim, config.page_size, config.sample)
            self.digest = kernel.digest(*kind) or make_digest(*kind)
        policy = make(config.policy)
        self.table = PageTable(shape.layers, shape.kv_heads)
        self.scorer = AttentionScorer(shape.layers, shape.kv_heads, policy.needs, config.decay, config.grace)
        # what changes the bytes of a block without being among its tokens goes into every key
        namespace = f"{config.namespace}|{shape!r}|{config.page_size}|{kernel.numerics}|{self.group_pages}"
        keys = KeyMaker(namespace, approximate_settings(config))
        self.blocks = Blocks(keys, config.page_size, config.prefix_tokens, self._release)
        if config.max_tokens is not None:
            # one row more: a block that is copied while its original is still held
            rows = -(-config.max_tokens // config.page_size) + 1
            if config.memory is not None:
                # before tables of that size are allocated in vain
                self._check_room(parse_size(config.memory), rows * shape.layers * shape.kv_heads * PAGE_TABLE_BYTES)
                self.blocks.most_rows = rows
            self.grow(rows)
        self.pool = FramePool(self._frames())
        if swap is None and config.mode == "recall":
            swap = open_swap(config.swap, self.page_bytes, parse_size(config.swap_limit, "swap_limit"))
        self.swap = swap if config.mode == "recall" else None
        storage = kernel.storage(self.pool.frames, shape, config.page_size)
        self.residency = Residency(
            config, self.table, self.pool, storage, self.swap, policy, self.scorer, self._give_up, self.blocks.reclaim
        )
        self.attender = Attender(shape, config, self.group_pages, self.residency, kernel, self.digest)
        self.keeper = None if store is None else Keeper(self, store)
        self.sequences: dict[int, Sequence] = {}
        self.step: Step | None = None
        self.opened = 0

    @property
    def digest_bytes(self) -> int:
        """Bytes of the digests."""
        return self.digest.nbytes if self.digest is not None else 0

    @property
    def table_bytes(self) -> int:
        """Bytes of page table, block table, scores, and the books of pool and swap."""
        swap = self.swap.table_bytes if self.swap is not None else 0
        sequences = sum(8 * len(sequence.rows) for sequence in self.sequences.values())
        return self.table.nbytes + self.scorer.nbytes + self.blocks.nbytes + self.residency.nbytes + swap + sequences

    @property
    def tokens(self) -> int:
        """Tokens that all open sequences hold."""
        return sum(sequence.length for sequence in self.sequences.values())

    def require_tokens(self, more: int) -> None:
        """Refuse what `max_tokens` does not allow, counting what only some layers have had. Raises PoolExhausted."""
        most = self.config.max_tokens
        if most is not None:
            total = more + sum(int(sequence.filled.max()) for sequence in self.sequences.values())
            if total > most:
                raise PoolExhausted(f"{total} tokens would be held and max_tokens is {most}")

    def grow(self, rows: int) -> None:
        """Have room for `rows` blocks in every table."""
        self.table.grow(rows)
        self.scorer.grow(rows)
        if self.digest is not None:
            self.digest.grow(rows)

    def group_frames(self, blocks: int) -> int:
        """The most frames that one group of pages can need when the longest sequence has so many blocks."""
        heads = self.shape.kv_heads
        return min(max(self.group_pages, heads), blocks * heads)

    def minimum_frames(self, sequences: int, tokens: int | None) -> int:
        """The smallest pool, in frames (see Pager.minimum_frames)."""
        config, heads = self.config, self.shape.kv_heads
        pages = self.shape.layers * heads
        most = 2**31 if tokens is None else -(-tokens // config.page_size)
        if config.mode == "recall":
            return sequences * min(2, most) * pages + self.group_frames(most)
        tile = -(-config.tile // config.page_size) + 1
        return sequences * (min(most, (config.budget_pages or 0) + tile) * pages + min(most, tile) * heads)

    def fit(self) -> None:
        """Have room for all rows that were handed out."""
        if self.blocks.rows > self.table.rows:
            self.grow(grown(self.table.rows, self.blocks.rows))

    def _frames(self) -> int:
        config = self.config
        if isinstance(config.pool, int):
            return config.pool
        if config.memory is None:
            size = DEFAULT_POOL_BYTES if config.pool is None else parse_size(config.pool, "pool")
            frames = size // self.page_bytes
            if not frames:
                raise ConfigError(f"pool: {config.pool} is less than one page, {self.page_bytes} bytes")
            return frames
        fixed = self.table.nbytes + self.scorer.nbytes + self.digest_bytes
        # keys, tokens and swap's own books grow with the tokens held: count them as if all were held
        growing = self.table.rows * (8 + 64 + 8 * config.page_size + 8)
        if config.mode == "recall":
            growing += SLOT_BOOKS * (self.table.frame.size * 9 // 8 + SLAB_BYTES // self.page_bytes)
        if self.shape.dtype == "int8":
            # one sequence's open pages, held in float32 beside the frames
            growing += self.shape.layers * self.shape.kv_heads * 8 * config.page_size * self.shape.head_dim
        memory = parse_size(config.memory, "memory")
        left = self._check_room(memory, fixed + growing)
        return left // (self.page_bytes + FRAME_BOOKS)

    def _check_room(self, memory: int, taken: int) -> int:
        """What digests and tables leave of `memory` for pages, in bytes; ConfigError when that is not one page."""
        if memory - taken < self.page_bytes + FRAME_BOOKS:
            raise ConfigError(
                f"memory: {memory / 2**20:.2f} MiB leave no room for pages: digests and tables of "
                f"{self.config.max_tokens} tokens take {taken / 2**20:.2f} MiB, and the smallest pool "
                f"{self.minimum_frames(1, self.config.max_tokens) * self.page_bytes / 2**20:.2f} MiB more"
            )
        return memory - taken

    def _release(self, rows: list[int]) -> None:
        self.residency.release(np.array(rows))

    def unseen(self, flat: IntArray) -> IntArray:
        """Discard mode: those of some pages that are resident though no open sequence's view holds them any more."""
        resident: IntArray = flat[self.table.frame.reshape(-1)[flat] != ABSENT]
        keep = []
        pages = self.table.layers * self.table.heads
        for index, page in enumerate(resident.tolist()):
            row, within = divmod(page, pages)
            layer, head = divmod(within, self.table.heads)
            if not any(self._sees(sequence, row, layer, head) for sequence in self.sequences.values()):
                keep.append(index)
        unseen: IntArray = resident[keep]
        return unseen

    @staticmethod
    def _sees(sequence: Sequence, row: int, layer: int, head: int) -> bool:
        if sequence.view is None:
            return False
        places = (sequence.rows == row).nonzero()[0]
        return bool(places.size and sequence.view[places[0], layer, head])

    def settle_dropped(self, step: Step, needed: int | None = None) -> int:
        """Free the pages that left a view in this step, oldest first: all, or until `needed` frames are free."""
        freed = 0
        while step.settled < len(step.dropped) and (needed is None or freed < needed):
            gone = self.unseen(step.dropped[step.settled][1])
            step.settled += 1
            self.residency.free(gone)
            self.residency.counters.discards += len(gone)
            freed += len(gone)
            if needed is not None and len(gone):
                # whoever dropped one of these pages in this step can't have it back
                losers = [sequence for sequence, pages in step.dropped if np.isin(pages, gone).any()]
                step.broken += [loser for loser in losers if loser not in step.broken]
        return freed

    def _give_up(self, count: int) -> None:
        """Discard mode has nowhere to evict to: give up what this step has dropped (it cannot be rolled back then)."""
        if self.step is not None:
            self.settle_dropped(self.step, count)

    def require_frames(self, needed: int, what: str) -> None:
        """Refuse early what can never fit. Raises PoolExhausted that says the numbers."""
        if needed > self.pool.frames:
            raise PoolExhausted(
                f"{what} needs {needed} frames ({needed * self.page_bytes} bytes) and the pool has "
                f"{self.pool.frames} ({self.pool.frames * self.page_bytes} bytes): use a larger pool"
                + (", or fewer new tokens a step" if self.config.mode == "discard" else "")
            )
