"""What is known about every page, over time: the numbers from which eviction policies choose.

One :class:`AttentionScorer` serves a pager. It keeps a few numbers for each page, in one array a field,
and only the fields that the policy asks for, so that the books stay below 16 bytes a page. Policies get
them as a :class:`~kvpager.core.numbers.PageNumbers` and never see keys or values.

Time is counted in ticks. A tick is one tile of queries passing through the model (a decode step is one
tick); inside it layers run one after the other, layer 0 first. Ticks never go back (but for a rollback).
When one forward gives a layer several tiles before the next layer runs, each further tile is a tick of its
own, and the next layer goes on in the tick that the layer before it reached: so (tick, layer) is always the
order in which things happened. The grace period doesn't go by that clock but by the tiles that have had a
chance to look at a page, which are the same however a prompt is cut into forwards.

What these numbers are good for was measured with benchmarks/eviction_policies.py: whether a page is selected
next is told best by its estimate at the last selection over that selection's threshold (the odds of being
selected are close to that ratio); smoothing it over several ticks made prediction worse. For dropping pages
for good, the mass that a page was given lately tells best: a mass that fades slowly over tiles of 64 queries
remembers how each page was looked at while it was new, and becomes recency.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kvpager.core.numbers import FIELDS, Int32Array, PageNumbers
from kvpager.ports import Bytes, FloatArray, IntArray, Masses, Rows

__all__ = ["AttentionScorer", "Observed"]

Numbers = npt.NDArray[Any]
_Entry = TypeVar("_Entry")

SEEN_MAX = 255
_ATTENTION = ("estimate", "mass", "total", "window", "last")  # fields that tell how much a page is looked at
MOST_WAITING = 1 << 18  # pages and estimates that wait for the books: about 8 MiB
RATIO_MAX = np.float32(6e4)  # estimates are held as float16, which ends at 65,504


class _Snapshot(NamedTuple):
    """What was known about the pages of some rows and layers."""

    rows: Rows
    layers: slice
    numbers: list[Numbers]


class Observed(NamedTuple):
    """What the tiles of one call gave: rows, heads and masses [n] of their pages, a tile's where `offsets` say.

    queries, ticks   of each tile
    distinct         no page stands twice in it
    """

    rows: IntArray
    heads: IntArray
    masses: Masses
    offsets: Sequence[int]
    queries: Sequence[int]
    ticks: Sequence[int]
    distinct: bool = False

    def pieces(self) -> list[Observed]:
        """The same cut so that no page stands twice in a piece; they are taken in one after the other."""
        if self.distinct or len(self.queries) == 1:
            return [self]
        pieces = []
        for i, (start, stop) in enumerate(pairwise(self.offsets)):
            part, one = slice(start, stop), slice(i, i + 1)
            masses = Masses(*(kind[part] for kind in self.masses))
            pieces.append(
                Observed(
                    self.rows[part], self.heads[part], masses, [0, stop - start], self.queries[one], self.ticks[one]
                )
            )
        return pieces


def _runs(estimates: dict[int, tuple[Rows, FloatArray]]) -> Iterator[tuple[int, int, Rows]]:
    """(first layer, last + 1, rows) of layers that follow one another and look at the same rows.

    Rows that are the same are one array or equal slices: to compare arrays would cost what is saved.
    """
    layers = sorted(estimates)
    while layers:
        first = last = layers.pop(0)
        rows, ratio = estimates[first]
        while layers and layers[0] == last + 1:
            other, other_ratio = estimates[layers[0]]
            same = other is rows or (isinstance(other, slice) and isinstance(rows, slice) and other == rows)
            if not same or other_ratio.shape != ratio.shape:
                break
            last = layers.pop(0)
        yield first, last + 1, rows


def _rounds(waiting: dict[int, list[_Entry]]) -> Iterator[dict[int, _Entry]]:
    """The first entries of all layers, then the second ones, and so on."""
    for turn in range(max(map(len, waiting.values()), default=0)):
        yield {layer: entries[turn] for layer, entries in waiting.items() if turn < len(entries)}


class AttentionScorer:
    """Page mass over time, for the pages of all sequences.

    Pages are addressed by (row, layer, head): a row is a block's row in the page table. ``flat`` indices are
    ``(row * layers + layer) * kv_heads + head``.

    Args:
        layers, kv_heads: the model's.
        needs: the fields to keep, out of :data:`~kvpager.core.numbers.FIELDS`; 4 bytes a page each (``estimate`` 2,
            ``born`` 4 a layer and block), beside 5 bytes for ``last_used`` and ``seen``.
        decay: factor on a page's mass for each query of the tiles that attend to it, above 0 and at most 1. It
            doesn't depend on the clock, so that what other sequences do never changes the order of one's pages,
            and a tile of 64 queries fades it as 64 decode steps do.
        grace: a page is kept under policies that go by attention until this many tiles have seen it, up to 255.
    """

    def __init__(self, layers: int, kv_heads: int, needs: Iterable[str], decay: float, grace: int) -> None:
        self.layers = layers
        self.kv_heads = kv_heads
        self.needs = frozenset(needs)
        self.decay = np.float32(decay)
        self.grace = min(grace, SEEN_MAX)
        if not self.needs <= FIELDS:
            raise ValueError(f"needs: {sorted(self.needs - FIELDS)} is not among {sorted(FIELDS)}")
        pages = (layers, 0, kv_heads)  # a layer's pages lie together: a tile touches one layer
        self._ran = np.zeros(layers, np.int32)  # tick of each layer's last tile
        self._position = np.zeros(0, np.int32)  # of the block
        self._born = np.zeros((layers if "born" in self.needs else 0, 0), np.int32)  # all heads are written at once
        # By page; exactly these change after a page was born.
        self._pages: dict[str, Numbers] = {"last_used": np.zeros(pages, np.int32), "seen": np.zeros(pages, np.uint8)}
        for name in sorted(self.needs - {"born"}):
            self._pages[name] = np.zeros(pages, np.float16 if name == "estimate" else np.float32)
        # What came since the books were last looked at, by layer: no page stands twice in one entry.
        self._observed: dict[int, list[Observed]] = {}
        self._estimates: dict[int, list[tuple[Rows, FloatArray]]] = {}
        self._waiting = 0  # pages and estimates in it
        self._watched: tuple[Sequence[Rows], slice] | None = None  # of the open step
        self._kept: list[_Snapshot] = []

    @property
    def rows(self) -> int:
        """Block rows that there is room for."""
        return len(self._position)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays = [self._ran, self._position, self._born, *self._pages.values()]
        return sum(array.nbytes for array in arrays)

    def grow(self, rows: int) -> None:
        """Make room for `rows` block rows in all; less than there is changes nothing."""
        more = rows - self.rows
        if more <= 0:
            return

        self.settle()

        def longer(array: Numbers) -> Numbers:
            return np.concatenate([array, np.zeros((len(array), more, *array.shape[2:]), array.dtype)], axis=1)

        self._position = np.concatenate([self._position, np.zeros(more, np.int32)])
        self._born = longer(self._born)
        self._pages = {name: longer(array) for name, array in self._pages.items()}

    def born(self, rows: IntArray, layer: int, positions: IntArray, tick: int | IntArray) -> None:
        """Start the pages of new blocks in one layer (all heads): rows [n], block indices [n], one tick or [n]."""
        if layer in self._observed or layer in self._estimates:
            self.settle()  # what waits may be about the rows' former pages
        self._position[rows] = positions
        if "born" in self.needs:
            self._born[layer, rows] = tick
        for name, field in self._pages.items():
            if name == "last_used":
                field[layer, rows] = np.reshape(tick, (-1, 1))
            else:
                field[layer, rows] = np.nan if name in ("window", "estimate") else 0

    def observe(self, layer: int, given: Observed) -> None:
        """Take in what tiles gave to the pages that they attended to, one tile after the other."""
        if self._waiting > MOST_WAITING:
            self.settle()
        self._ran[layer] = given.ticks[-1]
        self._observed.setdefault(layer, []).extend(given.pieces())
        self._waiting += len(given.heads)

    def estimated(self, rows: Rows, layer: int, ratio: FloatArray) -> None:
        """Take in one selection: ratio float32 [H, n], estimated mass over threshold of each candidate row [n].

        1 and above says that the page was selected, and `observe` will follow for it.
        """
        self._estimates.setdefault(layer, []).append((rows, ratio))
        self._waiting += ratio.size

    def settle(self) -> None:
        """Bring into the books what waits: a decode step's layers together cost little more than one of them."""
        if not self._waiting:
            return
        self._remember()
        estimates, observed = self._estimates, self._observed
        self._estimates, self._observed, self._waiting = {}, {}, 0
        for now in _rounds(estimates):
            self._take_in_estimates(now)
        for given in _rounds(observed):
            self._take_in_masses(given)

    def _take_in_estimates(self, estimates: dict[int, tuple[Rows, FloatArray]]) -> None:
        for first, last, rows in _runs(estimates):
            ratio = np.stack([estimates[layer][1] for layer in range(first, last)]).swapaxes(1, 2)
            seen = self._pages["seen"][first:last]
            before = seen[:, rows]
            seen[:, rows] = before + ((ratio < 1) & (before < SEEN_MAX))
            if "estimate" in self._pages:
                self._pages["estimate"][first:last, rows] = np.minimum(ratio, RATIO_MAX)

    def _take_in_masses(self, observed: dict[int, Observed]) -> None:
        counts = np.concatenate([np.diff(one.offsets) for one in observed.values()])
        layers = np.repeat(list(observed), [len(one.queries) for one in observed.values()])

        def joined(arrays: Iterable[Numbers]) -> Numbers:
            return np.concatenate(list(arrays))

        def each(values: npt.ArrayLike, dtype: npt.DTypeLike) -> Numbers:
            return np.repeat(np.asarray(values, dtype), counts)

        queries = joined(np.asarray(one.queries) for one in observed.values())
        page = joined(one.rows for one in observed.values()) * self.kv_heads
        page += joined(one.heads for one in observed.values())
        page += each(layers, np.int64) * (self.rows * self.kv_heads)
        fields = {name: field.reshape(-1) for name, field in self._pages.items()}
        fields["last_used"][page] = each(joined(np.asarray(one.ticks) for one in observed.values()), np.int32)
        before = fields["seen"][page]
        fields["seen"][page] = before + (before < SEEN_MAX)
        if "mass" in fields:
            faded = fields["mass"][page] * each(self.decay**queries, np.float32)
            fields["mass"][page] = np.maximum(faded, joined(one.masses.peak for one in observed.values()))
        if "total" in fields:
            fields["total"][page] += joined(one.masses.total for one in observed.values())
        if "last" in fields:
            fields["last"][page] = joined(one.masses.last for one in observed.values())
        if "window" in fields:
            window = joined(one.masses.window for one in observed.values())
            several = each(queries > 1, np.bool_)
            fields["window"][page[several]] = window[several]

    def begin(self, rows: Sequence[Rows], layers: slice) -> None:
        """From now on all can be undone that is taken in about the pages of these rows and layers."""
        self.settle()
        self._watched, self._kept = (rows, layers), []

    def keep(self) -> None:
        """What was taken in since `begin` stays."""
        self._watched = None

    def undo(self) -> None:
        """Forget what was taken in since `begin`. Mostly it still waits, and nothing has to be put back."""
        self._estimates, self._observed, self._waiting = {}, {}, 0
        for kept in self._kept:
            for array, numbers in zip(self._pages.values(), kept.numbers, strict=True):
                array[kept.layers][:, kept.rows] = numbers
        self._watched, self._kept = None, []

    def _remember(self) -> None:
        """Before the books change in a step for the first time, keep them as they were."""
        if self._watched is not None and not self._kept:
            several, layers = self._watched
            for rows in several:
                numbers = [array[layers][:, rows].copy() for array in self._pages.values()]
                self._kept.append(_Snapshot(rows, layers, numbers))

    def copy(self, source_row: int, target_row: int) -> None:
        """Copy all that is known about a block's pages to another row (a block was copied)."""
        self.settle()
        self._position[target_row] = self._position[source_row]
        for array in (self._born, *self._pages.values()):
            array[:, target_row] = array[:, source_row]

    @property
    def kind(self) -> str:
        """What `dump` gives, in words: fields and their dtypes. It changes whenever the meaning of the bytes does."""
        fields = [f"{name}:{array.dtype.str}" for name, array in self._kept_fields().items()]
        return f"scores-1 layers={self.layers} heads={self.kv_heads} {' '.join(fields)}"

    def dump(self, rows: IntArray) -> Bytes:
        """All that is known about the pages of rows [n], uint8 [n, k]; ticks are those of this scorer's clock."""
        self.settle()
        parts = [np.ascontiguousarray(array[:, rows].swapaxes(0, 1)) for array in self._kept_fields().values()]
        return np.concatenate([part.reshape(len(rows), -1).view(np.uint8) for part in parts], axis=1)

    def load(self, rows: IntArray, positions: IntArray, known: Bytes, tick: int) -> None:
        """Know of rows [n] what `dump` gave, of a scorer of the same kind; `tick` is now, and nothing came after it."""
        self.settle()
        self._position[rows] = positions
        start = 0
        for name, array in self._kept_fields().items():
            shape = (len(rows), *array.shape[:1], *array.shape[2:])
            stop = start + int(np.prod(shape[1:])) * array.itemsize
            values = np.ascontiguousarray(known[:, start:stop]).view(array.dtype).reshape(shape)
            start = stop
            array[:, rows] = (np.minimum(values, tick) if name in ("last_used", "born") else values).swapaxes(0, 1)

    def standing(self, rows: IntArray, others: IntArray) -> FloatArray:
        """The share of `others` [m] whose pages have less attention on average than those of rows [n], float32 [n].

        Zeros where the policy keeps nothing to go by.
        """
        self.settle()
        name = next((name for name in _ATTENTION if name in self._pages), None)
        if name is None or not others.size:
            return np.zeros(len(rows), np.float32)
        kept = self._pages[name]
        means, theirs = (kept[:, some].astype(np.float32).mean(axis=(0, 2)) for some in (rows, others))
        share: FloatArray = (theirs < means[:, None]).mean(axis=1, dtype=np.float32)
        return share

    def resume(self, tick: int) -> None:
        """Layers have run until `tick` already: with a clock that goes on from another process's."""
        self._ran[:] = tick

    def _kept_fields(self) -> dict[str, Numbers]:
        return self._pages | ({"born": self._born} if "born" in self.needs else {})

    def last_used(self, flat: IntArray) -> Int32Array:
        """The ticks at which pages of flat indices [n] were last attended to, or written."""
        self.settle()
        block, head = np.divmod(flat.astype(np.int64), self.kv_heads)
        row, layer = np.divmod(block, self.layers)
        found: Int32Array = self._pages["last_used"][layer, row, head]
        return found

    def numbers(
        self, flat: IntArray, tick: int, current_layer: int, again: bool = False, shared: bool = False
    ) -> PageNumbers:
        """What is known about the pages of flat indices [n], as copies.

        `again`: the running layer has another tile to run before the next layer's turn. `shared`: the pages may
        belong to several sequences, and all ticks came from one clock. Leave it False where one sequence's pages
        are compared for a choice that other sequences must not sway.
        """
        self.settle()
        # Whole divisions by a scalar are several times faster in int32, and than divmod.
        page = flat.astype(np.int32) if self.rows * self.layers * self.kv_heads < 2**31 else flat
        of_layer = page // self.kv_heads
        row = of_layer // self.layers
        layer = (of_layer - row * self.layers).astype(np.int32, copy=False)
        head = page - of_layer * self.kv_heads
        block = layer * self.rows + row
        page = (block * self.kv_heads + head).astype(np.intp)  # as `take` wants it, which is faster than an index
        last_used = self._pages["last_used"].reshape(-1).take(page)
        none = np.broadcast_to(np.int32(0), flat.shape)
        unknown = np.broadcast_to(np.float32(np.nan), flat.shape)

        def field(name: str) -> FloatArray:
            kept = self._pages.get(name)
            return unknown if kept is None else kept.reshape(-1).take(page).astype(np.float32, copy=False)

        return PageNumbers(
            mass=field("mass"),
            total=field("total"),
            last=field("last"),
            window=field("window"),
            estimate=field("estimate"),
            last_used=last_used,
            born=self._born.reshape(-1)[block] if "born" in self.needs else none,
            seen=self._pages["seen"].reshape(-1).take(page),
            position=self._position.take(row),
            layer=layer,
            head=head.astype(np.int32, copy=False),
            missed=np.maximum(self._ran.take(layer) - last_used, 0) if shared else none,
            now=tick,
            current_layer=current_layer,
            layers=self.layers,
            grace=self.grace,
            again=again,
        )
