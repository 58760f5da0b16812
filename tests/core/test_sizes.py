from __future__ import annotations

import numpy as np
import pytest

from kvpager import KVShape, Pager, PagerConfig


@pytest.mark.parametrize(
    ("layers", "kv_heads", "group"), [(1, 1, 8), (2, 1, 8), (2, 2, 16), (30, 3, 256), (80, 8, 256)]
)
def test_the_group_and_the_smallest_pool_follow_from_the_shape_alone(layers, kv_heads, group):
    shape = KVShape(layers, kv_heads, 2 * kv_heads, 8)
    for frames in (100, 100_000):
        pager = Pager(shape, PagerConfig(pool=frames))
        assert pager.group_pages == group
        assert pager.minimum_frames() == 2 * layers * kv_heads + group
        assert pager.minimum_frames(tokens=16) == (layers + 1) * kv_heads
    assert Pager(shape, PagerConfig(pool=100, group_pages=5)).group_pages == 5


def test_the_pool_of_the_first_example_serves_any_length():
    pager = Pager(KVShape(layers=1, kv_heads=1, query_heads=1, head_dim=32), PagerConfig(pool=64, budget=None))
    sequence = pager.open()
    rng = np.random.default_rng(0)
    for _ in range(20):
        keys = rng.standard_normal((1, 100, 32)).astype(np.float32)
        pager.append(sequence, layer=0, keys=keys, values=keys)
        assert pager.attend(sequence, layer=0, queries=keys).output.shape == (1, 100, 32)
    assert sequence.length == 2000
    pager.check()


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 40, 64, 65, 200])
@pytest.mark.parametrize("mode", ["recall", "discard"])
def test_the_smallest_pool_for_a_length_serves_that_length(tokens, mode):
    shape = KVShape(layers=3, kv_heads=2, query_heads=4, head_dim=8)
    config = {"budget": 64, "mode": mode}
    least = Pager(shape, PagerConfig(pool=1, **config)).minimum_frames(tokens=tokens)
    pager = Pager(shape, PagerConfig(pool=least, **config))
    sequence = pager.open()
    rng = np.random.default_rng(0)
    for start in range(0, tokens, 64):
        count = min(64, tokens - start)
        pager.begin([sequence], [count])
        for layer in range(3):
            keys = rng.standard_normal((2, count, 8)).astype(np.float32)
            pager.append(sequence, layer, keys, keys)
            pager.attend(sequence, layer, np.repeat(keys, 2, axis=0))
        pager.commit()
        pager.check()
    assert sequence.length == tokens
