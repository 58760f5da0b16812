"""What the core keeps of one sequence, and of one open step."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from kvpager.ports import BoolArray, IntArray, Rows

__all__ = ["Cost", "Member", "Saved", "Sequence", "Step"]


@dataclass
class Cost:
    """What a sequence has taken, rolled back steps included; a fork goes on from its parent's.

    tiles            tiles attended, over all layers
    pages_attended   pages that they attended to
    recalls          pages that were read back for them
    evictions        pages of its blocks that left the pool while it held them, whoever needed the frames; counted
                     when it is closed
    coverage_sum     sum over tiles of the estimated share of attention that their selection kept
    """

    tiles: int = 0
    pages_attended: int = 0
    recalls: int = 0
    evictions: int = 0
    coverage_sum: float = 0.0

    def add(self, other: Cost) -> None:
        """Count what another sequence of the same tokens has taken."""
        self.tiles += other.tiles
        self.pages_attended += other.pages_attended
        self.recalls += other.recalls
        self.evictions += other.evictions
        self.coverage_sum += other.coverage_sum


class Sequence:
    """One sequence of a pager: opaque but for `id`, `length` (committed tokens), `closed` and `parked`."""

    def __init__(self, number: int, owner: object, layers: int) -> None:
        self.id = number
        self.length = 0
        self.closed = False
        self.owner = owner
        self.rows = np.empty(0, np.int64)
        # tokens written in each layer: equal to `length` but inside a step
        self.filled: IntArray = np.zeros(layers, np.int64)
        # committed token ids as far as they are known without a gap from the start; blocks beyond are anonymous
        self.tokens: list[int] = []
        # token ids announced at `open`, for steps that bring none
        self.announced: list[int] = []
        # what stands for the parent of its first block in chain keys
        self.root = b""
        # chain keys of the leading blocks that may be found by others
        self.keys: list[bytes] = []
        # position from which blocks are approximate, and from which they stay private; None for nowhere
        self.approximate_from: int | None = None
        self.private_from: int | None = None
        # discard mode: bool [blocks, layers, heads], the pages that this sequence still sees
        self.view: BoolArray | None = None
        self.tick = 0
        self.cost = Cost()
        # while it is parked: the slots in swap of its open pages' pieces, [layers * heads * k] or none; else None
        self.stash: IntArray | None = None

    @property
    def parked(self) -> bool:
        """Whether its pages have left the pool until `unpark`."""
        return self.stash is not None

    @property
    def rows(self) -> IntArray:
        """Its blocks' rows of the page table, in order. Set it anew to change it."""
        return self._rows

    @rows.setter
    def rows(self, rows: IntArray) -> None:
        self._rows = rows
        # blocks taken one after the other mostly lie one after the other: a slice of a table is read ten times faster
        self._in_a_row = bool((np.diff(rows) == 1).all())

    def part(self, first: int, stop: int) -> Rows:
        """The rows of blocks first..stop-1: a slice where they lie in a row, else int64 [n]."""
        if self._in_a_row and first < stop <= len(self._rows):
            start = int(self._rows[first])
            return slice(start, start + stop - first)
        return self._rows[first:stop]

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ", parked" if self.parked else ""
        return f"Sequence(id={self.id}, length={self.length}{state})"


Member = tuple[Sequence, int]
"""A sequence, and how many of its tokens a call is about."""


@dataclass(frozen=True)
class Saved:
    """A sequence as it was when a step began."""

    sequence: Sequence
    blocks: int
    filled: IntArray
    view: BoolArray | None
    approximate_from: int | None
    private_from: int | None
    tick: int

    @classmethod
    def of(cls, sequence: Sequence) -> Saved:
        """Remember `sequence`."""
        return cls(
            sequence,
            len(sequence.rows),
            sequence.filled.copy(),
            None if sequence.view is None else sequence.view.copy(),
            sequence.approximate_from,
            sequence.private_from,
            sequence.tick,
        )

    def restore(self) -> IntArray:
        """Put the sequence back; returns the rows that were added since, no longer its own."""
        sequence = self.sequence
        added = sequence.rows[self.blocks :]
        sequence.rows = sequence.rows[: self.blocks].copy()
        sequence.filled = self.filled.copy()
        sequence.view = self.view
        sequence.approximate_from = self.approximate_from
        sequence.private_from = self.private_from
        sequence.tick = self.tick
        return added


@dataclass
class Step:
    """An open transaction.

    counts   tokens that each sequence brings, by id; None for the implicit step of a single call
    held     rows of blocks that were open when the step began, in `layers`: they stay in the pool until its end
    layers   that the step writes to
    plans    what all layers share, kept by the writing and the attention
    dropped  discard mode: flat indices of pages that left a view in this step, oldest first; the first `settled`
             entries have been given up
    broken   discard mode: sequences of which a dropped page had to be given up before the commit
    failed   a call failed half-way: only a rollback is possible
    """

    saved: list[Saved]
    counts: dict[int, int] | None
    tokens: dict[int, list[int]]
    tick: int
    layers: slice
    held: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    plans: dict[Any, Any] = field(default_factory=dict)
    dropped: list[tuple[Sequence, IntArray]] = field(default_factory=list)
    settled: int = 0
    broken: list[Sequence] = field(default_factory=list)
    failed: bool = False

    @cached_property
    def members(self) -> list[Member]:
        """Its sequences and the tokens that each brings, in order."""
        assert self.counts is not None
        return [(saved.sequence, self.counts[saved.sequence.id]) for saved in self.saved]
