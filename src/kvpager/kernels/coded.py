"""Frames of int8 for the reference kernel, in NumPy; the compiled kernel's frames hold the same numbers.

A page's keys have one scale a channel and its values one a token (as in KIVI, arXiv 2402.02750): bfloat16, rounded
up, so that codes of -127..127 reach every number and none is off by more than half a step.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvpager.config import KVShape
from kvpager.kernels.numbers import token_numbers
from kvpager.ports import BoolArray, FloatArray, FrameStorage, IntArray

__all__ = ["CodedStorage", "coded", "resume", "suspend"]

Bytes = npt.NDArray[np.uint8]
Codes = npt.NDArray[np.int8]
Scales = npt.NDArray[np.uint16]


def coded(plain: FloatArray, axis: int) -> tuple[Codes, Scales]:
    """`plain` as int8 of the same shape, and scales (bfloat16 bits) that are shared along `axis`."""
    wanted = np.abs(plain).max(axis=axis) / np.float32(127)
    scales = ((wanted.view(np.uint32) + np.uint32(0xFFFF)) >> 16).astype(np.uint16)
    steps = np.expand_dims(_plain(scales), axis)
    codes = np.rint(plain / np.where(steps > 0, steps, np.float32(1)))
    return codes.astype(np.int8), scales


def _plain(scales: Scales) -> FloatArray:
    return (scales.astype(np.uint32) << 16).view(np.float32)


PIECES = 4  # what an open page in float32 takes, in coded pages


def suspend(storage: FrameStorage, frames: IntArray, held: BoolArray) -> Bytes:
    """FrameStorage.suspend for int8: uint8 [4 n, page_bytes]; `held` [n] says which pages are held in float32.

    A page that was full and was cut is not: its codes are then all there is of it. The last byte says which it is,
    for attention to codes rounds otherwise than to the numbers they stand for.
    """
    pages = np.zeros((len(frames), PIECES * storage.page_bytes), np.uint8)
    pages[:, -1] = held
    pages[~held, : storage.page_bytes] = storage.dump(frames[~held])
    if held.any():
        numbers = np.stack(storage.read(frames[held], np.ones(int(held.sum()), np.int64)), axis=1)
        plain = numbers.reshape(len(numbers), -1).view(np.uint8)
        pages[held, : plain.shape[1]] = plain
    return pages.reshape(-1, storage.page_bytes)


def resume(storage: FrameStorage, frames: IntArray, pieces: Bytes, page: tuple[int, int]) -> None:
    """FrameStorage.resume for int8, of pages of (page_size, head_dim)."""
    pages = pieces.reshape(len(frames), -1)
    held = pages[:, -1] == 1
    storage.load(frames[~held], np.ascontiguousarray(pages[~held, : storage.page_bytes]))
    if held.any():
        plain = np.ascontiguousarray(pages[held, : 8 * page[0] * page[1]]).view(np.float32)
        numbers = plain.reshape(-1, 2, *page)
        # an open page has room left: all but its last token is all of it, and does not make it full
        storage.write(frames[held], 0, numbers[:, 0, :-1], numbers[:, 1, :-1])


class CodedStorage:
    """Frames of int8. A page is coded when it is full, for its scales are over all of its tokens.

    Until then it is held in float32 beside the frames. That copy stays when the page fills, since a rollback may open
    the page again; it goes at `finish`, or when another page takes the frame.
    """

    def __init__(self, frames: int, shape: KVShape, page_size: int) -> None:
        dim = shape.head_dim
        self._keys = np.zeros((frames, page_size, dim), np.int8)
        self._values = np.zeros((frames, page_size, dim), np.int8)
        self._key_scales = np.zeros((frames, dim), np.uint16)
        self._value_scales = np.zeros((frames, page_size), np.uint16)
        self._open: dict[int, FloatArray] = {}
        self._page = (page_size, dim)
        self.page_bytes = shape.page_bytes(page_size)
        self.token_bytes = 8 * dim
        self._frames = frames
        self.memory: Bytes | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all frames, and of pages that are held beside them."""
        return self._frames * self.page_bytes + sum(held.nbytes for held in self._open.values())

    def write(self, frames: IntArray, offset: int, keys: FloatArray, values: FloatArray) -> None:
        """Store tokens `offset`.. of each frame's page; keys and values are float32 [n, tokens, D]."""
        stop = offset + keys.shape[1]
        if offset == 0 and stop == self._page[0]:
            self.finish(frames)
            self._code(frames, keys, values)
            return
        for index, frame in enumerate(frames.tolist()):
            if frame not in self._open:
                # a full page that was cut, and goes on; or a new one
                self._open[frame] = np.concatenate(self.read(np.array([frame])))
            held = self._open[frame]
            held[0, offset:stop], held[1, offset:stop] = keys[index], values[index]
            if stop == self._page[0]:
                self._code(np.array([frame]), held[:1], held[1:])

    def _code(self, frames: IntArray, keys: FloatArray, values: FloatArray) -> None:
        self._keys[frames], self._key_scales[frames] = coded(keys, 1)
        self._values[frames], self._value_scales[frames] = coded(values, 2)

    def read(self, frames: IntArray, counts: IntArray | None = None) -> tuple[FloatArray, FloatArray]:
        """Keys and values of whole pages, float32 [n, P, D] each; `counts` as in FrameStorage."""
        keys = self._keys[frames] * _plain(self._key_scales[frames])[:, None]
        values = self._values[frames] * _plain(self._value_scales[frames])[:, :, None]
        if counts is not None:
            for index in (counts < self._page[0]).nonzero()[0].tolist():
                held = self._open.get(int(frames[index]))
                if held is not None:
                    keys[index], values[index] = held
        return keys, values

    def load(self, frames: IntArray, pages: Bytes) -> None:
        """Fill frames from stored bytes, uint8 [n, page_bytes]."""
        self.finish(frames)
        at = 0
        for held in (self._keys, self._values, self._key_scales, self._value_scales):
            flat = held.reshape(self._frames, -1).view(np.uint8)
            flat[frames] = pages[:, at : at + flat.shape[1]]
            at += flat.shape[1]

    def dump(self, frames: IntArray) -> Bytes:
        """The stored bytes of frames, uint8 [n, page_bytes], bit-equal."""
        pages = np.zeros((len(frames), self.page_bytes), np.uint8)
        at = 0
        for held in (self._keys, self._values, self._key_scales, self._value_scales):
            flat = held.reshape(self._frames, -1).view(np.uint8)
            pages[:, at : at + flat.shape[1]] = flat[frames]
            at += flat.shape[1]
        return pages

    def copy(self, source: IntArray, target: IntArray) -> None:
        """Copy frames to other frames."""
        self.finish(target)
        for held in (self._keys, self._values, self._key_scales, self._value_scales):
            held[target] = held[source]
        for from_, to in zip(source.tolist(), target.tolist(), strict=True):
            if from_ in self._open:
                self._open[to] = self._open[from_].copy()

    def finish(self, frames: IntArray) -> None:
        """Forget what was held beside these frames, for their pages are full for good, or gone."""
        if self._open:
            for frame in frames.tolist():
                self._open.pop(frame, None)

    def suspend(self, frames: IntArray) -> Bytes:
        """All that open pages need to go on elsewhere, uint8 [4 n, page_bytes]."""
        return suspend(self, frames, np.array([frame in self._open for frame in frames.tolist()], np.bool_))

    def resume(self, frames: IntArray, pieces: Bytes) -> None:
        """Frames hold again what `suspend` gave."""
        self.finish(frames)
        resume(self, frames, pieces, self._page)

    def tokens(self, frames: IntArray, offsets: IntArray) -> Bytes:
        """One token of each frame's open page, uint8 [n, token_bytes]: keys, then values, as float32."""
        keys, values = self.read(frames, np.zeros(len(frames), np.int64))
        each = np.arange(len(frames))
        return np.concatenate([keys[each, offsets], values[each, offsets]], axis=1).view(np.uint8)

    def put_tokens(self, frames: IntArray, tokens: Bytes) -> None:
        """Frames hold open pages of these tokens, uint8 [n, fewer than P, token_bytes]."""
        self.finish(frames)
        self.write(frames, 0, *token_numbers(tokens, np.float32))
