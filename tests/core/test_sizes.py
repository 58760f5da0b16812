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
