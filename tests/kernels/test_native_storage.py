"""Native frames hold what the reference's frames hold."""

from __future__ import annotations

import numpy as np
import pytest

from kvpager import _native
from kvpager.config import KVShape
from kvpager.kernels.native_storage import NativeStorage
from kvpager.kernels.reference import ReferenceStorage

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
