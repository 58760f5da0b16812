"""Native frames hold what the reference's frames hold."""

from __future__ import annotations

import numpy as np
import pytest

from kvpager import _native
from kvpager.config import KVShape
from kvpager.kernels.coded import CodedStorage
from kvpager.kernels.native import NativeKernel
from kvpager.kernels.native_storage import NativeStorage
from kvpager.kernels.reference import ReferenceStorage
from kvpager.ports import FrameStorage, PageList, TileQuery

PLAIN = ["float32", "bfloat16", "float16"]


@pytest.fixture(autouse=True)
def _isa_as_it_was():
    isa = _native.isa()
    yield
    _native.set_isa(isa)


@pytest.mark.parametrize("isa", _native.isas())
@pytest.mark.parametrize("size", [8, 16, 32])
@pytest.mark.parametrize("dtype", PLAIN)
def test_tokens_come_back_as_the_reference_holds_them(dtype, size, isa):
    _native.set_isa(isa)
    rng = np.random.default_rng(size)
    shape = KVShape(1, 1, 1, 24, dtype=dtype)
    storages = [made(40, shape, size) for made in (NativeStorage, ReferenceStorage)]
    everywhere = np.arange(40)
    whole = rng.standard_normal((2, 40, size, 24)).astype(np.float32) * np.float32(10.0) ** rng.integers(-9, 5)
    whole[:, 0, 0, :6] = [0, -0.0, 65504, -65504, 6e-8, 1.0009765]
    some, part = rng.permutation(40)[:7], rng.standard_normal((2, 7, 3, 24)).astype(np.float32)
    for storage in storages:
        storage.write(everywhere, 0, *whole)
        storage.write(some, 4, *part)
    for found, wanted in zip(*(storage.read(rng.permutation(1) + everywhere) for storage in storages), strict=True):
        assert np.array_equal(found, wanted)
    assert storages[0].page_bytes == storages[1].page_bytes == shape.page_bytes(size)
    assert storages[0].nbytes == storages[1].nbytes


@pytest.mark.parametrize("dtype", PLAIN)
def test_pages_are_dumped_loaded_and_copied_bit_for_bit(dtype):
    rng = np.random.default_rng(0)
    storage = NativeStorage(300, KVShape(1, 1, 1, 64, dtype=dtype), 16)
    keys, values = rng.standard_normal((2, 300, 16, 64)).astype(np.float32)
    storage.write(np.arange(300), 0, keys, values)
    before = storage.dump(np.arange(300))
    order = rng.permutation(300)
    storage.load(order, before)
    assert np.array_equal(storage.dump(order), before)
    storage.copy(order[:100], order[100:200])
    assert np.array_equal(storage.dump(order[100:200]), before[:100])
    assert np.array_equal(storage.dump(order[200:]), before[200:])


def test_wrong_arguments_are_refused_before_anything_is_written():
    storage = NativeStorage(4, KVShape(1, 1, 1, 16), 8)
    two = np.zeros((2, 3, 16), np.float32)
    before = storage.dump(np.arange(4))
    for name, call in {
        "frames": lambda: storage.write(np.array([0, 4]), 0, two, two),
        "frames: -1": lambda: storage.dump(np.array([-1])),
        "offset": lambda: storage.write(np.array([0, 1]), 6, two, two),
        "keys": lambda: storage.write(np.array([0]), 0, two, two),
        "values": lambda: storage.write(np.array([0, 1]), 0, two, two[:, :2]),
        "pages": lambda: storage.load(np.array([0]), np.zeros((1, 7), np.uint8)),
        "target": lambda: storage.copy(np.array([0]), np.array([4])),
        "counts": lambda: storage.read(np.array([0]), np.array([9])),
    }.items():
        with pytest.raises(ValueError, match=name):
            call()
    assert np.array_equal(storage.dump(np.arange(4)), before)
    for frames, size, message in ((0, 8, "frames: 0"), (4, 12, "page_size: 12")):
        with pytest.raises(ValueError, match=message):
            NativeStorage(frames, KVShape(1, 1, 1, 16), size)


def both(frames: int, dim: int = 24, size: int = 16) -> list[FrameStorage]:
    shape = KVShape(1, 1, 1, dim, dtype="int8")
    return [made(frames, shape, size) for made in (NativeStorage, CodedStorage)]


def assert_same(storages: list[FrameStorage], frames: list[int], counts: list[int] | None = None) -> None:
    written = None if counts is None else np.array(counts)
    found, wanted = (storage.read(np.array(frames), written) for storage in storages)
    for one, other in zip(found, wanted, strict=True):
        for page, count in enumerate(counts if counts is not None else [one.shape[1]] * len(frames)):
            assert np.array_equal(one[page, :count], other[page, :count])


@pytest.mark.parametrize("isa", _native.isas())
@pytest.mark.parametrize("size", [8, 16, 32])
def test_int8_pages_hold_the_same_codes_as_the_reference(size, isa):
    _native.set_isa(isa)
    rng = np.random.default_rng(size)
    storages = both(30, size=size)
    whole = rng.standard_normal((2, 30, size, 24)).astype(np.float32)
    whole *= np.float32(10.0) ** rng.integers(-30, 30, (2, 30, 1, 24))
    whole[:, 0] = 0
    whole[:, 1, 0], whole[:, 1, 1:] = 1e-40, 0
    whole[:, 2, 0, 0] = 2.0**127
    for storage in storages:
        storage.write(np.arange(30), 0, *whole)
    assert_same(storages, list(range(30)))


@pytest.mark.parametrize("made", [NativeStorage, CodedStorage])
def test_int8_error_is_at_most_half_a_step(made):
    rng = np.random.default_rng(1)
    keys, values = rng.standard_normal((2, 50, 16, 64)).astype(np.float32) * rng.uniform(0.01, 100, (2, 50, 1, 64))
    keys, values = keys.astype(np.float32), values.astype(np.float32)
    storage = made(50, KVShape(1, 1, 1, 64, dtype="int8"), 16)
    storage.write(np.arange(50), 0, keys, values)
    for plain, found, axis in zip((keys, values), storage.read(np.arange(50)), (1, 2), strict=True):
        # a step is at most the greatest number over 127, rounded up to 8 bits
        step = np.abs(plain).max(axis=axis, keepdims=True) / 127 * (1 + 2**-7)
        assert (np.abs(found - plain) <= step * (0.5 + 1e-5)).all()


def test_int8_pages_that_fill_token_by_token_are_exact_until_they_are_full():
    rng = np.random.default_rng(2)
    keys, values = rng.standard_normal((2, 3, 16, 24)).astype(np.float32)
    frames = np.array([4, 0, 2])
    storages = both(5)
    empty = [storage.nbytes for storage in storages]
    for storage in storages:
        storage.write(frames, 0, keys[:, :3], values[:, :3])
        for token in range(3, 16):
            back, _ = storage.read(frames, np.full(3, token))
            assert np.array_equal(back[:, :token], keys[:, :token])
            storage.write(frames, token, keys[:, token : token + 1], values[:, token : token + 1])
    assert [storage.nbytes > before for storage, before in zip(storages, empty, strict=True)] == [True, True]
    whole = both(5)
    for storage in whole:
        storage.write(frames, 0, keys, values)
    for one, other in zip(storages, whole, strict=True):
        assert np.array_equal(one.dump(frames), other.dump(frames))
    assert_same(storages, frames.tolist())


@pytest.mark.parametrize("which", [0, 1])
def test_int8_pages_open_again_as_they_were_until_they_are_finished(which):
    rng = np.random.default_rng(3)
    keys, values = rng.standard_normal((2, 1, 16, 24)).astype(np.float32)
    storage, at, nine = both(5)[which], np.array([3]), np.array([9])
    storage.write(at, 0, keys[:, :9], values[:, :9])
    storage.write(at, 9, keys[:, 9:], values[:, 9:])
    # rolled back to nine tokens, then other tokens follow
    assert np.array_equal(storage.read(at, nine)[0][:, :9], keys[:, :9])
    storage.write(at, 9, -keys[:, 9:], values[:, 9:])
    assert not np.array_equal(storage.read(at)[0][:, :9], keys[:, :9])
    storage.finish(at)
    # what is cut from a finished page are its coded numbers, wherever it is copied to
    storage.copy(at, np.array([1]))
    cut = storage.read(np.array([1]), nine)[0]
    assert np.array_equal(cut, storage.read(at)[0])
    storage.write(np.array([1]), 9, keys[:, 9:10], values[:, 9:10])
    assert np.array_equal(storage.read(np.array([1]), nine)[0][:, :9], cut[:, :9])


@pytest.mark.parametrize("which", [0, 1])
def test_int8_frames_that_are_used_again_forget_the_page_before(which):
    rng = np.random.default_rng(4)
    keys, values = rng.standard_normal((2, 1, 16, 24)).astype(np.float32)
    storage, at, five = both(5)[which], np.array([2]), np.array([5])
    storage.write(at, 0, keys, values)
    full = storage.dump(at)
    coded = storage.read(at)[0]
    for again in (
        lambda: storage.load(at, full),
        lambda: storage.write(at, 0, keys, values),
        lambda: storage.copy(np.array([0]), at),
    ):
        storage.write(np.array([0]), 0, keys, values)
        storage.write(at, 0, 7 * keys[:, :5], values[:, :5])
        again()
        assert np.array_equal(storage.read(at, five)[0], coded)


def test_int8_copies_of_an_open_page_grow_apart():
    rng = np.random.default_rng(5)
    keys, values = rng.standard_normal((2, 1, 16, 24)).astype(np.float32)
    for storage in both(5):
        one, two, six = np.array([0]), np.array([1]), np.array([6])
        storage.write(one, 0, keys[:, :5], values[:, :5])
        storage.copy(one, two)
        storage.write(one, 5, keys[:, 5:6], values[:, 5:6])
        storage.write(two, 5, -keys[:, 5:6], values[:, 5:6])
        assert np.array_equal(storage.read(one, six)[0][:, :6], keys[:, :6])
        assert np.array_equal(storage.read(two, six)[0][:, 5], -keys[:, 5])


def test_int8_memory_beside_the_frames_is_reused():
    storage = NativeStorage(5000, KVShape(1, 1, 1, 24, dtype="int8"), 16)
    few = np.ones((100, 3, 24), np.float32)
    sizes = set()
    for turn in range(20):
        frames = np.arange(turn * 200, turn * 200 + 100)
        storage.write(frames, 0, few, few)
        storage.finish(frames)
        sizes.add(storage.nbytes)
    assert len(sizes) == 1


@pytest.mark.parametrize("isa", _native.isas())
@pytest.mark.parametrize("dtype", [*PLAIN, "int8"])
def test_nothing_is_read_or_written_beyond_the_frames(dtype, isa):
    """The region's ends meet guard pages: touching these would end the process."""
    _native.set_isa(isa)
    for size in (8, 16, 32):
        for dim in (8, 16, 24, 72, 256):
            for frames in (1, 3):
                storage = NativeStorage(frames, KVShape(1, 1, 5, dim, dtype=dtype), size)
                everywhere = np.arange(frames)
                ones = np.ones((frames, size, dim), np.float32)
                storage.write(everywhere, 0, ones, ones)
                storage.load(everywhere, storage.dump(everywhere))
                keys, values = storage.read(everywhere)
                assert np.allclose(keys, 1, rtol=1e-2)
                assert np.allclose(values, 1, rtol=1e-2)
                for tokens in (1, 20):
                    pages = PageList(everywhere, 0 * everywhere, everywhere * size, 0 * everywhere + size, 1)
                    tile = TileQuery(np.ones((5, tokens, dim), np.float32), frames * size, 0.01, None, None)
                    assert np.allclose(NativeKernel().attend(storage, tile, pages).output, 1, rtol=1e-2)
