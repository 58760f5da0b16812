"""Frames for the compiled kernels: one region of memory, laid out as they read it (docs/decisions/0005)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvpager import _native
from kvpager.config import KVShape
from kvpager.kernels.coded import resume, suspend
from kvpager.kernels.numbers import OPEN_DTYPES, token_numbers
from kvpager.ports import FloatArray, IntArray

__all__ = ["NativeStorage"]

Bytes = npt.NDArray[np.uint8]


class NativeStorage:
    """FrameStorage in native memory; head_dim must be a multiple of 8 up to 256, else ValueError.

    int8 pages are coded when they are full; until then they are held in float32 beside the frames, and `nbytes`
    counts that. `native` is the extension's own object.
    """

    def __init__(self, frames: int, shape: KVShape, page_size: int) -> None:
        self.native = _native.Frames(frames, shape.dtype, page_size, shape.head_dim)
        self.page_bytes = self.native.page_bytes
        self._page = (page_size, shape.head_dim)
        self.memory: Bytes | None = self.native.memory
        self._coded = shape.dtype == "int8"
        self._dtype = OPEN_DTYPES[shape.dtype]
        self.token_bytes = self.native.token_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all frames, and of pages that are held beside them."""
        return self.native.nbytes

    def write(self, frames: IntArray, offset: int, keys: FloatArray, values: FloatArray) -> None:
        """Store tokens `offset`.. of each frame's page; keys and values are float32 [n, tokens, D]."""
        self.native.write(
            np.ascontiguousarray(frames, np.int64),
            offset,
            np.ascontiguousarray(keys, np.float32),
            np.ascontiguousarray(values, np.float32),
        )

    def read(self, frames: IntArray, counts: IntArray | None = None) -> tuple[FloatArray, FloatArray]:
        """Keys and values of whole pages, float32 [n, P, D] each; `counts` as in FrameStorage."""
        keys = np.empty((len(frames), *self._page), np.float32)
        values = np.empty_like(keys)
        written = None if counts is None else np.ascontiguousarray(counts, np.int64)
        self.native.read(np.ascontiguousarray(frames, np.int64), written, keys, values)
        return keys, values

    def load(self, frames: IntArray, pages: Bytes) -> None:
        """Fill frames from stored bytes, uint8 [n, page_bytes]."""
        self.native.load(np.ascontiguousarray(frames, np.int64), np.ascontiguousarray(pages))

    def dump(self, frames: IntArray) -> Bytes:
        """The stored bytes of frames, uint8 [n, page_bytes], bit-equal."""
        pages = np.empty((len(frames), self.page_bytes), np.uint8)
        self.native.dump(np.ascontiguousarray(frames, np.int64), pages)
        return pages

    def copy(self, source: IntArray, target: IntArray) -> None:
        """Copy frames to other frames."""
        self.native.copy(np.ascontiguousarray(source, np.int64), np.ascontiguousarray(target, np.int64))

    def finish(self, frames: IntArray) -> None:
        """Forget what was held beside these frames, for their pages are full for good, or gone."""
        self.native.finish(np.ascontiguousarray(frames, np.int64))

    def suspend(self, frames: IntArray) -> Bytes:
        """All that open pages need to go on elsewhere, uint8 [n * k, page_bytes]; k is 4 for int8, else 1."""
        if not self._coded:
            return self.dump(frames)
        held = np.empty(len(frames), np.bool_)
        self.native.held(np.ascontiguousarray(frames, np.int64), held)
        return suspend(self, frames, held)

    def resume(self, frames: IntArray, pieces: Bytes) -> None:
        """Frames hold again what `suspend` gave."""
        if not self._coded:
            self.load(frames, pieces)
            return
        self.finish(frames)
        resume(self, frames, pieces, self._page)

    def tokens(self, frames: IntArray, offsets: IntArray) -> Bytes:
        """One token of each frame's open page, uint8 [n, token_bytes]: keys, then values; int8 as float32."""
        tokens = np.empty((len(frames), self.token_bytes), np.uint8)
        self.native.tokens(np.ascontiguousarray(frames, np.int64), np.ascontiguousarray(offsets, np.int64), tokens)
        return tokens

    def put_tokens(self, frames: IntArray, tokens: Bytes) -> None:
        """Frames hold open pages of these tokens, uint8 [n, fewer than P, token_bytes]."""
        self.finish(frames)
        self.write(frames, 0, *token_numbers(tokens, self._dtype))
