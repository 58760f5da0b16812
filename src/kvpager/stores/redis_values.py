"""What a Redis gave, read: nothing is believed before it was checked."""

from __future__ import annotations

from typing import Any

from kvpager.errors import StoreDamaged, StoreNewer
from kvpager.stored import BlockHead, StoredBlock
from kvpager.stores.codec import decode
from kvpager.stores.header import Header, header_bytes
from kvpager.stores.rows import unseal

__all__ = ["as_bytes", "as_number", "block_of", "header_of", "learned_by", "whole_header"]


def as_bytes(reply: Any) -> bytes:
    """A value; none where there is none, or where its node can't be reached."""
    return reply if isinstance(reply, bytes) else b""


def as_number(reply: Any) -> int:
    """A number that is 0 or more; 0 where there is none, and for what is none."""
    return int(reply) if isinstance(reply, bytes) and reply.isdigit() else 0


def whole_header(start: bytes) -> int:
    """Bytes of the header of which this is the beginning; no more than given where it is none."""
    try:
        return header_bytes(start)
    except StoreDamaged:
        return len(start)


def header_of(key: bytes, start: bytes) -> Header:
    """The header of the block with this key. Raises StoreDamaged, also for one of a newer format."""
    try:
        header = Header.parse(start)
    except StoreNewer as error:  # our keys say which version computed: such a block can't be ours
        raise StoreDamaged(str(error)) from error
    header.require(key)
    return header


def learned_by(head: BlockHead, learned: Any) -> BlockHead:
    """A head with the scores and hits that were told since the block was stored, as far as they are whole."""
    scores, hits = learned if isinstance(learned, list) else (None, None)
    told = head.scores
    if isinstance(scores, bytes):
        try:
            told = unseal(head.key, scores)
        except StoreDamaged:
            told = b""
    return head.rescored(told, min(head.hits + as_number(hits), 2**63 - 1))


def block_of(key: bytes, blob: bytes) -> StoredBlock:
    """The block with this key, all of it checked. Raises StoreDamaged."""
    try:
        return decode(blob, key)
    except StoreNewer as error:
        raise StoreDamaged(str(error)) from error
