"""The header of a GGUF file: enough to know that the file is whole and how much memory its model takes.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from kvpager.errors import ModelCorrupt

__all__ = ["GgufInfo", "read_gguf"]

MAGIC = b"GGUF"
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
MAX_NESTING = 4

Value = int | float | bool | str | None


@dataclass(frozen=True)
class GgufInfo:
    """What a GGUF file holds: the architecture's name, the number of weights, and the file's size in bytes."""

    architecture: str
    parameters: int
    file_bytes: int


def read_gguf(path: Path) -> GgufInfo:
    """Read the header of a GGUF file and check that every tensor lies inside the file.

    Raises ModelCorrupt that says what is wrong. Reads the header alone; the weights are not touched.
    """
    size = path.stat().st_size
    if size < 24:
        raise ModelCorrupt(f"{path} is {size} bytes, too short for a GGUF file; get it again")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Reader(path, data).read()


class _Reader:
    """Walks over the header; every step checks that it stays inside the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    def read(self) -> GgufInfo:
        if self.data[:4] != MAGIC:
            raise ModelCorrupt(f"{self.path} is not a GGUF file: it starts with {self.data[:4]!r}, not {MAGIC!r}")
        self.at = 4
        (version,) = self.unpack("I")
        if version not in (2, 3):
            raise ModelCorrupt(f"{self.path}: GGUF version {version} can't be read; it must be 2 or 3, little-endian")
        tensors, pairs = self.unpack("QQ")
        metadata: dict[str, Value] = {}
        for _ in range(pairs):
            key = self.string()
            metadata[key] = self.value(self.unpack("I")[0])
        if metadata.get("split.count") not in (None, 0, 1):
            raise ModelCorrupt(f"{self.path} is one part of {metadata['split.count']}; merge the parts into one file")
        infos = [self.tensor() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 2**20:
            raise self.broken(f"alignment {alignment!r}")
        start = -(-self.at // alignment) * alignment
        for name, shape, kind, offset in infos:
            end = start + offset + self.tensor_bytes(name, shape, kind)
            if end > len(self.data):
                raise ModelCorrupt(
                    f"{self.path} is truncated: it has {len(self.data)} bytes, and {name} ends at {end}; get it again"
                )
        return GgufInfo(
            architecture=str(metadata.get("general.architecture", "unknown")),
            parameters=sum(math.prod(shape) for _, shape, _, _ in infos),
            file_bytes=len(self.data),
        )

    def unpack(self, layout: str) -> tuple[int, ...]:
        layout = "<" + layout
        length = struct.calcsize(layout)
        self.need(length)
        values = struct.unpack_from(layout, self.data, self.at)
        self.at += length
        return values

    def need(self, length: int) -> None:
        if self.at + length > len(self.data):
            raise ModelCorrupt(f"{self.path} is truncated: it ends inside its header; get it again")

    def string(self) -> str:
        (length,) = self.unpack("Q")
        self.need(length)
        self.at += length
        return self.data[self.at - length : self.at].decode("utf-8", "replace")

    def value(self, kind: int, depth: int = 0) -> Value:
        """One value; arrays are stepped over."""
        if kind == STRING:
            return self.string()
        if kind == ARRAY and depth < MAX_NESTING:
            (inner,) = self.unpack("I")
            (count,) = self.unpack("Q")
            if inner in SCALARS:
                length = struct.calcsize(SCALARS[inner]) * count
                self.need(length)
                self.at += length
            else:
                for _ in range(count):
                    self.value(inner, depth + 1)
            return None
        if kind not in SCALARS:
            raise self.broken(f"a value of type {kind}")
        return self.unpack(SCALARS[kind])[0]

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        (dimensions,) = self.unpack("I")
        if not 0 < dimensions <= 8:
            raise self.broken(f"{name} with {dimensions} dimensions")
        shape = self.unpack("Q" * dimensions)
        kind, offset = self.unpack("IQ")
        return name, shape, kind, offset

    def tensor_bytes(self, name: str, shape: tuple[int, ...], kind: int) -> int:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (ValueError, KeyError):
            raise self.broken(f"{name} of type {kind}") from None
        if shape[0] % block:
            raise self.broken(f"{name} with rows of {shape[0]}, not a multiple of {block}")
        return math.prod(shape) // block * block_bytes

    def broken(self, what: str) -> ModelCorrupt:
        return ModelCorrupt(f"{self.path}: the header has {what}, which can't be; the file is damaged")
