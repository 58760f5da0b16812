"""Looking at a pager without changing what it would do: pages read, scores, figures, and whether the books balance."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from kvpager.core import parking
from kvpager.core.pagetable import ABSENT
from kvpager.core.sequence import Sequence
from kvpager.core.state import State
from kvpager.errors import InputError
from kvpager.ports import FloatArray
from kvpager.stats import PagerStats, peak_rss_bytes

__all__ = ["PageScore", "check", "read", "scores", "stats"]


@dataclass(frozen=True)
class PageScore:
    """One page as the eviction policy sees it.

    block       index in the sequence
    kv_head     of the layer asked for
    frame       where it is, or ABSENT (-1)
    score       the policy's: the lowest leaves first (inf: kept while it is new)
    evict_rank  0 for the page of this list that would leave next, or None for one that cannot leave now
                (absent, or still open)
    """

    block: int
    kv_head: int
    frame: int
    score: float
    evict_rank: int | None

    @property
    def resident(self) -> bool:
        """Whether the page is in the pool."""
        return self.frame != ABSENT


def read(state: State, sequence: Sequence, layer: int, start: int, stop: int) -> tuple[FloatArray, FloatArray]:
    """Keys and values of positions start..stop-1, float32 [H, tokens, D] each; absent pages are read back."""
    size, heads, dim = state.config.page_size, state.shape.kv_heads, state.shape.head_dim
    keys = np.empty((heads, stop - start, dim), np.float32)
    values = np.empty_like(keys)
    first, last = start // size, -(-stop // size)
    if sequence.view is not None and not sequence.view[first:last, layer].all():
        raise InputError(f"read: pages of positions {start}..{stop - 1} were discarded")
    # a block's heads at a time: that many frames are always to be had
    for index in range(first, last):
        counts = np.full(heads, min(int(sequence.filled[layer]) - index * size, size))
        frames, _ = state.residency.fault(state.table.flat(sequence.rows[index], layer, np.arange(heads)))
        page_keys, page_values = state.residency.storage.read(frames, counts)
        low, high = max(start, index * size), min(stop, (index + 1) * size)
        inside, outside = slice(low - index * size, high - index * size), slice(low - start, high - start)
        keys[:, outside], values[:, outside] = page_keys[:, inside], page_values[:, inside]
    return keys, values


def scores(state: State, sequence: Sequence, layer: int) -> list[PageScore]:
    """All pages of a sequence in one layer, the one that would leave next first."""
    residency, heads = state.residency, state.shape.kv_heads
    written = -(-int(sequence.filled[layer]) // state.config.page_size)
    blocks, kv_heads = np.divmod(np.arange(written * heads), heads)
    flat = state.table.flat(sequence.rows[blocks], layer, kv_heads)
    frames = state.table.frame.reshape(-1)[flat]
    numbers = state.scorer.numbers(
        flat, state.attender.now(sequence), residency.clock.layer, shared=sequence.view is None
    )
    # a generator of its own: looking must not change what is evicted next
    values = residency.policy.score(numbers, np.random.default_rng(state.config.seed))
    movable = (frames != ABSENT) & state.pool.evictable[frames]
    order = np.lexsort((values, ~movable))
    return [
        PageScore(
            block=int(blocks[page]),
            kv_head=int(kv_heads[page]),
            frame=int(frames[page]),
            score=float(values[page]),
            evict_rank=rank if movable[page] else None,
        )
        for rank, page in enumerate(order.tolist())
    ]


def stats(state: State) -> PagerStats:
    """Counters and sizes."""
    counters = state.residency.counters
    storage = state.residency.storage
    return PagerStats(
        pool_bytes=storage.nbytes,
        digest_bytes=state.digest_bytes,
        table_bytes=state.table_bytes,
        full_kv_bytes=counters.most_tokens * state.shape.token_bytes,
        swap_bytes=state.swap.nbytes if state.swap is not None else 0,
        peak_rss_bytes=peak_rss_bytes(),
        frames=state.pool.frames,
        frames_used=state.pool.used,
        frames_cached=int(np.count_nonzero(state.table.frame[state.blocks.cached_rows] != ABSENT)),
        sequences=len(state.sequences),
        tokens=state.tokens,
        cached_blocks=state.blocks.cached,
        parked_sequences=sum(sequence.parked for sequence in state.sequences.values()),
        parked_bytes=parking.parked_bytes(state),
        recalls=counters.recalls,
        evictions=counters.evictions,
        discards=counters.discards,
        swap_writes=counters.swap_writes,
        faults=counters.faults,
        tiles=counters.tiles,
        pages_attended=counters.pages_attended,
        prefix_tokens_hit=counters.prefix_tokens_hit,
        store_tokens_hit=counters.store_tokens_hit,
        store_pages=counters.store_pages,
        store_lost=counters.store_lost,
        store_skipped=0 if state.keeper is None else state.keeper.skipped,
        mass_coverage=counters.coverage_sum / counters.tiles if counters.tiles else 1.0,
    )


def check(state: State) -> None:
    """Assert that frames, page table, swap and reference counts agree (promise 3)."""
    held: Counter[int] = Counter()
    for sequence in state.sequences.values():
        held.update(sequence.rows.tolist())
        assert len(sequence.rows) == -(-int(sequence.filled.max()) // state.config.page_size), f"{sequence}: rows"
        _check_pages(state, sequence)
    state.blocks.check(dict(held))
    state.residency.check(parking.stashed(state))


def _check_pages(state: State, sequence: Sequence) -> None:
    """Every page that a sequence sees is in the pool or in swap; open ones are in the pool unless it is parked."""
    size = state.config.page_size
    if sequence.stash is not None:
        assert (sequence.filled == sequence.length).all(), f"{sequence}: layers of different lengths"
        pages = state.shape.layers * state.shape.kv_heads if sequence.length % size else 0
        assert len(sequence.stash) % max(pages, 1) == 0, f"{sequence}: pieces of its open pages are missing"
        assert bool(len(sequence.stash)) == bool(pages), f"{sequence}: its open pages are not where they should be"
    for layer, filled in enumerate(sequence.filled.tolist()):
        written = sequence.rows[: -(-filled // size)]
        frames, slots = state.table.frame[written, layer], state.table.slot[written, layer]
        there = (frames != ABSENT) | (slots != ABSENT) | state.table.stored[written, None]
        if sequence.view is not None:
            there |= ~sequence.view[: len(written), layer]
        if sequence.parked and filled % size:
            assert not there[-1].any(), f"{sequence}: an open page of layer {layer} is there though it is parked"
            there = there[:-1]
        assert there.all(), f"{sequence}: a page of layer {layer} is nowhere"
        sealed = state.table.sealed[written, layer]
        assert sealed[: filled // size].all(), f"{sequence}: a full page of layer {layer} is not sealed"
        if filled % size and not sequence.parked:
            assert (frames[-1] != ABSENT).all(), f"{sequence}: the open page of layer {layer} is not in the pool"
            assert not sealed[-1], f"{sequence}: the open page of layer {layer} is sealed"
