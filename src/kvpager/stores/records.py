"""Records: a small JSON object and named arrays as bytes, for what is stored beside blocks (a session, say).

::

    magic "KVPR", format version, number of arrays, bytes of the JSON, bytes of the record
    the JSON (UTF-8)
    an array each: bytes of its name, dtype, dimensions; the name; the shape (8 bytes a dimension); its bytes
    XXH3 of all that

Little-endian, and never anything that is executed.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpager.errors import InputError, StoreDamaged, StoreNewer
from kvpager.stores.packages import Data, xxh3

__all__ = ["DTYPES", "Arrays", "pack_record", "unpack_record"]

Arrays = Mapping[str, npt.NDArray[Any]]

VERSION = 1
MAGIC = b"KVPR"
DTYPES = ("|b1", "|u1", "|i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f2", "<f4", "<f8")
MOST_JSON, MOST_ARRAYS, MOST_NAME, MOST_DIMENSIONS, MOST_BYTES = 2**20, 2**10, 2**8, 8, 2**30

_FIXED = struct.Struct("<4sHHIQ")
_ARRAY = struct.Struct("<HBB")
_SUM = struct.Struct("<Q")


def pack_record(header: Mapping[str, Any], arrays: Arrays) -> bytes:
    """The bytes of a record. `header` holds what JSON holds; arrays are of the dtypes in DTYPES, any shape.

    Raises InputError for anything else, or where it is too large (1 MiB of JSON, 1024 arrays, 1 GiB in them).
    """
    try:
        text = json.dumps(dict(header), allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"a record's header is not JSON: {error}") from error
    if len(text) > MOST_JSON or len(arrays) > MOST_ARRAYS:
        raise InputError(
            f"a record's header has {len(text)} bytes and {len(arrays)} arrays; at most {MOST_JSON} and {MOST_ARRAYS}"
        )
    held = sum(array.nbytes for array in arrays.values())
    if held > MOST_BYTES:
        raise InputError(f"a record's arrays have {held} bytes, and at most {MOST_BYTES} are allowed")
    parts = [text]
    for name, array in arrays.items():
        parts += _pack_array(name, array)
    size = _FIXED.size + sum(map(len, parts)) + _SUM.size
    body = b"".join([_FIXED.pack(MAGIC, VERSION, len(arrays), len(text), size), *parts])
    return body + _SUM.pack(xxh3()(body))


def _pack_array(name: str, array: npt.NDArray[Any]) -> list[bytes]:
    encoded = name.encode()
    kind = array.dtype.newbyteorder("<").str
    if kind not in DTYPES or array.ndim > MOST_DIMENSIONS or len(encoded) > MOST_NAME:
        raise InputError(
            f"array {name[:MOST_NAME]!r} is {array.dtype} with {array.ndim} dimensions; allowed are "
            f"{', '.join(DTYPES)}, {MOST_DIMENSIONS} dimensions, and {MOST_NAME} bytes of a name"
        )
    shape = struct.pack(f"<{array.ndim}Q", *array.shape)
    fixed = _ARRAY.pack(len(encoded), DTYPES.index(kind), array.ndim)
    return [fixed, encoded, shape, array.astype(kind, copy=False).tobytes()]


def unpack_record(data: Data) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """The header and the arrays (copies) of a record. Raises StoreDamaged, or StoreNewer for a later version."""
    view = memoryview(data)
    if len(view) < _FIXED.size + _SUM.size or view[:4] != MAGIC:
        raise StoreDamaged(f"{len(view)} bytes are no record of kvpager's")
    body = view[: -_SUM.size]
    if _SUM.unpack(view[-_SUM.size :])[0] != xxh3()(body):
        raise StoreDamaged("a record does not match its checksum")
    _, version, count, text, size = _FIXED.unpack_from(body)
    if version != VERSION:
        raise StoreNewer(f"a record has format version {version}, and this kvpager reads {VERSION}")
    reader = _Reader(body[_FIXED.size :])
    try:
        header = json.loads(bytes(reader.take(text)))
        arrays = dict(reader.array() for _ in range(count))
    except (ValueError, RecursionError) as error:
        raise StoreDamaged(f"a record makes no sense: {error}") from error
    if reader.left or size != len(view) or len(arrays) != count or not isinstance(header, dict):
        raise StoreDamaged("a record makes no sense: its sizes do not add up")
    return header, arrays


class _Reader:
    """Takes a record apart whose checksum was right; sizes are looked at all the same before they are believed."""

    def __init__(self, data: memoryview) -> None:
        self.left = data

    def take(self, size: int) -> memoryview:
        """The next bytes."""
        if size > len(self.left):
            raise StoreDamaged("a part of a record is longer than the record")
        taken, self.left = self.left[:size], self.left[size:]
        return taken

    def array(self) -> tuple[str, npt.NDArray[Any]]:
        """The next array and its name."""
        name_bytes, kind, dimensions = _ARRAY.unpack(self.take(_ARRAY.size))
        name = str(self.take(name_bytes), "utf-8")
        if kind >= len(DTYPES) or dimensions > MOST_DIMENSIONS:
            raise StoreDamaged(f"a record makes no sense: dtype {kind}, {dimensions} dimensions")
        shape = struct.unpack(f"<{dimensions}Q", self.take(8 * dimensions))
        dtype = np.dtype(DTYPES[kind])
        data = self.take(math.prod(shape) * dtype.itemsize)
        return name, np.frombuffer(data, dtype).reshape(shape).copy()
