"""Blocks made up for tests, and a checksum put right after a header was changed."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from kvpager.stored import BlockHead, StoredBlock
from kvpager.stores.header import header_bytes
from kvpager.stores.packages import xxh3


def made_block(seed: int = 0, pages: int = 3, page_bytes: int = 64, **fields: object) -> StoredBlock:
    """A block of so many pages; all of it follows from `seed`. Its pages are numbers in bfloat16, drawn at random."""
    rng = np.random.default_rng(seed)
    head = BlockHead(
        key=hashlib.sha256(b"key %d" % seed).digest(),
        parent=hashlib.sha256(b"key %d" % (seed - 1)).digest(),
        tenant=bytes(16),
        depth=seed,
        tokens=np.arange(4, dtype="<i8").tobytes(),
        approximate=bool(seed % 2),
        layout="bfloat16 [3, 16]",
        pages=pages,
        page_bytes=page_bytes,
        digest_kind="2bit",
        digest=rng.bytes(8 * pages),
        scores=rng.bytes(4 * pages),
        hits=seed,
    )
    numbers = rng.standard_normal((pages, (page_bytes + 1) // 2)).astype(np.float32)
    payload = numbers.view(np.uint8).reshape(pages, -1, 4)[:, :, 2:].reshape(pages, -1)[:, :page_bytes]
    return StoredBlock(replace(head, **fields), np.ascontiguousarray(payload))  # type: ignore[arg-type]


@st.composite
def blocks(draw: st.DrawFn) -> StoredBlock:
    """Blocks of any shape, with fields of any length, and pages that can be compressed well, badly or not at all."""
    pages, page_bytes = draw(st.integers(1, 6)), draw(st.integers(1, 300))
    head = BlockHead(
        key=draw(st.binary(min_size=32, max_size=32)),
        parent=draw(st.sampled_from([b"", bytes(32), b"p" * 32])),
        tenant=draw(st.binary(min_size=16, max_size=16)),
        depth=draw(st.integers(0, 2**32 - 1)),
        tokens=draw(st.binary(max_size=40)),
        approximate=draw(st.booleans()),
        layout=draw(st.text(max_size=20)),
        pages=pages,
        page_bytes=page_bytes,
        digest_kind=draw(st.text(max_size=8)),
        digest=draw(st.binary(max_size=60)),
        scores=draw(st.binary(max_size=60)),
        hits=draw(st.integers(0, 2**63 - 1)),
    )
    values = draw(st.sampled_from([1, 2, 16, 256]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return StoredBlock(head, rng.integers(0, values, (pages, page_bytes), dtype=np.uint8))


def flipped(data: bytes, bit: int) -> bytes:
    """`data` with one bit changed."""
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def resealed(blob: bytes) -> bytes:
    """A blob whose header was changed, with the header's checksum made right again."""
    end = header_bytes(blob)
    return blob[: end - 8] + struct.pack("<Q", xxh3()(blob[: end - 8])) + blob[end:]
