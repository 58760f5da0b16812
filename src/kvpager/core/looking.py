"""A pager as one looks at it: what sequences hold and where, sizes, counters, and whether the books balance."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from kvpager.config import KVShape
from kvpager.core import books, transaction
from kvpager.core.attention import TileEvent
from kvpager.core.checks import whole
from kvpager.core.guards import Guarded, owned
from kvpager.core.sequence import Sequence
from kvpager.ports import FloatArray
from kvpager.stats import PagerLatencies, PagerStats

__all__ = ["Looking"]


class Looking(Guarded):
    """The calls of a pager that change nothing but, where pages are read back, what is resident."""

    shape: KVShape

    @owned
    def read(
        self, sequence: Sequence, layer: int, start: int = 0, stop: int | None = None
    ) -> tuple[FloatArray, FloatArray]:
        """Keys and values of positions start..stop-1 of one layer, float32 [kv_heads, tokens, head_dim] each.

        Absent pages are read back. Raises InputError when pages of these positions were discarded.
        """
        self._check_running(sequence, "read")
        layer = whole("layer", layer, 0, self.shape.layers - 1)
        end = int(sequence.filled[layer])
        stop = end if stop is None else whole("stop", stop, 1, end)
        start = whole("start", start, 0, max(0, stop - 1))
        return books.read(self._state, sequence, layer, start, stop)

    @owned
    def page_table(self, sequence: Sequence) -> npt.NDArray[np.int32]:
        """A copy of the frames of a sequence's pages, int32 [blocks, layers, kv_heads]; -1 (ABSENT) if not resident."""
        self._check_sequence(sequence)
        return self._state.table.frame[sequence.rows]

    @owned
    def scores(self, sequence: Sequence, layer: int) -> list[books.PageScore]:
        """A sequence's pages in one layer as the policy sees them: the one that would be evicted next comes first."""
        self._check_sequence(sequence)
        return books.scores(self._state, sequence, whole("layer", layer, 0, self.shape.layers - 1))

    @property
    def observers(self) -> list[Callable[[TileEvent], None]]:
        """Functions called after each tile with a TileEvent; add yours to the list."""
        return self._state.attender.observers

    @property
    def frames(self) -> int:
        """The pool's size, in frames."""
        return self._state.pool.frames

    @property
    def group_pages(self) -> int:
        """Pages that one partial attention covers: the setting, or what was chosen for the shape."""
        return self._state.group_pages

    def minimum_frames(self, sequences: int = 1, tokens: int | None = None) -> int:
        """The smallest pool, in frames, for that many sequences of at most `tokens` tokens each (None: any length).

        Recall: for each sequence two blocks' pages (the open one, and the one that a step opens), and one group.
        Discard: what the budget, the tile and the open block hold for each sequence; a step's new tokens come on top.
        """
        whole("sequences", sequences, 1, 2**31 - 1)
        return self._state.minimum_frames(sequences, None if tokens is None else whole("tokens", tokens, 1, 2**40))

    @owned
    def step_frames(self, growth: Mapping[Sequence, int]) -> int:
        """The frames without which a step cannot run that adds so many tokens to these sequences (0: it only waits).

        All other open sequences are counted with what they hold now; parked ones only where `growth` names them, as if
        they were back. The pool has `stats().frames`.
        """
        counts = {}
        for sequence, count in growth.items():
            self._check_sequence(sequence)
            counts[sequence.id] = whole("growth", count, 0, 2**31 - 1)
        return transaction.frames_needed(self._state, counts)

    @owned
    def stats(self) -> PagerStats:
        """Counters and sizes."""
        return books.stats(self._state)

    @owned
    def latencies(self) -> PagerLatencies:
        """How long parts of the work took."""
        return self._state.residency.latencies.look()

    @owned
    def check(self) -> None:
        """Assert that the books balance (promise 3). For tests and debugging; no step may be open."""
        self._check_up()
        assert self._state.step is None, "a step is open"
        books.check(self._state)
