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

__all__ = ["Sizes", "compress", "expand"]

Sizes = npt.NDArray[np.uint32]
"""Stored bytes of each page's planes, uint32 [pages, itemsize]."""


def compress(payload: Bytes, itemsize: int) -> tuple[Sizes, list[Data]]:
    """Compress pages, uint8 [pages, page_bytes] of numbers of `itemsize` bytes.

    Returns the sizes of their planes, and the planes' bytes, page after page. A plane that has its full size,
    page_bytes / itemsize, was not compressed.
    """
    pages, page_bytes = payload.shape
    length = page_bytes // itemsize
    numbers = payload.reshape(pages, length, itemsize)
    planes = np.empty((pages, itemsize, length), np.uint8)
    for byte in range(itemsize):
        planes[:, byte] = numbers[:, :, byte]
    squeeze = _compressor(length)
    stored: list[Data] = []
    for plane in planes.reshape(-1, length):
        frame = squeeze(plane)
        stored.append(frame if len(frame) < length else plane.data)
    sizes = np.fromiter(map(len, stored), np.uint32, len(stored))
    return sizes.reshape(pages, itemsize), stored


def _compressor(length: int) -> Any:
    """Level 1, but for next to no search for repetitions: planes have none, and what is found by chance costs more.

    The gain is all from coding frequent bytes short. Frames say neither what they are nor how long: the header does.
    """
    module = zstandard()
    parameters = module.ZstdCompressionParameters(
        compression_level=1,
        strategy=module.STRATEGY_FAST,
        min_match=7,
        hash_log=6,
        window_log=min(max(length.bit_length(), 10), 17),
        format=module.FORMAT_ZSTD1_MAGICLESS,
        write_content_size=False,
        write_checksum=False,
    )
    return module.ZstdCompressor(compression_params=parameters).compress


def expand(data: Data, sizes: Sizes, page_bytes: int) -> Bytes:
    """The way back: pages, uint8 [n, page_bytes], whose planes of these sizes [n, itemsize] lie in `data` one by one.

    Raises StoreDamaged where `data` is no such planes.
    """
    pages, itemsize = sizes.shape
    length = page_bytes // itemsize
    module = zstandard()
    unpack = module.ZstdDecompressor(format=module.FORMAT_ZSTD1_MAGICLESS).decompress
    view, begin = memoryview(data), 0
    found: list[Data] = []
    try:
        for size in sizes.reshape(-1).tolist():
            plane = view[begin : begin + size]
            found.append(plane if size == length else unpack(plane, max_output_size=length))
            begin += size
    except module.ZstdError as error:
        raise StoreDamaged(f"a compressed page can't be read: {error}") from error
    if begin != len(view) or any(len(plane) != length for plane in found):
        raise StoreDamaged(f"compressed pages don't have {length} bytes a plane")
    planes = np.frombuffer(b"".join(found), np.uint8).reshape(pages, itemsize, length)
    payload = np.empty((pages, length, itemsize), np.uint8)
    for byte in range(itemsize):
        payload[:, :, byte] = planes[:, byte]
    return payload.reshape(pages, page_bytes)
