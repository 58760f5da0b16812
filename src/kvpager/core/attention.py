"""Attention of one layer, tile by tile: select, then fault and attend by fixed groups of pages, then observe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvpager.config import KVShape, PagerConfig
from kvpager.core.residency import Residency
from kvpager.core.sequence import Sequence, Step
from kvpager.kernels.reference import merge
from kvpager.ports import BoolArray, Digest, FloatArray, IntArray, Kernel, PageList, Partial, Room, TileQuery

__all__ = ["Attender", "TileEvent"]


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
    """Pages attended to: the partial results, each page's head, block and row [n], and which pages were read back."""

    parts: list[Partial]
    heads: IntArray
    blocks: IntArray
    rows: IntArray
    recalled: IntArray

    def joined(self, other: _Attended) -> _Attended:
        """Both, these pages first."""
        recalled = self.recalled
        if other.recalled.size:
            recalled = np.concatenate([recalled, other.recalled + len(self.heads)])
        return _Attended(
            self.parts + other.parts,
            np.concatenate([self.heads, other.heads]),
            np.concatenate([self.blocks, other.blocks]),
            np.concatenate([self.rows, other.rows]),
            recalled,
        )


NOTHING = np.empty(0, np.int64)


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
        self._heads = np.arange(shape.kv_heads)
        self.observers: list[Callable[[TileEvent], None]] = []

    def attend(
        self,
        step: Step,
        sequence: Sequence,
        layer: int,
        queries: FloatArray,
        scale: float,
        softcap: float | None,
    ) -> tuple[FloatArray, FloatArray]:
        """Attend the last T tokens written to `layer`, queries [H * G, T, D].

        Returns the output [H * G, T, D] and the page mass [H, blocks], mean over queries and group.
        """
        stop = int(sequence.filled[layer])
        tokens = queries.shape[1]
        size, window = self._config.tile, self._shape.window(layer)
        clock = self._residency.clock
        clock.layer = layer
        parts: list[tuple[FloatArray, FloatArray]] = []
        begin = start = stop - tokens
        while begin < stop:
            end = min((begin // size + 1) * size, stop)
            if begin > start:
                clock.tick += 1
                sequence.tick += 1
            clock.again = end < stop
            query = TileQuery(queries[:, begin - start : end - start], begin, scale, window, softcap)
            output, mass = self._tile(step, sequence, layer, query)
            parts.append((output, mass if end - begin == tokens else mass * np.float32((end - begin) / tokens)))
            begin = end
        clock.again = False
        mass = np.zeros((self._shape.kv_heads, len(sequence.rows)), np.float32)
        for _, tile_mass in parts:
            mass[:, : tile_mass.shape[1]] += tile_mass
        output = parts[0][0] if len(parts) == 1 else np.concatenate([output for output, _ in parts], axis=1)
        return output, mass

    def _tile(self, step: Step, sequence: Sequence, layer: int, query: TileQuery) -> tuple[FloatArray, FloatArray]:
        tile = self._span(query)
        if query.window is not None and tile.first:
            self._residency.table.expired[sequence.rows[: tile.first], layer] = True
        # the tile's own pages first: what they get of each query's attention is known exactly when the past is chosen
        attended = self._groups(sequence, layer, tile, *self._own_pages(tile))
        past = self._selected(step, sequence, layer, tile, attended)
        heads, blocks = past.nonzero()
        if heads.size:
            attended = attended.joined(self._groups(sequence, layer, tile, heads, blocks + tile.first))
        heads, blocks = attended.heads, attended.blocks
        settled = self._kernel.settle(attended.parts, heads)
        queries = query.queries.shape[1]
        masses = settled.masses
        self._residency.scorer.observe(attended.rows, layer, heads, masses, queries, self.now(sequence))
        counters = self._residency.counters
        counters.tiles += 1
        counters.pages_attended += len(heads)
        page_mass = np.zeros((self._shape.kv_heads, tile.last), np.float32)
        page_mass[heads, blocks] = masses.total if queries == 1 else masses.total / np.float32(queries)
        if self.observers:
            self._tell(sequence, layer, tile, past, attended, page_mass)
        return settled.output, page_mass

    def _tell(
        self, sequence: Sequence, layer: int, tile: _Tile, past: BoolArray, attended: _Attended, page_mass: FloatArray
    ) -> None:
        selected = np.zeros(page_mass.shape, np.bool_)
        selected[:, tile.first : tile.own] = past
        selected[:, tile.own :] = True
        came = np.stack([attended.heads[attended.recalled], attended.blocks[attended.recalled]], axis=1)
        event = TileEvent(sequence, layer, tile.query.start, tile.stop, selected, came, page_mass.copy())
        for observer in self.observers:
            observer(event)

    def _own_pages(self, tile: _Tile) -> tuple[IntArray, IntArray]:
        """Heads and blocks of the tile's own pages."""
        count = tile.last - tile.own
        if count == 1:
            return self._heads, np.full(self._shape.kv_heads, tile.own)
        return np.repeat(self._heads, count), np.tile(np.arange(tile.own, tile.last), self._shape.kv_heads)

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

    def _groups(self, sequence: Sequence, layer: int, tile: _Tile, heads: IntArray, blocks: IntArray) -> _Attended:
        """Attend to pages, sorted by head, then by position, a fixed group at a time."""
        residency, size, most = self._residency, self._config.page_size, self._group_pages
        rows = sequence.rows[blocks]
        starts = blocks * size
        counts = np.minimum(sequence.filled[layer] - starts, size)
        parts: list[Partial] = []
        recalled: list[IntArray] = []
        for begin in range(0, len(rows), most):
            span = slice(begin, begin + most)
            frames, absent = residency.fault(rows[span], layer, heads[span])
            if begin + most < len(rows):
                following = slice(begin + most, begin + 2 * most)
                residency.prefetch(rows[following], layer, heads[following])
            # nothing is evicted between a fault and the attention that it is for
            group = PageList(frames, heads[span], starts[span], counts[span], self._shape.kv_heads)
            parts.append(self._kernel.attend(residency.storage, tile.query, group))
            if absent.size:
                recalled.append(absent + begin)
        return _Attended(parts, heads, blocks, rows, np.concatenate(recalled) if recalled else NOTHING)

    def _selected(self, step: Step, sequence: Sequence, layer: int, tile: _Tile, own: _Attended) -> BoolArray:
        """The past pages that the tile attends to: bool [H, own - first], from block `first` on."""
        past = slice(tile.first, tile.own)
        coverage = 1.0
        if sequence.view is not None:
            self._prune(step, sequence, layer, tile)
            selected = sequence.view[past, layer].T
            left_out = not selected.all()
        elif self._digest is None or tile.own - tile.first <= (self._config.budget_pages or 0):
            selected = np.ones((self._shape.kv_heads, tile.own - tile.first), np.bool_)
            left_out = False
        else:
            selected, coverage = self._choose(sequence, layer, tile, own)
            left_out = True
        if left_out:
            self._mark_approximate(sequence, tile)
        self._residency.counters.coverage_sum += coverage
        return selected

    def _choose(self, sequence: Sequence, layer: int, tile: _Tile, own: _Attended) -> tuple[BoolArray, float]:
        """The budget's worth of past pages with the largest estimated mass: bool [H, n], and the share of all kept."""
        assert self._digest is not None
        config = self._config
        assert config.budget_pages is not None
        rows = sequence.rows[tile.first : tile.own]
        starts = np.arange(tile.first, tile.own) * config.page_size
        own_lse = own.parts[0].lse if len(own.parts) == 1 else merge(own.parts)[1]
        room = Room(config.budget_pages, config.sink_pages, config.recent_pages, tile.first)
        choice = self._digest.choose(layer, rows, tile.query, starts, own_lse, room)
        self._residency.scorer.estimated(sequence.part(tile.first, tile.own), layer, choice.ratio)
        # masses are shares of all attention, own pages included: what is left out is what the selection misses
        return choice.chosen, 1 - choice.missed

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
