"""Which page leaves next: the policy's order, taken anew as the layers go by rather than for each fault."""

from __future__ import annotations

import numpy as np

from kvpager.core.pagetable import PageTable
from kvpager.core.policies import Policy
from kvpager.core.pool import FramePool
from kvpager.core.scorer import AttentionScorer
from kvpager.ports import IntArray

__all__ = ["Clock", "Victims"]

SHARE = 2  # of the pages that could leave, one in so many is put in order for the faults that follow
TURNS = 8  # an order serves the layers of one part in so many of a tick


class Clock:
    """Where a pager is in time: the tick, the layer that runs, and whether that layer has more tiles to run."""

    def __init__(self) -> None:
        self.tick, self.layer, self.again = 0, 0, False


class Victims:
    """Frames that may be taken away, those first whose pages score least.

    To score all pages costs as much as reading hundreds of them back. So the half that scores least is kept, in order,
    and later faults take from it what has not been taken, while at most an eighth of the layers have run since. What
    was read back meanwhile is not among them, for it would have to be scored first.
    """

    def __init__(
        self, pool: FramePool, table: PageTable, policy: Policy, scorer: AttentionScorer, clock: Clock, seed: int
    ) -> None:
        self._pool, self._table = pool, table
        self._policy, self._scorer, self._clock = policy, scorer, clock
        self._rng = np.random.default_rng(seed)
        self._frames: IntArray = np.zeros(0, np.int64)
        self._owners = pool.owner[self._frames]
        self._scored = 0  # layers that had run when they were put in order

    @property
    def nbytes(self) -> int:
        """Bytes of the order that is kept."""
        return self._frames.nbytes + self._owners.nbytes

    def least(self, count: int) -> IntArray:
        """The `count` frames to take, or all that may be taken where there are no more."""
        now = self._clock.tick * self._scorer.layers + self._clock.layer
        if count < len(self._frames) and 0 <= now - self._scored <= self._scorer.layers // TURNS:
            frames = self._frames
            there = self._pool.evictable[frames] & ~self._pool.pinned[frames]
            there &= self._pool.owner[frames] == self._owners
            some = np.flatnonzero(there)[:count]
            if len(some) == count:
                self._keep(int(some[-1]) + 1)
                return frames[some]
        self._scored = now
        return self.among(self._pool.victims(), count)

    def _keep(self, start: int) -> None:
        self._frames, self._owners = self._frames[start:], self._owners[start:]

    def among(self, frames: IntArray, count: int) -> IntArray:
        """As `least`, of these frames alone; the ones that come next are kept."""
        self._keep(len(self._frames))
        if count >= len(frames):
            return frames
        scores = self._scores(frames)
        most = min(max(count, len(frames) // SHARE), len(frames) - 1)
        order = np.argpartition(scores, most - 1)[:most]
        if most > count:
            order = order[np.argsort(scores[order], kind="stable")]
            self._frames = frames[order[count:]]
            self._owners = self._pool.owner[self._frames]
        return frames[order[:count]]

    def _scores(self, frames: IntArray) -> np.ndarray:
        flat, clock = self._pool.pages(frames), self._clock
        numbers = self._scorer.numbers(flat, clock.tick, clock.layer, clock.again, shared=True)
        scores = self._policy.score(numbers, self._rng)
        expired = self._table.expired.reshape(-1)[flat // self._table.heads]
        return np.where(expired, np.float32(-np.inf), scores) if expired.any() else scores
