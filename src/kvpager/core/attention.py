"""Attention of one layer, tile by tile: select, then fault and attend by fixed groups of pages, then observe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from kvpager.config import KVShape, PagerConfig
from kvpager.core.residency import Residency
from kvpager.core.sequence import Sequence, Step
from kvpager.kernels.reference import merge
from kvpager.ports import (
    BoolArray,
    Digest,
    FloatArray,
    IntArray,
    Kernel,
    Layer,
    PageList,
    Partial,
    PlacedPages,
    Room,
    Settled,
    TileQuery,
)

__all__ = ["AttendResult", "Attender", "TileEvent"]


@dataclass(frozen=True)
class TileEvent:
    """What happened in one tile of one layer, for observers.

    start, stop  positions of the tile's queries
    selected     bool [H, blocks]: pages attended to, the tile's own among them; position t was visible to head h
                 where selected[h, t // page_size], within causality and the layer's window
    recalled     int64 [n, 2]: (head, block) of the pages that had to be read back
    page_mass    float32 [H, blocks]: softmax mass, mean over the tile's queries and the query group
    """

    sequence: Sequence
    layer: int
    start: int
    stop: int
    selected: BoolArray
    recalled: IntArray
    page_mass: FloatArray


class _Tile(NamedTuple):
    """A tile's queries, and the blocks that matter to it: `first` (of the window) .. `own` .. `last`."""

    query: TileQuery
    stop: int
    first: int
    own: int
    last: int


class _Attended(NamedTuple):
    """The partial results of pages attended to, by group, and the indices of pages that were read back."""

    parts: list[Partial]
    recalled: IntArray

    def joined(self, other: _Attended, pages: int) -> _Attended:
        """Both: these, of so many pages, first."""
        recalled = self.recalled
        if other.recalled.size:
            recalled = np.concatenate([recalled, other.recalled + pages])
        return _Attended(self.parts + other.parts, recalled)


NOTHING = np.empty(0, np.int64)


class _Given(NamedTuple):
    """What a tile of so many queries gave to pages: heads [n], blocks (in pieces), and the mass in total [n]."""

    heads: IntArray
    blocks: list[IntArray]
    total: FloatArray
    queries: int


class AttendResult:
    """What `attend` returns.

    output     float32 [query_heads, T, head_dim]
    page_mass  float32 [kv_heads, blocks]: the softmax mass that each page got, mean over the T queries and over the
               query group; sums to 1 for each KV head
    """

    def __init__(self, output: FloatArray, given: list[_Given], shape: tuple[int, int]) -> None:
        self.output = output
        self._given, self._shape = given, shape

    @cached_property
    def page_mass(self) -> FloatArray:
        """The mass of each page; put together when it is asked for, which a model's forward never does."""
        return _page_mass(self._given, self._shape)


def _page_mass(given: list[_Given], shape: tuple[int, int]) -> FloatArray:
    """Mean mass of each page over all queries of the tiles: float32 [H, blocks]."""
    mass = np.zeros(shape, np.float32)
    queries = np.float32(sum(one.queries for one in given))
    for one in given:
        mass[one.heads, np.concatenate(one.blocks)] += one.total / queries
    return mass


class Attender:
    """Runs the tiles of one call. `digest` is None where nothing is ever selected."""

    def __init__(
        self,
        shape: KVShape,
        config: PagerConfig,
        group_pages: int,
        residency: Residency,
        kernel: Kernel,
        digest: Digest | None,
    ) -> None:
        self._shape, self._config, self._group_pages = shape, config, group_pages
        self._residency, self._kernel, self._digest = residency, kernel, digest
        self.observers: list[Callable[[TileEvent], None]] = []

    def attend(
        self,
        step: Step,
        sequence: Sequence,
        layer: int,
        queries: FloatArray,
        scale: float,
        softcap: float | None,
    ) -> AttendResult:
        """Attend the last T tokens written to `layer`, queries [H * G, T, D]."""
        stop = int(sequence.filled[layer])
        size, window = self._config.tile, self._shape.window(layer)
        clock = self._residency.clock
        clock.layer = layer
        outputs: list[FloatArray] = []
        given: list[_Given] = []
        begin = start = stop - queries.shape[1]
        while begin < stop:
            end = min((begin // size + 1) * size, stop)
            if begin > start:
                clock.tick += 1
                sequence.tick += 1
            clock.again = end < stop
            query = TileQuery(queries[:, begin - start : end - start], begin, scale, window, softcap)
            output, masses = self._tile(step, sequence, layer, query)
            outputs.append(output)
            given.append(masses)
            begin = end
        clock.again = False
        output = outputs[0] if len(outputs) == 1 else np.concatenate(outputs, axis=1)
        return AttendResult(output, given, (self._shape.kv_heads, len(sequence.rows)))

    def _tile(self, step: Step, sequence: Sequence, layer: int, query: TileQuery) -> tuple[FloatArray, _Given]:
        tile = self._span(query)
        if query.window is not None and tile.first:
            self._residency.table.expired[sequence.rows[: tile.first], layer] = True
        own = self._planned(step, sequence, layer, tile, own=True)
        past, settled, parts = self._selected(step, sequence, layer, tile, own)
        recalled = NOTHING
        if settled is None and parts is None:
            settled = self._kernel.attend_resident(self._layer(layer), query, own, past)
        pages = (own,) if past is None else (own, past)
        heads = own.heads if past is None else np.concatenate([own.heads, past.heads])
        if settled is None:
            # a page is absent, or the kernel takes one group a call
            done = parts or self._groups(layer, tile, own)
            if past is not None:
                done = done.joined(self._groups(layer, tile, past), len(own.heads))
            settled, recalled = self._kernel.settle(done.parts, heads), done.recalled
        queries = query.queries.shape[1]
        rows, blocks = [one.rows for one in pages], [one.blocks for one in pages]
        self._residency.scorer.observe(rows, layer, heads, settled.masses, queries, self.now(sequence))
        for counters in (self._residency.counters, sequence.cost):
            counters.pages_attended += len(heads)
        sequence.cost.recalls += len(recalled)
        given = _Given(heads, blocks, settled.masses.total, queries)
        if self.observers:
            self._tell(sequence, layer, tile, given, recalled)
        return settled.output, given

    def _layer(self, layer: int) -> Layer:
        return Layer(self._residency.storage, self._residency.table.frame, layer, self._group_pages)

    def _tell(self, sequence: Sequence, layer: int, tile: _Tile, given: _Given, recalled: IntArray) -> None:
        heads, blocks = given.heads, np.concatenate(given.blocks)
        page_mass = _page_mass([given], (self._shape.kv_heads, tile.last))
        selected = np.zeros(page_mass.shape, np.bool_)
        selected[heads, blocks] = True
        came = np.stack([heads[recalled], blocks[recalled]], axis=1)
        event = TileEvent(sequence, layer, tile.query.start, tile.stop, selected, came, page_mass)
        for observer in self.observers:
            observer(event)

    def _planned(self, step: Step, sequence: Sequence, layer: int, tile: _Tile, own: bool) -> PlacedPages:
        """All of the tile's own pages, or all of its past: the same in every layer with the same window."""
        first, stop = (tile.own, tile.last) if own else (tile.first, tile.own)
        key = (sequence.id, first, stop, int(sequence.filled[layer]))
        pages: PlacedPages | None = step.plans.get(key)
        if pages is None:
            count, heads = stop - first, self._shape.kv_heads
            blocks = np.tile(np.arange(first, stop), heads)
            pages = step.plans[key] = self._pages(sequence, layer, np.repeat(np.arange(heads), count), blocks)
        return pages

    def _pages(self, sequence: Sequence, layer: int, heads: IntArray, blocks: IntArray) -> PlacedPages:
        size = self._config.page_size
        rows = sequence.rows[blocks]
        starts = blocks * size
        counts = np.minimum(sequence.filled[layer] - starts, size)
        return PlacedPages(heads, blocks, rows, starts, counts, self._residency.table.flat(rows, 0, heads))

    def _span(self, query: TileQuery) -> _Tile:
        size = self._config.page_size
        stop = query.start + query.queries.shape[1]
        first = 0 if query.window is None else max(0, query.start - query.window + 1) // size
        return _Tile(query, stop, first, query.start // size, -(-stop // size))

    def now(self, sequence: Sequence) -> int:
        """The tick that scores are kept by.

        In discard mode each sequence has its own clock, so that what other requests do never discards a page.
        """
        return sequence.tick if sequence.view is not None else self._residency.clock.tick

    def _groups(self, layer: int, tile: _Tile, pages: PlacedPages) -> _Attended:
        """Attend to pages, a fixed group at a time."""
        residency, most = self._residency, self._group_pages
        flat = pages.flat + layer * self._shape.kv_heads
        parts: list[Partial] = []
        recalled: list[IntArray] = []
        for begin in range(0, len(flat), most):
            span = slice(begin, begin + most)
            # nothing is evicted between a fault and the attention that it is for
            frames, absent = residency.fault(flat[span])
            if begin + most < len(flat):
                residency.prefetch(flat[begin + most : begin + 2 * most])
            group = PageList(frames, pages.heads[span], pages.starts[span], pages.counts[span], self._shape.kv_heads)
            parts.append(self._kernel.attend(residency.storage, tile.query, group))
            recalled.append(absent + begin)
        return _Attended(parts, np.concatenate(recalled))

    def _selected(
        self, step: Step, sequence: Sequence, layer: int, tile: _Tile, own: PlacedPages
    ) -> tuple[PlacedPages | None, Settled | None, _Attended | None]:
        """The past pages that the tile attends to, if any.

        Where choosing them took the attention to its own pages (what they get of each query's attention is known
        exactly then), with that, or with the whole tile's attention where it came along.
        """
        if sequence.view is not None:
            self._covered(sequence, 1.0)
            return self._viewed(step, sequence, layer, tile), None, None
        if self._digest is None or tile.own - tile.first <= (self._config.budget_pages or 0):
            self._covered(sequence, 1.0)
            past = self._planned(step, sequence, layer, tile, own=False) if tile.own > tile.first else None
            return past, None, None
        self._mark_approximate(sequence, tile)
        return self._choose(sequence, layer, tile, own, self._digest)

    def _covered(self, sequence: Sequence, share: float) -> None:
        for counters in (self._residency.counters, sequence.cost):
            counters.tiles += 1
            counters.coverage_sum += share

    def _viewed(self, step: Step, sequence: Sequence, layer: int, tile: _Tile) -> PlacedPages | None:
        """Discard mode: the past pages that the sequence still sees."""
        assert sequence.view is not None
        self._prune(step, sequence, layer, tile)
        seen = sequence.view[tile.first : tile.own, layer].T
        if not seen.all():
            self._mark_approximate(sequence, tile)
        return self._where(sequence, layer, tile, seen) if seen.any() else None

    def _where(self, sequence: Sequence, layer: int, tile: _Tile, chosen: BoolArray) -> PlacedPages:
        heads, blocks = chosen.nonzero()  # strided views of one array; kernels want contiguous ones
        return self._pages(sequence, layer, np.ascontiguousarray(heads), blocks + tile.first)

    def _choose(
        self, sequence: Sequence, layer: int, tile: _Tile, own: PlacedPages, digest: Digest
    ) -> tuple[PlacedPages, Settled | None, _Attended | None]:
        """The budget's worth of past pages with the largest estimated mass, and what was attended to for it."""
        config = self._config
        assert config.budget_pages is not None
        rows = sequence.rows[tile.first : tile.own]
        room = Room(config.budget_pages, config.sink_pages, config.recent_pages, tile.first)
        resident = self._kernel.choose_resident(self._layer(layer), tile.query, own, digest, rows, room)
        settled = None if resident is None else resident.settled
        # where a page is absent, or all at once can't be, its own pages are attended to alone
        parts = self._groups(layer, tile, own) if settled is None else None
        if resident is not None:
            ratio, missed = resident.ratio, resident.missed
            past = self._pages(sequence, layer, resident.heads, resident.blocks)
        else:
            assert parts is not None
            own_lse = parts.parts[0].lse if len(parts.parts) == 1 else merge(parts.parts)[1]
            starts = np.arange(tile.first, tile.own) * config.page_size
            chosen, ratio, missed = digest.choose(layer, rows, tile.query, starts, own_lse, room)
            past = self._where(sequence, layer, tile, chosen)
        self._residency.scorer.estimated(sequence.part(tile.first, tile.own), layer, ratio)
        # masses are shares of all attention, own pages included: what is left out is what the selection misses
        self._covered(sequence, 1 - missed)
        return past, settled, parts

    def _mark_approximate(self, sequence: Sequence, tile: _Tile) -> None:
        """Keys of later layers now depend on the selection; only whole tiles are reproducible by others."""
        start, size = tile.query.start, self._config.tile
        if sequence.approximate_from is None or start < sequence.approximate_from:
            sequence.approximate_from = start
        whole = start % size == 0 and tile.stop - start == size
        if not whole and (sequence.private_from is None or start < sequence.private_from):
            sequence.private_from = start

    def _prune(self, step: Step, sequence: Sequence, layer: int, tile: _Tile) -> None:
        """Discard mode: drop the lowest pages of a sequence that is over its budget in `layer`, for good."""
        assert sequence.view is not None
        assert self._config.budget_pages is not None
        seen = sequence.view[: tile.own, layer]
        excess = int(seen.sum()) - self._config.budget_pages * self._shape.kv_heads
        if excess <= 0:
            return
        free = seen.copy()
        # what has left the window is no longer protected: nobody will attend to it again
        free[tile.first : max(tile.first, self._config.sink_pages)] = False
        free[max(tile.first, tile.own - self._config.recent_pages) :] = False
        blocks, heads = np.nonzero(free)
        residency, now = self._residency, self.now(sequence)
        flat = residency.table.flat(sequence.rows[blocks], layer, heads)
        # a generator of its own, so that other sequences' drops cannot change this one's
        rng = np.random.default_rng((self._config.seed, now, layer))
        scores = residency.policy.score(residency.scorer.numbers(flat, now, layer), rng)
        scores = np.where(blocks < tile.first, np.float32(-np.inf), scores)
        lowest = np.argsort(scores, kind="stable")[:excess]
        sequence.view[blocks[lowest], layer, heads[lowest]] = False
        step.dropped.append((sequence, flat[lowest]))
