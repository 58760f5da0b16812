"""Lossless compression of pages: each byte of a number goes to a plane of its own, and a plane is one Zstandard frame.

The high bytes of keys and values (sign and exponent) repeat, the low ones hardly do. Together they would share one
table of frequencies, so they are kept apart, as in ZipNN (arXiv 2411.05239); a plane that gains nothing is stored as it
is. Pages are independent of one another, so that one can be read alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvpager.errors import StoreDamaged
from kvpager.ports import Bytes
from kvpager.stores.packages import Data, zstandard

__all__ = ["Expander", "Sizes", "compress"]

LEVEL = 1

Sizes = npt.NDArray[np.uint32]
"""Stored bytes of each page's planes, uint32 [pages, itemsize]."""


def _parameters(module: Any) -> Any:
    return module.ZstdCompressionParameters.from_level(
        LEVEL, format=module.FORMAT_ZSTD1_MAGICLESS, write_content_size=False, write_checksum=False
    )


def compress(payload: Bytes, itemsize: int) -> tuple[Sizes, list[Data]]:
    """Compress pages, uint8 [pages, page_bytes] of numbers of `itemsize` bytes.

    Returns the sizes of their planes, and the planes' bytes, page after page. A plane that has its full size,
    page_bytes / itemsize, was not compressed.
    """
    module = zstandard()
    pages, page_bytes = payload.shape
    length = page_bytes // itemsize
    squeeze = module.ZstdCompressor(compression_params=_parameters(module)).compress
    planes = np.ascontiguousarray(payload.reshape(pages, length, itemsize).transpose(0, 2, 1)).reshape(-1, length)
    stored: list[Data] = []
    for plane in planes:
        frame = squeeze(plane)
        stored.append(frame if len(frame) < length else plane.data)
    sizes = np.fromiter(map(len, stored), np.uint32, len(stored))
    return sizes.reshape(pages, itemsize), stored


class Expander:
    """The way back, for pages of `page_bytes` bytes and numbers of `itemsize`. Belongs to one thread."""

    def __init__(self, page_bytes: int, itemsize: int) -> None:
        self._length = page_bytes // itemsize
        self._module = zstandard()
        self._expand = self._module.ZstdDecompressor(format=self._module.FORMAT_ZSTD1_MAGICLESS).decompress

    def page(self, data: Data, sizes: list[int]) -> Bytes:
        """The page whose planes of these sizes lie one after another in `data`; raises StoreDamaged."""
        planes = np.empty((len(sizes), self._length), np.uint8)
        begin = 0
        for plane, size in zip(planes, sizes, strict=True):
            plane[:] = self._plane(memoryview(data)[begin : begin + size])
            begin += size
        return planes.T.reshape(-1)

    def _plane(self, data: memoryview) -> Bytes:
        if len(data) == self._length:
            return np.frombuffer(data, np.uint8)
        try:
            plane = self._expand(data, max_output_size=self._length)
        except self._module.ZstdError as error:
            raise StoreDamaged(f"a compressed page can't be read: {error}") from error
        if len(plane) != self._length:
            raise StoreDamaged(f"a compressed page has {len(plane)} bytes a plane, and {self._length} are expected")
        return np.frombuffer(plane, np.uint8)
