"""Attention of one layer, all tiles of a call together: select, then fault and attend by fixed groups of pages, then
observe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from time import perf_counter

import numpy as np

from kvpager.config import KVShape, PagerConfig
from kvpager.core.residency import Residency
from kvpager.core.scorer import Observed
from kvpager.core.sequence import Member, Sequence, Step
from kvpager.ports import BatchResult, BoolArray, Digest, FloatArray, IntArray, Kernel, Layer, Room, Rows, States, Tiles

__all__ = ["AttendResult", "Attender", "Query", "TileEvent"]


@dataclass(frozen=True)
class TileEvent:
    """What happened in one tile of one layer, for observers.

    start, stop  positions of the tile's queries
    selected     bool [H, blocks]: pages attended to, the tile's own among them; position t was visible to head h
                 where selected[h, t // page_size], within causality and the layer's window
    recalled     int64 [n, 2]: (head, block) of the pages that were absent when the tile's turn came
    page_mass    float32 [H, blocks]: softmax mass, mean over the tile's queries and the query group
    """

    sequence: Sequence
    layer: int
    start: int
    stop: int
    selected: BoolArray
    recalled: IntArray
    page_mass: FloatArray


@dataclass(frozen=True)
class Query:
    """What a layer is asked: queries [H * G, T, D] with their scale and soft cap, and where the output goes."""

    states: States
    scale: float
    softcap: float | None
    output: States


@dataclass(frozen=True)
class _Tile:
    """A tile of a sequence: positions start..stop-1, the first of them the call's query `token`; and the blocks that
    matter to it: `first` (of the window) .. `own` .. `last`."""

    sequence: Sequence
    token: int
    start: int
    stop: int
    first: int
    own: int
    last: int

    @property
    def past(self) -> Rows:
        """The rows of its past blocks."""
        return self.sequence.part(self.first, self.own)


@dataclass(frozen=True)
class _Plan:
    """The tiles of one call, the same in all layers of one window.

    ticks     how many ticks after the call's first tile each of them is
    further   sequences that have several tiles, with how many more than one
    expired   rows of blocks that have left the window
    choosing  indices of the tiles whose past pages are chosen; candidates: the rows of those, tile after tile, where no
              page is of two tiles
    distinct  no page is of two tiles
    """

    tiles: Tiles
    members: list[_Tile]
    queries: list[int]
    ticks: list[int]
    further: list[Member]
    expired: IntArray
    choosing: list[int]
    candidates: IntArray
    distinct: bool


class AttendResult:
    """What `attend` returns.

    output     float32 [query_heads, T, head_dim]
    page_mass  float32 [kv_heads, blocks]: the softmax mass that each page got, mean over the T queries and over the
               query group; sums to 1 for each KV head
    """

    def __init__(self, output: FloatArray, given: list[BatchResult], shape: tuple[int, int]) -> None:
        self.output = output
        self._given, self._shape = given, shape

    @cached_property
    def page_mass(self) -> FloatArray:
        """The mass of each page; put together when it is asked for, which a model's forward never does."""
        mass = np.zeros(self._shape, np.float32)
        for one in self._given:
            np.add.at(mass, (one.heads, one.blocks), one.masses.total)
        return mass / np.float32(self.output.shape[1])


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

    def attend(self, step: Step, members: list[Member], layer: int, query: Query) -> list[BatchResult]:
        """Attend the last tokens of each sequence written to `layer`, as many as said, side by side in `query`."""
        clock = self._residency.clock
        clock.layer = layer
        if self._config.mode == "discard":
            return self._by_tile(step, members, layer, query)
        window = self._shape.window(layer)
        key = (window, tuple((one.id, count, int(one.filled[layer])) for one, count in members))
        plan = step.plans.get(key)
        if plan is None:
            plan = step.plans[key] = self._plan(self._tiles(members, layer), layer)
        clock.again = bool(plan.further)
        result = self._run(plan, layer, query, [clock.tick + more for more in plan.ticks])
        clock.again = False
        for sequence, more in plan.further:
            clock.tick += more
            sequence.tick += more
        return [result]

    def _by_tile(self, step: Step, members: list[Member], layer: int, query: Query) -> list[BatchResult]:
        """Discard mode, where each tile changes what the next one sees."""
        clock, results = self._residency.clock, []
        before = None
        for tile in self._tiles(members, layer):
            if tile.sequence is before:
                clock.tick += 1
                tile.sequence.tick += 1
            before = tile.sequence
            clock.again = tile.stop < int(tile.sequence.filled[layer])
            self._prune(step, layer, tile)
            assert tile.sequence.view is not None
            seen = tile.sequence.view[tile.first : tile.own, layer].T
            if not seen.all():
                self._mark_approximate(tile)
            heads, blocks = seen.nonzero()  # strided views of one array; kernels want contiguous ones
            plan = self._plan([tile], layer, (np.ascontiguousarray(heads), blocks + tile.first))
            results.append(self._run(plan, layer, query, [self.now(tile.sequence)]))
        clock.again = False
        return results

    def _tiles(self, members: list[Member], layer: int) -> list[_Tile]:
        size, page, window = self._config.tile, self._config.page_size, self._shape.window(layer)
        tiles = []
        token = 0
        for sequence, count in members:
            end = int(sequence.filled[layer])
            start = end - count
            while start < end:
                stop = min((start // size + 1) * size, end)
                first = 0 if window is None else max(0, start - window + 1) // page
                tiles.append(_Tile(sequence, token, start, stop, first, start // page, -(-stop // page)))
                token += stop - start
                start = stop
        return tiles

    def _plan(self, tiles: list[_Tile], layer: int, given: tuple[IntArray, IntArray] | None = None) -> _Plan:
        config = self._config
        room = None
        if self._digest is not None and config.budget_pages is not None:
            room = Room(config.budget_pages, config.sink_pages, config.recent_pages)
        places: dict[int, int] = {}
        rows: list[IntArray] = []
        ticks: list[int] = []
        further: dict[int, Member] = {}
        total = 0
        for tile in tiles:
            if tile.sequence.id in places:
                _, more = further.get(tile.sequence.id, (tile.sequence, 0))
                further[tile.sequence.id] = (tile.sequence, more + 1)
            else:
                places[tile.sequence.id] = total
                rows.append(tile.sequence.rows)
                total += len(tile.sequence.rows)
            ticks.append(sum(more for _, more in further.values()))
        fields = [
            (one.token, one.stop - one.start, one.start, places[one.sequence.id], one.first, one.own, one.last,
             int(one.sequence.filled[layer]))
            for one in tiles
        ]  # fmt: skip
        every = np.concatenate(rows) if len(rows) > 1 else rows[0]
        choosing = [i for i, one in enumerate(tiles) if room is not None and one.own - one.first > room.pages]
        for index in choosing:
            self._mark_approximate(tiles[index])
        expired = [one.sequence.rows[: one.first] for one in tiles if one.first]
        window = self._shape.window(layer)
        candidates = [tiles[i].sequence.rows[tiles[i].first : tiles[i].own] for i in choosing]
        return _Plan(
            Tiles(every, np.array(fields, np.int64), window, config.page_size, self._group_pages, room, given),
            tiles,
            [one.stop - one.start for one in tiles],
            ticks,
            list(further.values()),
            np.concatenate(expired) if expired else every[:0],
            choosing,
            np.concatenate(candidates) if candidates else every[:0],
            not further and len(set(every.tolist())) == len(every),
        )

    def _run(self, plan: _Plan, layer: int, query: Query, ticks: list[int]) -> BatchResult:
        residency, latencies = self._residency, self._residency.latencies
        begun, chosen = perf_counter(), 0.0 if self._digest is None else self._digest.seconds
        if plan.expired.size:
            residency.table.expired[plan.expired, layer] = True
        batch = self._kernel.batch(
            Layer(residency.storage, residency.table.frame, layer),
            plan.tiles,
            query.states,
            query.scale,
            query.softcap,
            self._digest,
            query.output,
        )
        counters, pool = residency.counters, residency.pool
        # nothing is ever absent before something had to leave
        while (waits := batch.advance(pool.room if counters.evictions else 0)) is not None:
            # nothing is evicted between a fault and the attention that it is for
            residency.fault(waits[0])
            residency.prefetch(waits[1])
        result = batch.result()
        given = Observed(result.rows, result.heads, result.masses, result.offsets, plan.queries, ticks, plan.distinct)
        self._estimated(plan, layer, result.ratios)
        residency.scorer.observe(layer, given)
        counters.tiles += len(plan.members)
        counters.pages_attended += len(result.heads)
        # masses are shares of all attention, own pages included: what is left out is what the selection misses
        counters.coverage_sum += len(plan.members) - sum(result.missed)
        self._attribute(plan, result)
        if self.observers:
            for tile, (start, stop) in zip(plan.members, pairwise(result.offsets), strict=True):
                self._tell(tile, layer, result, slice(start, stop))
        if plan.choosing and self._digest is not None:
            latencies.select.add(self._digest.seconds - chosen)
        latencies.attend.add(perf_counter() - begun)
        return result

    def _estimated(self, plan: _Plan, layer: int, ratios: FloatArray) -> None:
        """Tell the scorer what was estimated: for all tiles at once where no page is of two."""
        scorer, tiles = self._residency.scorer, [plan.members[index] for index in plan.choosing]
        counts = [(tile.own - tile.first) * self._shape.kv_heads for tile in tiles]
        parts = [
            ratios[stop - count : stop].reshape(self._shape.kv_heads, -1)
            for count, stop in zip(counts, accumulate(counts), strict=True)
        ]
        if len(parts) > 1 and plan.distinct:
            scorer.estimated(plan.candidates, layer, np.concatenate(parts, axis=1))
            return
        for tile, part in zip(tiles, parts, strict=True):
            scorer.estimated(tile.past, layer, part)

    @staticmethod
    def _attribute(plan: _Plan, result: BatchResult) -> None:
        """Count each tile's part with its sequence."""
        recalled = result.recalled if result.recalled.any() else None
        for tile, (start, stop), missed in zip(plan.members, pairwise(result.offsets), result.missed, strict=True):
            cost = tile.sequence.cost
            cost.tiles += 1
            cost.pages_attended += stop - start
            cost.coverage_sum += 1.0 - missed
            if recalled is not None:
                cost.recalls += int(recalled[start:stop].sum())

    def _tell(self, tile: _Tile, layer: int, result: BatchResult, part: slice) -> None:
        heads, blocks = result.heads[part], result.blocks[part]
        page_mass = np.zeros((self._shape.kv_heads, tile.last), np.float32)
        page_mass[heads, blocks] = result.masses.total[part] / np.float32(tile.stop - tile.start)
        selected = np.zeros(page_mass.shape, np.bool_)
        selected[heads, blocks] = True
        back = result.recalled[part]
        came = np.stack([heads[back], blocks[back]], axis=1)
        event = TileEvent(tile.sequence, layer, tile.start, tile.stop, selected, came, page_mass)
        for observer in self.observers:
            observer(event)

    def now(self, sequence: Sequence) -> int:
        """The tick that scores are kept by.

        In discard mode each sequence has its own clock, so that what other requests do never discards a page.
        """
        return sequence.tick if sequence.view is not None else self._residency.clock.tick

    def _mark_approximate(self, tile: _Tile) -> None:
        """Keys of later layers now depend on the selection; only whole tiles are reproducible by others."""
        sequence, start, size = tile.sequence, tile.start, self._config.tile
        if sequence.approximate_from is None or start < sequence.approximate_from:
            sequence.approximate_from = start
        whole = start % size == 0 and tile.stop - start == size
        if not whole and (sequence.private_from is None or start < sequence.private_from):
            sequence.private_from = start

    def _prune(self, step: Step, layer: int, tile: _Tile) -> None:
        """Discard mode: drop the lowest pages of a sequence that is over its budget in `layer`, for good."""
        sequence = tile.sequence
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
