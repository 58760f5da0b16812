"""Compiled digests: building and choosing as :mod:`kvpager.core.digest` defines them, each in one native call.

Keys in 2 bits with an 8-bit step and offset a channel, and two float32 scales a page: P D / 4 + 2 D + 8 bytes a page,
the same numbers as the core's. Scores are integer dot products: queries in 8 bits against whole multiples of the
steps, in 16 bits against the offsets. Importing this module without the compiled extension raises ImportError.
"""

from __future__ import annotations

import numpy as np

from kvpager._native import DigestStore
from kvpager.errors import InputError
from kvpager.ports import Bytes, Choice, FloatArray, IntArray, Room, TileQuery

__all__ = ["MOST_HEAD_DIM", "NativeDigest", "is_compiled", "make"]

MOST_HEAD_DIM = 256
FORMAT = 1  # of a row's bytes; another number when digest.h lays them out in another way


def is_compiled(head_dim: int) -> bool:
    """Whether the compiled kernels and digests take this head_dim."""
    return head_dim % 8 == 0 and 0 < head_dim <= MOST_HEAD_DIM


def make(kind: str, layers: int, kv_heads: int, head_dim: int, page_size: int, sample: int) -> NativeDigest | None:
    """Digests of this kind, or None where only the core has them: other kinds than ``2bit``, and a head_dim that is
    not compiled.
    """
    if kind != "2bit" or not is_compiled(head_dim):
        return None
    return NativeDigest(layers, kv_heads, head_dim, page_size, sample)


class NativeDigest:
    """Keys in 2 bits (:class:`kvpager.ports.Digest`): head_dim a multiple of 8 up to 256, page_size 8, 16 or 32.

    A choice depends on the rows' bytes, their order and the queries alone: not on where the rows lie, nor on the number
    of threads. Raises ValueError for rows that were never grown to, and for shapes that don't fit.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int, page_size: int, sample: int) -> None:
        self.store = DigestStore(layers, kv_heads, head_dim, page_size)
        self.store.timed = True
        self._heads = kv_heads
        self.sample = sample
        self.kind = f"2bit/native/{FORMAT}"

    @property
    def page_bytes(self) -> int:
        """Bytes of one page's digest, all included."""
        return self.store.page_bytes

    @property
    def nbytes(self) -> int:
        """Bytes allocated for digests, over all layers (scratch is apart)."""
        return self.store.nbytes

    @property
    def scratch_nbytes(self) -> int:
        """Bytes of scratch that are kept between calls: at most 8 MiB, whatever the length of the sequences."""
        return self.store.scratch_nbytes

    @property
    def seconds(self) -> float:
        """How long building and choosing have taken so far, together."""
        return self.store.nanoseconds * 1e-9

    def grow(self, rows: int) -> None:
        """Make room for `rows` rows, layer by layer and by at least an eighth, so that memory never doubles."""
        self.store.grow(rows)

    def build(self, layer: int, rows: IntArray, keys: FloatArray) -> None:
        """Make the digests of whole pages: rows int64 [n], keys float32 [n, H, P, D]."""
        self.store.build(layer, np.ascontiguousarray(rows), np.ascontiguousarray(keys))

    def dump(self, rows: IntArray) -> Bytes:
        """The digests of rows [n] in all layers, uint8 [n, layers * H * page_bytes]."""
        digests = np.empty((len(rows), self.store.row_bytes), np.uint8)
        self.store.dump(np.ascontiguousarray(rows), digests)
        return digests

    def load(self, rows: IntArray, digests: Bytes) -> None:
        """Make rows [n] hold what `dump` gave for as many."""
        self.store.load(np.ascontiguousarray(rows), np.ascontiguousarray(digests))

    def choose(
        self, layer: int, rows: IntArray, tile: TileQuery, starts: IntArray, own_lse: FloatArray, room: Room
    ) -> Choice:
        """Choose among the pages of built rows [n], as in :class:`kvpager.ports.Digest`.

        Raises InputError when the protected pages alone are more than the room.
        """
        n = len(rows)
        chosen, ratio = np.empty((self._heads, n), np.bool_), np.empty((self._heads, n), np.float32)
        if n == 0:
            return Choice(chosen, ratio, 0.0)
        sinks = room.leading(n)
        kept = min(sinks + room.recent, n)
        if kept > room.pages:
            raise InputError(f"pages: a budget of {room.pages} a KV head is less than its {kept} protected pages")
        queries = tile.queries if tile.queries.strides[2] == 4 else np.ascontiguousarray(tile.queries)
        missed = self.store.choose(
            layer,
            np.ascontiguousarray(rows),
            queries,
            np.ascontiguousarray(starts),
            np.ascontiguousarray(own_lse),
            tile.start,
            tile.scale,
            tile.window,
            tile.softcap,
            self.sample,
            room.pages,
            sinks,
            room.recent,
            chosen,
            ratio,
        )
        return Choice(chosen, ratio, missed)
