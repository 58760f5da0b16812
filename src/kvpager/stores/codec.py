"""Blocks as bytes and back: a header, then the pages, bit-equal to the frames; never anything that is executed."""

from __future__ import annotations

import numpy as np

from kvpager.errors import InputError, StoreDamaged
from kvpager.stored import BlockHead, StoredBlock
from kvpager.stores.compress import compress, expand
from kvpager.stores.header import COMPRESSIONS, Compression, Header
from kvpager.stores.packages import Data, xxh3

__all__ = ["decode", "encode", "encode_head", "read_head"]


def encode(block: StoredBlock, compression: Compression = "none", itemsize: int = 2) -> bytes:
    """One blob: header and pages.

    `itemsize` is the bytes of a number in the pages (1 for codes), which compression goes by. Raises InputError where
    the payload is not uint8 [pages, page_bytes] or a field is too long.
    """
    head, payload = block.head, block.payload
    if payload.dtype != np.uint8 or payload.shape != (head.pages, head.page_bytes):
        raise InputError(
            f"a block's payload is {payload.dtype} {payload.shape}, and uint8 {(head.pages, head.page_bytes)} is needed"
        )
    if compression not in COMPRESSIONS:
        raise InputError(f"compression is {compression!r}, and one of {', '.join(COMPRESSIONS)} is allowed")
    if itemsize not in (1, 2, 4, 8):
        raise InputError(f"itemsize is {itemsize}, and 1, 2, 4 or 8 is allowed")
    if head.page_bytes % itemsize:
        itemsize = 1
    sum_of = xxh3()
    if compression == "none":
        flat = np.ascontiguousarray(payload).reshape(-1).data
        step = head.page_bytes
        sums = tuple([sum_of(flat[at : at + step]) for at in range(0, head.pages * step, step)])
        return b"".join([Header(head, compression, itemsize, sums).pack(), flat])
    sizes, planes = compress(payload, itemsize)
    pages = [b"".join(planes[at : at + itemsize]) for at in range(0, len(planes), itemsize)]
    header = Header(head, compression, itemsize, tuple(map(sum_of, pages)), sizes)
    return b"".join([header.pack(), *pages])


def encode_head(head: BlockHead) -> bytes:
    """A head alone, for those who keep it apart from the pages; `read_head` reads it. Raises InputError."""
    return Header(head).pack()


def read_head(blob: Data) -> BlockHead:
    """The head of a blob, with pages or without; no page is looked at. Raises StoreDamaged, StoreNewer."""
    return Header.parse(blob).head


def decode(blob: Data, key: bytes) -> StoredBlock:
    """The block with this key, all of it checked; uncompressed pages are a view of `blob`, read-only.

    Raises StoreDamaged where the blob is cut off, longer, changed anywhere, or another block's; StoreNewer.
    """
    header = Header.parse(blob)
    header.require(key)
    if len(blob) != header.blob_bytes:
        raise StoreDamaged(f"block {header.name} has {len(blob)} bytes, and its header says {header.blob_bytes}")
    wrong = header.damaged(blob)
    if wrong:
        raise StoreDamaged(f"{len(wrong)} pages of block {header.name} do not match their checksums, first {wrong[0]}")
    head = header.head
    pages = memoryview(blob)[header.header_bytes :]
    if header.sizes is not None:
        return StoredBlock(head, expand(pages, header.sizes, head.page_bytes))
    return StoredBlock(head, np.frombuffer(pages, np.uint8).reshape(head.pages, head.page_bytes))
