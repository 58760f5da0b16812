"""A pager fed as a model would: keys, values and queries are a function of the tokens before them alone."""

from __future__ import annotations

import numpy as np

from kvpager import KVShape, Pager, PagerConfig
from kvpager.kernels.reference import ReferenceKernel

SMALL = KVShape(layers=2, kv_heads=2, query_heads=4, head_dim=8)
SETTINGS = {"pool": 400, "page_size": 8, "tile": 16, "group_pages": 4, "prefix_tokens": 4096}


def text(count, seed=0):
    """Tokens."""
    return np.random.default_rng(seed).integers(0, 1000, count).tolist()


class Fed:
    """A pager over a store; `run` reads tokens into a sequence, in whole tiles or one by one."""

    def __init__(self, store=None, shape=SMALL, kernel=ReferenceKernel, **config):
        self.shape = shape
        self.pager = Pager(shape, PagerConfig(**{**SETTINGS, **config}), kernel=kernel(), store=store)

    def states(self, tokens, position, layer):
        """Keys, values and queries of one token."""
        seed = (layer, position, tokens[position], sum(tokens[:position]))
        numbers = np.random.default_rng(seed).standard_normal((3, self.shape.query_heads, 1, self.shape.head_dim))
        return numbers.astype(np.float32)

    def run(self, sequence, tokens, singly=False):
        """Read the rest of `tokens` into a sequence; returns the outputs of all layers, [tokens, layers, heads, D]."""
        outputs = []
        tile = self.pager.config.tile
        while sequence.length < len(tokens):
            start = sequence.length
            stop = start + 1 if singly else min((start // tile + 1) * tile, len(tokens))
            outputs.append(self.step(sequence, tokens, stop))
        return np.concatenate(outputs) if outputs else np.zeros(0, np.float32)

    def step(self, sequence, tokens, stop):
        """One step, up to `stop`."""
        start = sequence.length
        self.pager.begin([sequence], [stop - start], [tokens[start:stop]])
        layers = []
        for layer in range(self.shape.layers):
            made = [self.states(tokens, position, layer) for position in range(start, stop)]
            numbers = np.concatenate(made, axis=2)
            heads = self.shape.kv_heads
            layers.append(self.pager.attend_step(layer, numbers[2], numbers[0, :heads], numbers[1, :heads]))
        self.pager.commit()
        self.pager.check()
        return np.stack(layers).transpose(2, 0, 1, 3)

    def open(self, tokens, salt=b""):
        """A sequence on what is known of these tokens."""
        return self.pager.open(tokens, salt)

    def order(self, sequence):
        """Which pages would leave first, by layer, with their scores."""
        layers = range(self.shape.layers)
        return [
            [(page.block, page.kv_head, page.score) for page in self.pager.scores(sequence, layer)] for layer in layers
        ]
