"""A call's tiles one after the other, group by group, for kernels that have no such call of their own."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvpager.kernels.numbers import merge, narrowed, widened
from kvpager.ports import (
    BatchResult,
    BoolArray,
    Digest,
    FloatArray,
    IntArray,
    Kernel,
    Layer,
    Masses,
    PageList,
    Partial,
    States,
    TileQuery,
    Tiles,
)

__all__ = ["PlainBatch", "within", "write"]

NO_PAGES = np.empty(0, np.int64)


def within(states: States, most: float) -> bool:
    """Whether all numbers are in -most..most; NaN is not."""
    numbers = widened(states)
    return bool(numbers.max() <= most and numbers.min() >= -most)


def write(layer: Layer, pieces: IntArray, keys: States, values: States, digest: Digest | None, full: IntArray) -> None:
    """Store new tokens in the pages of all heads and summarise full pages, as in :class:`kvpager.ports.Kernel`."""
    new_keys, new_values = widened(keys), widened(values)
    for row, offset, token, count in pieces.tolist():
        frames = layer.table[row, layer.layer].astype(np.int64)
        part = slice(token, token + count)
        layer.storage.write(frames, offset, new_keys[:, part], new_values[:, part])
    if digest is not None and full.size:
        frames = layer.table[full, layer.layer].astype(np.int64)
        # from the stored keys, not from those that came in: attention will see the rounded ones
        stored, _ = layer.storage.read(frames.ravel())
        digest.build(layer.layer, full, stored.reshape(*frames.shape, *stored.shape[1:]))


class _Pages(NamedTuple):
    """Pages of a tile, by head, then by block: int64 [n] each, `flat` as in the page table."""

    heads: IntArray
    blocks: IntArray
    rows: IntArray
    flat: IntArray


class PlainBatch:
    """The attention of a call's tiles by the kernel's `attend` and `settle` (:class:`kvpager.ports.Batch`)."""

    def __init__(
        self,
        kernel: Kernel,
        layer: Layer,
        tiles: Tiles,
        queries: States,
        scale: float,
        softcap: float | None,
        digest: Digest | None,
        output: States,
    ) -> None:
        self._output = output
        self._queries = widened(queries)
        self._runs = [
            _Run(kernel, layer, tiles, fields, self._queries, scale, softcap, digest)
            for fields in tiles.fields.tolist()
        ]
        self._at = 0

    def advance(self, room: int) -> tuple[IntArray, IntArray] | None:
        """Go on until a group has an absent page: that group's pages, and the next one's."""
        while self._at < len(self._runs):
            run = self._runs[self._at]
            wanted = run.advance()
            if wanted is not None:
                return wanted
            part = slice(run.token, run.token + run.query.queries.shape[1])
            self._output[:, part] = narrowed(run.output, self._output.dtype)
            self._at += 1
        return None

    def result(self) -> BatchResult:
        """What the tiles gave, in their order."""
        pages = [pages for run in self._runs for pages in (run.own, run.past)]
        masses = [run.masses for run in self._runs]
        counts = [len(run.own.flat) + len(run.past.flat) for run in self._runs]
        return BatchResult(
            np.concatenate([[0], np.cumsum(counts)]).tolist(),
            np.concatenate([one.rows for one in pages]),
            np.concatenate([one.heads for one in pages]),
            np.concatenate([one.blocks for one in pages]),
            np.concatenate([run.recalled for run in self._runs]),
            Masses(*(np.concatenate(kind) for kind in zip(*masses, strict=True))),
            np.concatenate([run.ratio for run in self._runs]),
            [run.missed for run in self._runs],
        )


class _Run:
    """One tile: its own pages, the choice among the past ones, and those."""

    def __init__(
        self,
        kernel: Kernel,
        layer: Layer,
        tiles: Tiles,
        fields: list[int],
        queries: FloatArray,
        scale: float,
        softcap: float | None,
        digest: Digest | None,
    ) -> None:
        self.token, tokens, start, block0, self._first, self._block, last, self._filled = fields
        self.query = TileQuery(queries[:, self.token : self.token + tokens], start, scale, tiles.window, softcap)
        self._kernel, self._layer, self._tiles, self._digest, self._size = kernel, layer, tiles, digest, tiles.page_size
        self._rows = tiles.rows[block0:]
        self._parts: list[Partial] = []
        self._back: list[IntArray] = []
        self.own = self._all(self._block, last)
        self.past = self._all(0, 0)
        self._chosen = False
        self.ratio = np.empty(0, np.float32)
        self.missed = 0.0

    def _all(self, first: int, stop: int) -> _Pages:
        heads = self._layer.table.shape[2]
        return self._pages(np.repeat(np.arange(heads), stop - first), np.tile(np.arange(first, stop), heads))

    def _pages(self, heads: IntArray, blocks: IntArray) -> _Pages:
        _, layers, count = self._layer.table.shape
        rows = self._rows[blocks]
        return _Pages(heads, blocks, rows, (rows * layers + self._layer.layer) * count + heads)

    def advance(self) -> tuple[IntArray, IntArray] | None:
        """Attend to the groups that are left; the pages of the first that has an absent one, and of the next."""
        wanted = self._groups(self.own, 0)
        if wanted is None and not self._chosen:
            self.past = self._choose()
            self._chosen = True
        if wanted is None:
            wanted = self._groups(self.past, -(-len(self.own.flat) // self._tiles.group_pages))
        if wanted is None:
            self._settle()
        return wanted

    def _groups(self, pages: _Pages, before: int) -> tuple[IntArray, IntArray] | None:
        most = self._tiles.group_pages
        table = self._layer.table.reshape(-1)
        for begin in range((len(self._parts) - before) * most, len(pages.flat), most):
            span = slice(begin, begin + most)
            flat = pages.flat[span]
            frames = table[flat].astype(np.int64)
            absent = frames < 0
            if absent.any():
                self._back.append(flat[absent])
                return flat, pages.flat[begin + most : begin + 2 * most]
            starts = pages.blocks[span] * self._size
            counts = np.minimum(self._filled - starts, self._size)
            group = PageList(frames, pages.heads[span], starts, counts, self._layer.table.shape[2])
            self._parts.append(self._kernel.attend(self._layer.storage, self.query, group))
        return None

    def _choose(self) -> _Pages:
        tiles, n = self._tiles, self._block - self._first
        if tiles.given is not None:
            return self._pages(*tiles.given)
        if tiles.room is None or n <= tiles.room.pages:
            return self._all(self._first, self._block)
        assert self._digest is not None
        own_lse = self._parts[0].lse if len(self._parts) == 1 else merge(self._parts)[1]
        starts = np.arange(self._first, self._block) * self._size
        rows = self._rows[self._first : self._block]
        room = tiles.room._replace(first_block=self._first)
        chosen, ratio, self.missed = self._digest.choose(self._layer.layer, rows, self.query, starts, own_lse, room)
        self.ratio = ratio.reshape(-1)
        heads, blocks = chosen.nonzero()  # strided views of one array; kernels want contiguous ones
        return self._pages(np.ascontiguousarray(heads), blocks + self._first)

    def _settle(self) -> None:
        heads = np.concatenate([self.own.heads, self.past.heads])
        self.output, self.masses = self._kernel.settle(self._parts, heads)

    @property
    def recalled(self) -> BoolArray:
        """Which of its pages were absent when their group's turn came."""
        flat = np.concatenate([self.own.flat, self.past.flat])
        return np.isin(flat, np.concatenate([NO_PAGES, *self._back]))
