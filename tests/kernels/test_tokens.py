"""Open pages token by token: what is read of them makes them anew elsewhere, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpager.config import KVShape
from kvpager.kernels.coded import CodedStorage
from kvpager.kernels.native_storage import NativeStorage
from kvpager.kernels.reference import ReferenceStorage

DTYPES = ["float32", "bfloat16", "float16", "int8"]
FRAMES = 12


def storages(dtype, dim, size, frames=FRAMES):
    """The same storage twice of each kind, so that one can be made from the other."""
    shape = KVShape(1, 1, 1, dim, dtype=dtype)
    plain = CodedStorage if dtype == "int8" else ReferenceStorage
    return [(made(frames, shape, size), made(frames, shape, size)) for made in (NativeStorage, plain)]


def numbers(rng, *dims):
    wide = (rng.standard_normal((2, *dims)) * 10.0 ** rng.integers(-9, 4)).astype(np.float32)
    wide.reshape(-1)[: min(6, wide.size)] = [0, -0.0, 65504, -65504, 6e-8, 1.0009765][: wide.size]
    return wide


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=25, deadline=None)
@given(st.sampled_from([8, 16, 32]), st.sampled_from([8, 24, 64]), st.integers(0, 2**32 - 1), st.data())
def test_pages_made_of_tokens_go_on_as_those_that_were_suspended(dtype, size, dim, seed, data):
    count = data.draw(st.integers(1, size - 1))
    rng = np.random.default_rng(seed)
    first, rest = numbers(rng, FRAMES, count, dim), numbers(rng, FRAMES, size - count, dim)
    order = rng.permutation(FRAMES)
    every, told = np.arange(FRAMES), []
    for there, here in storages(dtype, dim, size):
        here.write(every, 0, *numbers(rng, FRAMES, size, dim))  # what lay in the frames before has no influence
        there.write(every, 0, *first)
        each = [there.tokens(every, np.full(FRAMES, offset)) for offset in range(count)]
        assert each[0].shape == (FRAMES, there.token_bytes)
        here.put_tokens(order, np.stack(each, axis=1))
        for storage, frames in ((there, every), (here, order)):
            storage.write(frames, count, *rest)
        told.append((each, there.dump(every), there.read(every)))
        assert np.array_equal(here.dump(order), there.dump(every))
    assert np.array_equal(told[0][0], told[1][0]), "the kernels' tokens are not the same bytes"
    assert all(np.array_equal(one, other) for one, other in zip(told[0][2], told[1][2], strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_call_reads_other_tokens_of_other_pages_and_of_one_page_several(dtype):
    rng = np.random.default_rng(1)
    frames, offsets = rng.integers(0, FRAMES, 50), rng.integers(0, 7, 50)
    for storage, _ in storages(dtype, 16, 8):
        storage.write(np.arange(FRAMES), 0, *numbers(rng, FRAMES, 7, 16))
        found = storage.tokens(frames, offsets)
        one_by_one = [storage.tokens(frames[i : i + 1], offsets[i : i + 1])[0] for i in range(50)]
        assert np.array_equal(found, np.stack(one_by_one))
        keys, values = storage.read(frames, offsets)
        each = np.arange(50)
        wanted = np.concatenate([keys[each, offsets], values[each, offsets]], axis=1)
        held = {2 * 16 * 4: np.float32, 2 * 16 * 2: np.float16 if dtype == "float16" else np.uint16}
        told = found.view(held[storage.token_bytes])
        if told.dtype == np.uint16:
            told = (told.astype(np.uint32) << 16).view(np.float32)
        assert np.array_equal(told.astype(np.float32), wanted)


def test_an_int8_page_that_was_full_and_was_cut_gives_what_its_codes_stand_for():
    rng = np.random.default_rng(2)
    whole, last = numbers(rng, FRAMES, 8, 16), numbers(rng, FRAMES, 3, 16)
    every = np.arange(FRAMES)
    for there, here in storages("int8", 16, 8):
        there.write(every, 0, *whole)
        here.put_tokens(every, np.stack([there.tokens(every, np.full(FRAMES, offset)) for offset in range(5)], axis=1))
        for storage in (there, here):
            storage.write(every, 5, *last)
        assert np.array_equal(here.dump(every), there.dump(every))


def test_wrong_tokens_are_refused():
    storage = NativeStorage(4, KVShape(1, 1, 1, 16), 8)
    for name, call in {
        "frames": lambda: storage.tokens(np.array([4]), np.array([0])),
        "offsets": lambda: storage.tokens(np.array([0]), np.array([8])),
        "offsets: shape": lambda: storage.tokens(np.array([0, 1]), np.array([0])),
        "tokens": lambda: storage.native.tokens(np.array([0]), np.array([0]), np.zeros((1, 3), np.uint8)),
    }.items():
        with pytest.raises(ValueError, match=name.partition(":")[0]):
            call()
