"""The reference kernel: attention over scattered pages in NumPy, accumulated in float32.

It is the oracle of every faster kernel and the fallback where none is built. Attention runs over fixed
groups of pages; :func:`merge` joins the groups by their log-sum-exp (as in FlashAttention's split over
keys, arXiv 2205.14135), so that the same groups give the same bits wherever the pages lay.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvpager.config import KVShape
from kvpager.kernels import batch
from kvpager.kernels.coded import CodedStorage
from kvpager.kernels.numbers import OPEN_DTYPES, merge, narrowed, token_numbers, widened
from kvpager.ports import (
    WINDOW,
    Batch,
    BoolArray,
    Digest,
    FloatArray,
    FrameStorage,
    IntArray,
    Layer,
    Masses,
    PageList,
    Partial,
    Settled,
    States,
    TileQuery,
    Tiles,
)

__all__ = ["ReferenceKernel", "ReferenceStorage", "masses", "merge", "token_scores"]

Bytes = npt.NDArray[np.uint8]
# OpenBLAS goes parallel above this many multiply-adds a product. Its threads then spin between products and take
# the cores from PyTorch's: [192, 64] x [64, 1024] took 3 to 16 ms so, and 0.3 ms on one core (docs/decisions).
SERIAL_PRODUCT = 1 << 18
SERIAL_VECTOR = 9216  # the same for a matrix and a vector


def token_scores(queries: FloatArray, keys: FloatArray, scale: float | None = None) -> FloatArray:
    """Scaled products of queries with keys, before the softmax.

    queries  float32 [query_heads, T, D]
    keys     float32 [kv_heads, N, D]; query_heads is a multiple of kv_heads
    scale    by default D ** -0.5

    Returns float32 [query_heads, T, N].
    """
    heads, tokens, dim = queries.shape
    kv_heads, count, _ = keys.shape
    factor = np.float32(dim**-0.5 if scale is None else scale)
    grouped = (queries * factor).reshape(kv_heads, heads // kv_heads * tokens, dim)
    scores: FloatArray = np.matmul(grouped, keys.transpose(0, 2, 1))
    return scores.reshape(heads, tokens, count)


def masses(mass: FloatArray) -> Masses:
    """What is kept of the mass that each query gave to each page, float32 [n, G, T]."""
    by_query = mass.mean(axis=1)
    return Masses(
        peak=mass.max(axis=(1, 2)),
        total=by_query.sum(axis=1),
        last=by_query[:, -1],
        window=by_query[:, -WINDOW:].sum(axis=1),
    )


class ReferenceStorage:
    """Frames as two arrays, keys and values, each [frames, P * D] in the stored dtype.

    bfloat16 is held as uint16 (NumPy has no such type) and rounded to nearest even on the way in.
    """

    def __init__(self, frames: int, shape: KVShape, page_size: int) -> None:
        stored = OPEN_DTYPES[shape.dtype]
        self._dims = (page_size, shape.head_dim)
        width = page_size * shape.head_dim
        # zeros, not empty: the system hands out zeroed memory lazily, and no slot can hold a stray NaN
        self._keys = np.zeros((frames, width), stored)
        self._values = np.zeros((frames, width), stored)
        self.page_bytes = shape.page_bytes(page_size)
        self.nbytes = self._keys.nbytes + self._values.nbytes
        self.token_bytes = self.page_bytes // page_size
        self.memory: Bytes | None = None

    def write(self, frames: IntArray, offset: int, keys: FloatArray, values: FloatArray) -> None:
        """Store tokens `offset`.. of each frame's page; keys and values are float32 [n, tokens, D]."""
        size, dim = self._dims
        stop = offset + keys.shape[1]
        for held, new in ((self._keys, keys), (self._values, values)):
            held.reshape(-1, size, dim)[frames, offset:stop] = narrowed(new, self._keys.dtype)

    def read(self, frames: IntArray, counts: IntArray | None = None) -> tuple[FloatArray, FloatArray]:
        """Keys and values of whole pages, float32 [n, P, D] each; `counts` changes nothing."""
        return self._gather(self._keys, frames), self._gather(self._values, frames)

    def _gather(self, held: npt.NDArray[np.generic], frames: IntArray) -> FloatArray:
        return widened(np.take(held, frames, axis=0)).reshape(-1, *self._dims)

    def load(self, frames: IntArray, pages: Bytes) -> None:
        """Fill frames from stored bytes, uint8 [n, page_bytes]."""
        half = self.page_bytes // 2
        self._keys.view(np.uint8)[frames] = pages[:, :half]
        self._values.view(np.uint8)[frames] = pages[:, half:]

    def dump(self, frames: IntArray) -> Bytes:
        """The stored bytes of frames, uint8 [n, page_bytes], bit-equal."""
        half = self.page_bytes // 2
        pages = np.empty((len(frames), self.page_bytes), np.uint8)
        pages[:, :half] = np.take(self._keys, frames, axis=0).view(np.uint8)
        pages[:, half:] = np.take(self._values, frames, axis=0).view(np.uint8)
        return pages

    def copy(self, source: IntArray, target: IntArray) -> None:
        """Copy frames to frames."""
        self._keys[target] = self._keys[source]
        self._values[target] = self._values[source]

    def finish(self, frames: IntArray) -> None:
        """Nothing is held beside frames."""

    def suspend(self, frames: IntArray) -> Bytes:
        """The bytes of open pages, uint8 [n, page_bytes]."""
        return self.dump(frames)

    def resume(self, frames: IntArray, pieces: Bytes) -> None:
        """Frames hold these pages again, uint8 [n, page_bytes]."""
        self.load(frames, pieces)

    def tokens(self, frames: IntArray, offsets: IntArray) -> Bytes:
        """One token of each frame's page, uint8 [n, token_bytes]: keys, then values."""
        both = [held.reshape(-1, *self._dims)[frames, offsets] for held in (self._keys, self._values)]
        return np.concatenate(both, axis=1).view(np.uint8)

    def put_tokens(self, frames: IntArray, tokens: Bytes) -> None:
        """Frames hold pages of these tokens, uint8 [n, fewer than P, token_bytes]."""
        self.write(frames, 0, *token_numbers(tokens, self._keys.dtype))


class ReferenceKernel:
    """Kernel in NumPy: any head_dim, any grouping of heads, sliding windows and soft-capping."""

    name = "reference"
    numerics = "reference-1"

    def storage(self, frames: int, shape: KVShape, page_size: int) -> FrameStorage:
        """Make the bytes of `frames` frames."""
        if shape.dtype == "int8":
            return CodedStorage(frames, shape, page_size)
        return ReferenceStorage(frames, shape, page_size)

    def attend(self, storage: FrameStorage, tile: TileQuery, pages: PageList) -> Partial:
        """Attend one tile to one group of pages, causally, within the window.

        Slots of a page that are not written, or not visible, have no influence, whatever they hold.
        """
        keys, values = storage.read(pages.frames, pages.counts)
        count, size, dim = keys.shape
        heads, tokens, _ = tile.queries.shape
        group = heads // pages.kv_heads
        output = np.zeros((heads, tokens, dim), np.float32)
        lse = np.full((heads, tokens), -np.inf, np.float32)
        page_lse = np.empty((count, group, tokens), np.float32)
        plain = self._wholly_visible(tile, pages, size)
        bounds = np.searchsorted(pages.heads, np.arange(pages.kv_heads + 1)).tolist()
        for head in range(pages.kv_heads):
            if bounds[head] == bounds[head + 1]:
                continue
            rows = slice(head * group, (head + 1) * group)
            span = slice(bounds[head], bounds[head + 1])
            hidden = None if plain[span].all() else self._hidden(tile, pages, span, size)
            own_values = values[span].reshape(-1, dim)
            if hidden is not None:
                # a product of zero weight with a stray NaN or inf would still be NaN
                own_values = np.where(np.all(hidden, axis=0, keepdims=True).T, np.float32(0), own_values)
            result = _softmax_attend(tile, tile.queries[rows], keys[span].reshape(-1, dim), own_values, hidden, size)
            output[rows], lse[rows], page_lse[span] = result
        return Partial(output, lse, page_lse)

    def settle(self, parts: list[Partial], heads: IntArray) -> Settled:
        """Join groups of pages in the order given; `heads` [n] names the KV head of each of their pages, in order."""
        output, lse = merge(parts)
        page_lse = parts[0].page_lse if len(parts) == 1 else np.concatenate([part.page_lse for part in parts])
        _, group, tokens = page_lse.shape
        mass = np.exp(page_lse - lse.reshape(-1, group, tokens)[heads])
        return Settled(output, masses(mass))

    def within(self, states: States, most: float) -> bool:
        """Whether all numbers are in -most..most; NaN is not."""
        return batch.within(states, most)

    def write(
        self, layer: Layer, pieces: IntArray, keys: States, values: States, digest: Digest | None, full: IntArray
    ) -> None:
        """Store new tokens in the pages of all heads and summarise full pages."""
        batch.write(layer, pieces, keys, values, digest, full)

    def batch(
        self,
        layer: Layer,
        tiles: Tiles,
        queries: States,
        scale: float,
        softcap: float | None,
        digest: Digest | None,
        output: States,
    ) -> Batch:
        """The attention of tiles, one after the other."""
        return batch.PlainBatch(self, layer, tiles, queries, scale, softcap, digest, output)

    def digest(self, kind: str, layers: int, kv_heads: int, head_dim: int, page_size: int, sample: int) -> None:
        """None: the core's own digests serve."""

    @staticmethod
    def _wholly_visible(tile: TileQuery, pages: PageList, size: int) -> BoolArray:
        """Pages of which every query of the tile sees every token: bool [n]."""
        whole: BoolArray = (pages.counts == size) & (pages.starts + size - 1 <= tile.start)
        if tile.window is not None:
            last = tile.start + tile.queries.shape[1] - 1
            whole &= pages.starts > last - tile.window
        return whole

    @staticmethod
    def _hidden(tile: TileQuery, pages: PageList, span: slice, size: int) -> BoolArray:
        """Tokens that a query must not see: bool [T, pages * P]."""
        offsets = np.arange(size)
        keys = pages.starts[span, None] + offsets
        queries = tile.start + np.arange(tile.queries.shape[1])[:, None]
        flat = keys.reshape(1, -1)
        hidden: BoolArray = (flat > queries) | (offsets >= pages.counts[span, None]).reshape(1, -1)
        if tile.window is not None:
            hidden |= flat <= queries - tile.window
        return hidden


def _softmax_attend(
    tile: TileQuery,
    queries: FloatArray,
    keys: FloatArray,
    values: FloatArray,
    hidden: BoolArray | None,
    size: int,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """One KV head: queries [G, T, D] over keys and values [N, D]; output [G, T, D], lse [G, T], page_lse [n, G, T]."""
    group, tokens, dim = queries.shape
    scores = _serial_scores(queries.reshape(-1, dim) * np.float32(tile.scale), keys)
    if tile.softcap is not None:
        cap = np.float32(tile.softcap)
        scores /= cap
        np.tanh(scores, out=scores)
        scores *= cap
    if hidden is not None:
        np.copyto(scores.reshape(group, tokens, -1), -np.inf, where=hidden)
    top = scores.max(axis=1)
    top[~np.isfinite(top)] = 0
    scores -= top[:, None]
    weights = np.exp(scores, out=scores)
    # a product with ones sums each page's tokens faster than a reduction over so short an axis
    by_page = _serial_scores(np.ones((1, size), np.float32), weights.reshape(-1, size)).reshape(group * tokens, -1)
    total = by_page.sum(axis=1)
    output = _serial_mix(weights, values)
    output /= np.where(total > 0, total, np.float32(1))[:, None]
    with np.errstate(divide="ignore"):
        lse = top + np.log(total)
        page_lse = top[:, None] + np.log(by_page)
    return (
        output.reshape(group, tokens, dim),
        lse.reshape(group, tokens),
        page_lse.reshape(group, tokens, -1).transpose(2, 0, 1),
    )


def _serial_step(width: int, count: int, dim: int) -> int:
    """How many of `count` keys or values one product may take."""
    most = SERIAL_VECTOR // dim if width == 1 else SERIAL_PRODUCT // (width * dim)
    return min(count, max(1, most))


def _serial_scores(queries: FloatArray, keys: FloatArray) -> FloatArray:
    """Products of queries [W, D] with keys [N, D] as [W, N], in pieces that stay on one core."""
    width, dim = queries.shape
    count = len(keys)
    step = _serial_step(width, count, dim)
    columns = np.ascontiguousarray(queries.T)
    products = np.empty((count, width), np.float32)
    whole = count // step * step
    np.matmul(keys[:whole].reshape(-1, step, dim), columns, out=products[:whole].reshape(-1, step, width))
    if whole < count:
        np.matmul(keys[whole:], columns, out=products[whole:])
    return np.ascontiguousarray(products.T)


def _serial_mix(weights: FloatArray, values: FloatArray) -> FloatArray:
    """Products of weights [W, N] with values [N, D] as [W, D], in pieces that stay on one core."""
    width, count = weights.shape
    dim = values.shape[1]
    step = _serial_step(width, count, dim)
    whole = count // step * step
    pieces = weights[:, :whole].reshape(width, -1, step).transpose(1, 0, 2)
    mixed: FloatArray = np.matmul(pieces, values[:whole].reshape(-1, step, dim)).sum(axis=0)
    if whole < count:
        mixed += weights[:, whole:] @ values[whole:]
    return mixed
