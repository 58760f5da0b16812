"""Attention as the pager has it computed where all pages lie in frames: all sequences of a layer in one call."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvpager.bench.cases import PAGE_SIZE, Case
from kvpager.bench.contenders import Paged, Place
from kvpager.errors import KVPagerError
from kvpager.ports import FloatArray, IntArray, Layer, TileQuery, Tiles

__all__ = ["Layered"]


class Layered(Paged):
    """A kernel's call for a whole layer: the last tile of each sequence, all its groups of pages, their joining."""

    def _place(self, case: Case, frames: IntArray) -> Place:
        heads = case.heads
        shape = (heads.query_heads, case.batch * case.tile, heads.head_dim)
        queries = self._rng.standard_normal(shape, np.float32)
        output = np.empty_like(queries)
        layer, tiles = self._layer(self._storage, frames), self._tiles(case)

        def run() -> None:
            self._attend(layer, tiles, queries, output)

        return run

    def _output(self, case: Case, storage: Any, frames: IntArray, tile: TileQuery) -> FloatArray:
        output = np.empty_like(tile.queries)
        self._attend(self._layer(storage, frames[None]), self._tiles(case), tile.queries, output)
        return output

    def _layer(self, storage: Any, frames: IntArray) -> Layer:
        """A page table for frames [batch, H, blocks], sequence after sequence."""
        table = frames.astype(np.int32).transpose(0, 2, 1).reshape(-1, 1, frames.shape[1])
        return Layer(storage, np.ascontiguousarray(table), 0)

    def _tiles(self, case: Case) -> Tiles:
        start, blocks = case.tokens - case.tile, case.blocks
        rows = np.arange(case.batch * blocks)
        fields = [
            (index * case.tile, case.tile, start, index * blocks, 0, start // PAGE_SIZE, blocks, case.tokens)
            for index in range(case.batch)
        ]
        return Tiles(rows, np.array(fields, np.int64), None, PAGE_SIZE, self._group_pages, None)

    def _attend(self, layer: Layer, tiles: Tiles, queries: FloatArray, output: FloatArray) -> None:
        batch = self._kernel.batch(layer, tiles, queries, self.heads.head_dim**-0.5, None, None, output)
        if batch.advance(0) is not None:
            raise KVPagerError(f"{self.name}: a page is absent, and all are in frames")
        batch.result()
