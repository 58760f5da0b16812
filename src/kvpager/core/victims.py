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
TURNS = 8  # an order serves the layers of one part in so many of a tick,
FRAMES = (
    8192  # and as many times that as there are so many frames to choose among: to score them all takes so much longer
)
LOOK = 4  # times what is wanted, that is looked at in an order that is older


class Clock:
    """Where a pager is in time: the tick, the layer that runs, and whether that layer has more tiles to run."""

    def __init__(self) -> None:
        self.tick, self.layer, self.again = 0, 0, False


class Victims:
    """Frames that may be taken away, those first whose pages score least.

    To score all pages costs as much as reading hundreds of them back. So the half that scores least is kept, in order,
    and later faults take from it what was neither taken nor attended to, while at most an eighth of the layers have
    asked since (more in a large pool). What was read back meanwhile is not there: it would have to be scored first.
    """

    def __init__(
        self, pool: FramePool, table: PageTable, policy: Policy, scorer: AttentionScorer, clock: Clock, seed: int
    ) -> None:
        self._pool, self._table = pool, table
        self._policy, self._scorer, self._clock = policy, scorer, clock
        self._rng = np.random.default_rng(seed)
        self._frames: IntArray = np.zeros(0, np.int64)
        self._owners = pool.owner[self._frames]
        self._tick = 0  # when they were put in order
        self._turn, self._turns, self._limit = 0, 0, 0  # who asked last, how many have since, and how many may

    @property
    def nbytes(self) -> int:
        """Bytes of the order that is kept."""
        return self._frames.nbytes + self._owners.nbytes

    def least(self, count: int) -> IntArray:
        """The `count` frames to take, or all that may be taken where there are no more."""
        turn = self._clock.layer if self._scorer.layers > 1 else self._clock.tick
        self._turns += turn != self._turn
        self._turn = turn
        if count < len(self._frames) and self._turns <= self._limit:
            frames = self._frames
            there = self._pool.evictable[frames] & ~self._pool.pinned[frames]
            there &= self._pool.owner[frames] == self._owners
            some = np.flatnonzero(there)
            if self._limit > self._scorer.layers // TURNS:
                some = some[: LOOK * count]
                some = some[self._scorer.last_used(self._owners[some].astype(np.int64)) <= self._tick]
            some = some[:count]
            if len(some) == count:
                self._keep(int(some[-1]) + 1)
                return frames[some]
        victims = self._pool.victims()
        self._tick, self._turns = self._clock.tick, 0
        self._limit = self._scorer.layers // TURNS * max(1, len(victims) // FRAMES)
        return self.among(victims, count)

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
