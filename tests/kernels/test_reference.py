from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpager.config import KVShape
from kvpager.kernels.reference import ReferenceKernel, merge, token_scores
from kvpager.ports import PageList, TileQuery
from tests.oracle import dense_attention

KERNEL = ReferenceKernel()


def scattered(rng, shape, size, tokens, poison=0.0):
    """A storage whose frames hold `tokens` tokens in random places, the rest filled with `poison`."""
    blocks = -(-tokens // size)
    storage = KERNEL.storage(blocks * shape.kv_heads + 5, shape, size)
    frames = rng.permutation(blocks * shape.kv_heads + 5)[: blocks * shape.kv_heads].reshape(shape.kv_heads, blocks)
    everywhere = np.arange(blocks * shape.kv_heads + 5)
    filler = np.full((len(everywhere), size, shape.head_dim), poison, np.float32)
    storage.write(everywhere, 0, filler, filler)
    keys, values = rng.standard_normal((2, shape.kv_heads, tokens, shape.head_dim)).astype(np.float32)
    for block in range(blocks):
        part = slice(block * size, min(tokens, (block + 1) * size))
        storage.write(frames[:, block], 0, keys[:, part], values[:, part])
    return storage, frames, keys, values


def page_list(frames, size, tokens, blocks):
    heads, _ = frames.shape
    head, block = np.divmod(np.arange(heads * len(blocks)), len(blocks))
    block = np.asarray(blocks)[block]
    return PageList(frames[head, block], head, block * size, np.minimum(tokens - block * size, size), heads)


@settings(max_examples=60, deadline=None)
@given(
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    dim=st.sampled_from([4, 16, 20, 24, 64, 80]),
    size=st.sampled_from([8, 16, 32]),
    tokens=st.integers(1, 150),
    asked=st.integers(1, 70),
    window=st.none() | st.integers(1, 90),
    softcap=st.none() | st.floats(0.5, 30),
    seed=st.integers(0, 2**16),
)
def test_any_shape_equals_dense_attention(kv_heads, group, dim, size, tokens, asked, window, softcap, seed):
    rng = np.random.default_rng(seed)
    asked = min(asked, tokens)
    shape = KVShape(1, kv_heads, kv_heads * group, dim)
    storage, frames, keys, values = scattered(rng, shape, size, tokens, poison=np.nan)
    queries = rng.standard_normal((kv_heads * group, asked, dim)).astype(np.float32)
    tile = TileQuery(queries, tokens - asked, dim**-0.5, window, softcap)
    blocks = list(range(-(-tokens // size)))
    cut = int(rng.integers(0, len(blocks)))
    groups = [part for part in (blocks[:cut], blocks[cut:]) if part]
    parts = [KERNEL.attend(storage, tile, page_list(frames, size, tokens, part)) for part in groups]
    output, lse = merge(parts)
    expected, weights = dense_attention(queries, keys, values, start=tokens - asked, window=window, softcap=softcap)
    np.testing.assert_allclose(output, expected, atol=2e-5)
    for part, members in zip(parts, groups, strict=True):
        pages = page_list(frames, size, tokens, members)
        mass = np.exp(part.page_lse - lse.reshape(kv_heads, group, asked)[pages.heads])
        for page in range(len(pages.frames)):
            span = slice(pages.starts[page], pages.starts[page] + size)
            head = pages.heads[page]
            wanted = weights[head * group : (head + 1) * group, :, span].sum(axis=2)
            np.testing.assert_allclose(mass[page], wanted, atol=2e-5)


def test_a_group_without_visible_keys_adds_nothing():
    rng = np.random.default_rng(0)
    shape = KVShape(1, 1, 2, 8)
    storage, frames, _, _ = scattered(rng, shape, 8, 32)
    queries = rng.standard_normal((2, 1, 8)).astype(np.float32)
    tile = TileQuery(queries, 31, 1.0, 8, None)
    hidden = KERNEL.attend(storage, tile, page_list(frames, 8, 32, [0, 1]))
    assert np.isneginf(hidden.lse).all()
    assert (hidden.output == 0).all()
    seen = KERNEL.attend(storage, tile, page_list(frames, 8, 32, [2, 3]))
    output, lse = merge([hidden, seen])
    np.testing.assert_array_equal(output, seen.output)
    np.testing.assert_allclose(lse, seen.lse, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_stored_bytes_travel_unchanged(dtype):
    rng = np.random.default_rng(1)
    shape = KVShape(1, 1, 1, 24, dtype=dtype)
    storage = KERNEL.storage(6, shape, 16)
    keys, values = rng.standard_normal((2, 3, 16, 24)).astype(np.float32)
    storage.write(np.array([4, 0, 2]), 0, keys, values)
    pages = storage.dump(np.array([4, 0, 2]))
    assert pages.shape == (3, shape.page_bytes(16))
    assert storage.nbytes == 6 * shape.page_bytes(16)
    storage.load(np.array([1, 5, 3]), pages)
    np.testing.assert_array_equal(storage.dump(np.array([1, 5, 3])), pages)
    storage.copy(np.array([1]), np.array([0]))
    np.testing.assert_array_equal(storage.dump(np.array([0])), pages[:1])
    back, _ = storage.read(np.array([4]))
    np.testing.assert_allclose(back[0], keys[0], rtol={"float32": 0, "float16": 1e-3, "bfloat16": 2**-8}[dtype])


def test_bfloat16_rounds_to_nearest_even():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(2)
    storage = KERNEL.storage(1, KVShape(1, 1, 1, 64, dtype="bfloat16"), 16)
    keys = (rng.standard_normal((1, 16, 64)) * 10.0 ** rng.integers(-20, 20, (1, 16, 64))).astype(np.float32)
    storage.write(np.array([0]), 0, keys, keys)
    np.testing.assert_array_equal(storage.read(np.array([0]))[0], torch.from_numpy(keys).bfloat16().float().numpy())


def test_token_scores_equal_a_plain_loop():
    rng = np.random.default_rng(3)
    queries, keys = rng.standard_normal((4, 3, 8)).astype(np.float32), rng.standard_normal((2, 5, 8)).astype(np.float32)
    expected = [
        [[sum(queries[h, t, d] * keys[h // 2, n, d] for d in range(8)) * 0.25 for n in range(5)] for t in range(3)]
        for h in range(4)
    ]
    np.testing.assert_allclose(token_scores(queries, keys, 0.25), expected, rtol=1e-4, atol=1e-5)
