"""Records: a JSON object and arrays, as they were or StoreDamaged."""

from __future__ import annotations

import struct
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from kvpager.errors import InputError, StoreDamaged, StoreNewer
from kvpager.stores.packages import xxh3
from kvpager.stores.records import DTYPES, pack_record, unpack_record
from tests.stores.made import flipped

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
ARRAYS = arrays_of.arrays(
    st.sampled_from(DTYPES), arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
)


def some_record() -> bytes:
    return pack_record({"kind": "session"}, {"tokens": np.arange(5), "masses": np.ones((2, 3), np.float32)})


def resealed(record: bytes) -> bytes:
    return record[:-8] + struct.pack("<Q", xxh3()(record[:-8]))


@given(
    header=st.dictionaries(st.text(max_size=8), JSON, max_size=4), arrays=st.dictionaries(st.text(max_size=8), ARRAYS)
)
def test_a_record_comes_back_as_it_was(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    found, found_arrays = unpack_record(pack_record(header, arrays))
    assert found == header
    assert list(found_arrays) == list(arrays)
    for name, array in arrays.items():
        got = found_arrays[name]
        assert (got.dtype, got.shape, got.tobytes()) == (array.dtype, array.shape, array.tobytes())
        assert got.flags.writeable


def test_arrays_in_any_order_of_memory_and_bytes_are_taken() -> None:
    array = np.arange(12, dtype=">i4").reshape(3, 4).T
    _, found = unpack_record(pack_record({}, {"a": array}))
    assert found["a"].dtype == np.dtype("<i4")
    assert np.array_equal(found["a"], array)


def test_any_flipped_bit_and_any_other_length_is_told() -> None:
    record = some_record()
    for bit in range(8 * len(record)):
        with pytest.raises(StoreDamaged):
            unpack_record(flipped(record, bit))
    for length in range(len(record)):
        with pytest.raises(StoreDamaged):
            unpack_record(record[:length])
    with pytest.raises(StoreDamaged):
        unpack_record(record + b"\0")


@given(st.binary(max_size=100))
def test_bytes_of_others_are_told(data: bytes) -> None:
    for prefix in (b"", b"KVPR", b"KVPR\x01\x00"):
        with pytest.raises(StoreDamaged):
            unpack_record(prefix + data)


@given(data=st.data())
def test_a_record_that_lies_with_a_right_checksum_is_an_error_of_the_store(data: st.DataObject) -> None:
    changed = bytearray(some_record())
    at = data.draw(st.integers(6, len(changed) - 9))
    value = data.draw(st.binary(min_size=1, max_size=min(8, len(changed) - 8 - at)))
    changed[at : at + len(value)] = value
    with suppress(StoreDamaged):
        unpack_record(resealed(bytes(changed)))


@pytest.mark.parametrize("text", [b"[1]", b"{", b"\xff\xff", b"[" * 100_000])
def test_a_header_that_is_no_object_is_damage(text: bytes) -> None:
    fixed = struct.pack("<4sHHIQ", b"KVPR", 1, 0, len(text), 20 + len(text) + 8)
    with pytest.raises(StoreDamaged, match="makes no sense"):
        unpack_record(resealed(fixed + text + bytes(8)))


def test_a_later_version_is_told_apart_from_damage() -> None:
    record = bytearray(some_record())
    struct.pack_into("<H", record, 4, 2)
    with pytest.raises(StoreNewer, match="format version 2, and this kvpager reads 1"):
        unpack_record(resealed(bytes(record)))


@pytest.mark.parametrize("header", [{"a": float("nan")}, {"a": b"bytes"}, {"a": {1, 2}}])
def test_what_is_not_json_is_refused(header: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="is not JSON"):
        pack_record(header, {})


@pytest.mark.parametrize("array", [np.array([object()]), np.array(["text"]), np.zeros(2, complex), np.zeros((1,) * 9)])
def test_arrays_of_other_kinds_are_refused(array: np.ndarray) -> None:
    with pytest.raises(InputError, match="array 'a' is "):
        pack_record({}, {"a": array})


def test_records_that_are_too_large_are_refused() -> None:
    with pytest.raises(InputError, match="bytes and 0 arrays; at most 1048576 and 1024"):
        pack_record({"a": "x" * 2**20}, {})
    with pytest.raises(InputError, match="and 1025 arrays"):
        pack_record({}, {str(number): np.zeros(1) for number in range(1025)})
    with pytest.raises(InputError, match="at most 1073741824 are allowed"):
        pack_record({}, {"a": np.broadcast_to(np.uint8(0), (2**30 + 1,))})
    with pytest.raises(InputError, match="256 bytes of a name"):
        pack_record({}, {"n" * 257: np.zeros(1)})
