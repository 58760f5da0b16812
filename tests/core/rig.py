"""A pager driven with random keys, values and queries, and the truth kept beside it."""

from __future__ import annotations

import numpy as np

from kvpager import KVShape, Pager, PagerConfig
from tests.oracle import dense_attention

SMALL = KVShape(layers=2, kv_heads=2, query_heads=4, head_dim=8)


class Rig:
    """Feeds a pager and remembers, for each sequence, all keys and values by layer."""

    def __init__(self, shape=SMALL, seed=0, **config):
        self.shape = shape
        settings = {"pool": 64, "page_size": 8, "tile": 16, "group_pages": 4, **config}
        self.pager = Pager(shape, PagerConfig(**settings))
        self.rng = np.random.default_rng(seed)
        self.truth = {}
        self.events = []
        self.pager.observers.append(self.events.append)

    def random(self, heads, tokens):
        return self.rng.standard_normal((heads, tokens, self.shape.head_dim)).astype(np.float32)

    def open(self, tokens=None):
        sequence = self.pager.open(tokens)
        nothing = np.zeros((self.shape.kv_heads, 0, self.shape.head_dim), np.float32)
        self.truth[sequence.id] = [(nothing, nothing)] * self.shape.layers
        return sequence

    def feed(self, sequences, counts, *, commit=True, token_ids=None):
        """One step; returns outputs [sequence][layer], checked against dense attention on what was visible."""
        self.pager.begin(sequences, counts, token_ids)
        grown = {sequence.id: list(self.truth[sequence.id]) for sequence in sequences}
        outputs = [[] for _ in sequences]
        for layer in range(self.shape.layers):
            for index, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
                keys, values = self.random(self.shape.kv_heads, count), self.random(self.shape.kv_heads, count)
                before = grown[sequence.id][layer]
                grown[sequence.id][layer] = (
                    np.concatenate([before[0], keys], axis=1),
                    np.concatenate([before[1], values], axis=1),
                )
                self.pager.append(sequence, layer, keys, values)
                queries = self.random(self.shape.query_heads, count)
                self.events.clear()
                result = self.pager.attend(sequence, layer, queries)
                self.compare(layer, queries, grown[sequence.id][layer], result)
                outputs[index].append(result.output)
        if commit:
            self.pager.commit()
            self.truth.update(grown)
        else:
            self.pager.rollback()
        return outputs

    def compare(self, layer, queries, truth, result):
        """Replay: dense attention with the positions masked that each tile left out."""
        keys, values = truth
        tokens, total = queries.shape[1], keys.shape[1]
        size = self.pager.config.page_size
        visible = np.zeros((self.shape.kv_heads, tokens, total), bool)
        for event in self.events:
            assert event.layer == layer
            by_token = np.repeat(event.selected, size, axis=1)[:, :total]
            for position in range(event.start, event.stop):
                visible[:, position - (total - tokens), : by_token.shape[1]] = by_token
        expected, weights = dense_attention(
            queries, keys, values, start=total - tokens, window=self.shape.window(layer), visible=visible
        )
        np.testing.assert_allclose(result.output, expected, atol=3e-5)
        blocks = -(-total // size)
        padded = np.zeros((*weights.shape[:2], blocks * size), np.float32)
        padded[..., :total] = weights
        mass = padded.reshape(self.shape.kv_heads, -1, blocks, size).sum(axis=3).mean(axis=1)
        np.testing.assert_allclose(result.page_mass, mass, atol=3e-5)

    def check_reads(self, sequence):
        for layer in range(self.shape.layers):
            keys, values = self.pager.read(sequence, layer)
            np.testing.assert_array_equal(keys, self.truth[sequence.id][layer][0])
            np.testing.assert_array_equal(values, self.truth[sequence.id][layer][1])

    def fork(self, sequence):
        child = self.pager.fork(sequence)
        self.truth[child.id] = list(self.truth[sequence.id])
        return child

    def crop(self, sequence, length):
        self.pager.crop(sequence, length)
        self.truth[sequence.id] = [(k[:, :length], v[:, :length]) for k, v in self.truth[sequence.id]]


def fingerprint(pager):
    """All that a failed call must leave as it was."""
    state = pager._state
    state.scorer.settle()
    kept = [state.table.frame, state.table.slot, state.table.sealed, state.pool.owner, state.pool.evictable]
    kept += list(state.scorer._pages.values())
    sequences = [
        (s.id, s.length, s.closed, s.rows.tolist(), s.filled.tolist(), list(s.tokens), s.tick)
        for s in state.sequences.values()
    ]
    return (
        [array.copy().tobytes() for array in kept],
        sequences,
        list(state.blocks.references),
        state.pool.free_count,
        state.residency.clock.tick,
        state.step is None,
        pager.stats().as_dict() | {"peak_rss_bytes": 0},
    )
