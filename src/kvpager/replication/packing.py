"""Bytes of the journal: a JSON object and runs of bytes in a frame, little-endian, never anything that is executed.

::

    magic "KVJ", version (1 byte)
    bytes of the JSON, number of runs (4 bytes each), bytes of each run (4 bytes each)
    the JSON (UTF-8), the runs
    BLAKE2b of all that, 8 bytes

What comes out of `unpack` was checked for being whole, not for making sense: `Fields` reads it with suspicion.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvpager.replication.limits import Limits

__all__ = ["Damaged", "Fields", "checksum", "pack", "pack_tokens", "text_of", "unpack", "unpack_tokens"]

MAGIC = b"KVJ\x01"
SUM_BYTES = 8
MOST_RUNS = 4096

_HEAD = struct.Struct("<4sII")


class Damaged(Exception):
    """Bytes or fields that make no sense; the text says which, and holds nothing of them."""


def checksum(data: bytes | bytearray | memoryview) -> bytes:
    """8 bytes that tell whether bytes are as they were; not meant against forgers."""
    return hashlib.blake2b(data, digest_size=SUM_BYTES).digest()


def text_of(value: Mapping[str, Any]) -> bytes:
    """An object as JSON. Raises ValueError or TypeError for what JSON can't hold."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def pack(text: bytes, runs: Sequence[bytes | bytearray]) -> bytes:
    """The bytes of a frame with this JSON."""
    sizes = struct.pack(f"<{len(runs)}I", *map(len, runs))
    body = b"".join([_HEAD.pack(MAGIC, len(text), len(runs)), sizes, text, *runs])
    return body + checksum(body)


def unpack(data: bytes, limits: Limits) -> tuple[Fields, list[bytes]]:
    """The JSON and the runs of a frame. Raises Damaged."""
    if not isinstance(data, bytes) or len(data) < _HEAD.size + SUM_BYTES:
        raise Damaged("too short")
    if checksum(memoryview(data)[:-SUM_BYTES]) != data[-SUM_BYTES:]:
        raise Damaged("checksum")
    magic, text, count = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise Damaged("format")
    if text > limits.header_bytes or count > MOST_RUNS:
        raise Damaged("too large")
    start = _HEAD.size + 4 * count
    if start + text + SUM_BYTES > len(data):
        raise Damaged("sizes")
    sizes = struct.unpack_from(f"<{count}I", data, _HEAD.size)
    if start + text + sum(sizes) + SUM_BYTES != len(data):
        raise Damaged("sizes")
    try:
        header = json.loads(data[start : start + text])
    except (ValueError, RecursionError) as error:
        raise Damaged("JSON") from error
    runs, place = [], start + text
    for size in sizes:
        runs.append(data[place : place + size])
        place += size
    return Fields(header, limits), runs


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Token ids, 4 bytes each. Raises OverflowError for one that has no room there."""
    return np.fromiter(tokens, np.dtype("<u4")).tobytes()


def unpack_tokens(data: bytes, limits: Limits) -> list[int]:
    """The same back. Raises Damaged."""
    if len(data) % 4 or len(data) // 4 > limits.tokens:
        raise Damaged("tokens")
    tokens: list[int] = np.frombuffer(data, "<u4").tolist()
    return tokens


class Fields:
    """An object of somebody's JSON; each field is looked at before it is believed. All methods raise Damaged."""

    def __init__(self, value: object, limits: Limits) -> None:
        if not isinstance(value, dict):
            raise Damaged("an object is missing")
        self._value: dict[str, Any] = value
        self._limits = limits

    def whole(self, name: str, most: int = 2**63, least: int = 0) -> int:
        """A whole number."""
        value = self._value.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise Damaged(name)
        return value

    def has(self, name: str) -> bool:
        """Whether there is such a field, and it is not null."""
        return self._value.get(name) is not None

    def truth(self, name: str) -> bool:
        """True or false."""
        value = self._value.get(name)
        if not isinstance(value, bool):
            raise Damaged(name)
        return value

    def seconds(self, name: str) -> float | None:
        """A number, or null."""
        value = self._value.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= 1e12:
            raise Damaged(name)
        return float(value)

    def text(self, name: str, most: int | None = None) -> str:
        """A text."""
        value = self._value.get(name)
        if not isinstance(value, str) or len(value) > (self._limits.name_bytes if most is None else most):
            raise Damaged(name)
        return value

    def maybe_text(self, name: str, most: int | None = None) -> str | None:
        """A text, or null."""
        return None if self._value.get(name) is None else self.text(name, most)

    def text_or_whole(self, name: str) -> str | int | None:
        """A text, a whole number, or null."""
        value = self._value.get(name)
        return self.whole(name, least=-(2**63)) if isinstance(value, int) else self.maybe_text(name, 2**20)

    def mapping(self, name: str) -> dict[str, Any]:
        """An object, as it is: of JSON's types, which is all that is known of it."""
        value = self._value.get(name)
        if not isinstance(value, dict):
            raise Damaged(name)
        return value

    def maybe_mapping(self, name: str) -> dict[str, Any] | None:
        """An object as it is, or null."""
        return None if self._value.get(name) is None else self.mapping(name)

    def fields(self, name: str) -> Fields:
        """An object that is to be looked at."""
        return Fields(self._value.get(name), self._limits)

    def maybe_fields(self, name: str) -> Fields | None:
        """The same, or null."""
        return None if self._value.get(name) is None else self.fields(name)

    def listed(self, name: str, most: int) -> list[Any]:
        """A list."""
        value = self._value.get(name)
        if not isinstance(value, list) or len(value) > most:
            raise Damaged(name)
        return value

    def objects(self, name: str, most: int) -> list[Fields]:
        """A list of objects."""
        return [Fields(value, self._limits) for value in self.listed(name, most)]

    def mappings(self, name: str) -> list[dict[str, Any]]:
        """A list of objects as they are."""
        values = self.listed(name, self._limits.tokens)
        if not all(isinstance(value, dict) for value in values):
            raise Damaged(name)
        return values

    def tokens(self, name: str) -> list[int]:
        """A list of token ids."""
        values = self.listed(name, self._limits.tokens)
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**32:
                raise Damaged(name)
        return values

    def texts(self, name: str, most: int) -> list[str]:
        """A list of texts."""
        values = self.listed(name, most)
        if not all(isinstance(value, str) and len(value) <= self._limits.name_bytes for value in values):
            raise Damaged(name)
        return values

    def ranges(self, name: str) -> list[tuple[int, int]]:
        """A list of pairs of positions."""
        values = self.listed(name, self._limits.tokens)
        for value in values:
            if not isinstance(value, list) or len(value) != 2 or not all(type(end) is int for end in value):
                raise Damaged(name)
            if not 0 <= value[0] <= value[1] <= 2**40:
                raise Damaged(name)
        return [(start, stop) for start, stop in values]
