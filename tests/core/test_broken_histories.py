"""Histories in which swap fails and observers interrupt at random: what is held stays right, and books balance."""

from __future__ import annotations

import numpy as np
import pytest

from kvpager import KVShape, Pager, PagerConfig
from kvpager.errors import KVPagerError, PageLost, SwapError
from kvpager.swap import MemorySwap


class Unreliable(MemorySwap):
    """Swap of which each call fails with a probability of `risk`."""

    risk = 0.0
    rng: np.random.Generator

    def write(self, pages, rows=None):
        if self.rng.random() < self.risk:
            raise SwapError("not written")
        return super().write(pages, rows)

    def read(self, slots, into=None, rows=None):
        if self.rng.random() < self.risk:
            raise PageLost("not read")
        return super().read(slots, into, rows)


class History:
    """Two sequences of a pager, layers of different length among their states, and the keys that each must hold."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        heads, layers = self.rng.integers(1, 3), self.rng.integers(2, 4)
        self.shape = KVShape(int(layers), int(heads), int(2 * heads), 4)
        settings = {"page_size": 8, "tile": (1, 16)[seed % 2], "group_pages": (1, 4)[seed // 2 % 2]}
        settings["budget"] = (None, 32)[seed // 4 % 2]
        least = Pager(self.shape, PagerConfig(pool=1, **settings)).minimum_frames(2)
        self.swap = Unreliable(self.shape.page_bytes(8), 2**22)
        self.swap.rng = self.rng
        self.pager = Pager(self.shape, PagerConfig(pool=least + seed % 8, **settings), swap=self.swap)
        self.pager.observers.append(self.interrupt)
        self.impatience = 0.0
        self.held = {self.pager.open(): [self.random(0)] * self.shape.layers for _ in range(2)}

    def random(self, tokens):
        return self.rng.standard_normal((self.shape.kv_heads, tokens, 4)).astype(np.float32)

    def interrupt(self, event):
        if self.rng.random() < self.impatience:
            raise KeyboardInterrupt

    def append(self, sequence, layer):
        keys = self.random(self.rng.integers(1, 150))
        self.pager.append(sequence, layer, keys, keys)
        self.held[sequence][layer] = np.concatenate([self.held[sequence][layer], keys], axis=1)

    def attend(self, sequence, layer):
        tokens = self.held[sequence][layer].shape[1]
        if tokens:
            self.pager.attend(sequence, layer, np.repeat(self.random(self.rng.integers(1, tokens + 1)), 2, axis=0))

    def step(self, sequence, layer):
        new = [self.random(20) for _ in range(self.shape.layers)]
        self.pager.begin([sequence], [20])
        for each, keys in enumerate(new):
            self.pager.append(sequence, each, keys, keys)
            self.pager.attend(sequence, each, np.repeat(keys, 2, axis=0))
        self.pager.commit()
        self.held[sequence] = [np.concatenate(pair, axis=1) for pair in zip(self.held[sequence], new, strict=True)]

    def crop(self, sequence, layer):
        length = int(self.rng.integers(0, sequence.length + 1))
        self.pager.crop(sequence, length)
        self.held[sequence] = [keys[:, :length] for keys in self.held[sequence]]

    def fork(self, sequence, layer):
        child = self.pager.fork(sequence)
        (other,) = set(self.held) - {sequence}
        self.pager.close(other)
        self.held = {sequence: self.held[sequence], child: list(self.held[sequence])}

    def go(self):
        """One call, which may fail; afterwards lengths are right and the books balance."""
        sequence = list(self.held)[self.rng.integers(2)]
        calls = (self.append, self.append, self.attend, self.step, self.crop, self.fork)
        call = calls[self.rng.integers(len(calls))]
        self.swap.risk, self.impatience = (0.5, 0.2) if self.rng.random() < 0.5 else (0.0, 0.0)
        try:
            call(sequence, self.rng.integers(self.shape.layers))
        except (KVPagerError, KeyboardInterrupt):
            self.pager.rollback()
        self.swap.risk = self.impatience = 0.0
        self.pager.check()
        for sequence, held in self.held.items():
            assert sequence.filled.tolist() == [keys.shape[1] for keys in held]

    def read_all(self):
        for sequence, held in self.held.items():
            for layer, keys in enumerate(held):
                for found in self.pager.read(sequence, layer):
                    np.testing.assert_array_equal(found, keys)


@pytest.mark.promise(3)
@pytest.mark.parametrize("seed", range(16))
def test_nothing_is_lost_or_left_behind(seed):
    history = History(seed)
    for _ in range(50):
        history.go()
    history.read_all()
    for sequence in history.held:
        history.pager.close(sequence)
    history.pager.check()
    assert history.pager.stats().frames_used == history.swap.used == 0
