"""Digests: small summaries of pages' keys, from which a page's attention is estimated without its keys.

Five kinds (`kvpager.config.DIGESTS`), in two families:

* **coded keys**: ``2bit`` (the default) and ``4bit`` hold every key of the page in 2 or 4 bits, between the
  smallest and the largest number of its channel in that page, asymmetric and per channel as in KIVI
  (arXiv 2402.02750). ``submeans`` holds the means of 8 equal runs of tokens, in 4 bits.
* **boxes**: ``minmax`` holds the smallest and the largest number of each channel and estimates the largest
  score that a key in between can have (Quest, arXiv 2406.10774); ``mean-dev`` holds mean and mean absolute
  deviation. Both score a page as ``q . centre + |q| . spread``.

Shapes use L (layers), H (KV heads), G (query heads a KV head), T (queries of a tile), D (head_dim),
P (page_size), n (pages of one call), U (units of a page: keys, sub-means, or one box) and F (features: what
one query-unit product sums over, D rounded up to whole bytes of codes, or 2 D).

All arithmetic is float32. A row's bytes depend on its keys alone, and an estimate on its rows' bytes, the
queries and the order of the rows: never on where the rows lie.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpager.config import DIGESTS
from kvpager.core.selection import choose, looks, normalised
from kvpager.errors import ConfigError, InputError
from kvpager.ports import Bytes, Choice, FloatArray, IntArray, Room, TileQuery

__all__ = ["BoxDigest", "CodedDigest", "Digest", "make_digest"]

SUBMEANS = 8
BOX_BLOCK = 8  # boxes that one matrix product takes together
SLAB_FLOATS = 1 << 19  # numbers of scratch that about fit a core's L2 cache: passes over a slab then cost little
SLAB_PAGES = 512
# OpenBLAS goes parallel above this many multiply-adds a product. Its workers spin, and on cores shared with
# PyTorch's a product of 0.25 ms then took 12 to 16 ms (measured); alone on one core it loses nothing here.
SERIAL_PRODUCT = 1 << 18
LOWEST = np.float32(-1e30)  # stands in for a peak of -inf, so that -inf - peak stays -inf
EPSILON = np.float32(1e-30)  # a scale above zero for channels that are all zeros

Rows = IntArray | slice
Field = tuple[tuple[int, ...], npt.DTypeLike]


class Digest(ABC):
    """Digests of pages by row (block row of the page table) and layer; a row's heads are built together.

    Rows hold nothing useful until built; only rows given to `estimate` need to have been.
    """

    units: int
    features: int
    sample = 1
    kind = ""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, page_size: int) -> None:
        self.layers = layers
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.page_size = page_size
        self.capacity = 0
        self.seconds = 0.0  # spent choosing so far
        self._scratch: dict[str, FloatArray] = {}
        self._arrays: list[list[npt.NDArray[Any]]] = [
            [np.zeros((0, kv_heads, *shape), dtype) for shape, dtype in self._fields()] for _ in range(layers)
        ]

    @abstractmethod
    def _fields(self) -> list[Field]:
        """Shape (of one page) and dtype of each array that a layer holds."""

    @abstractmethod
    def build(self, layer: int, rows: IntArray, keys: FloatArray) -> None:
        """Make the digests of whole pages: rows int [n] below `capacity`, keys float32 [n, H, P, D]."""

    @abstractmethod
    def _features(self, queries: FloatArray) -> FloatArray:
        """What units are multiplied with: [H, F, G * T], contiguous, from scaled queries [H, G * T, D]."""

    @abstractmethod
    def _scores(self, layer: int, rows: Rows, pages: int, features: FloatArray) -> FloatArray:
        """Scores of each unit, [pages, H, U, G * T], a view of scratch that the caller may overwrite."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page's digest, all included."""
        return sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in self._fields())

    @property
    def nbytes(self) -> int:
        """Bytes allocated for digests, over all layers (scratch is apart)."""
        return sum(array.nbytes for arrays in self._arrays for array in arrays)

    @property
    def scratch_nbytes(self) -> int:
        """Bytes of scratch; bounded, whatever the length of the sequences."""
        return sum(array.nbytes for array in self._scratch.values())

    def grow(self, rows: int) -> None:
        """Make room for `rows` rows, layer by layer and by at least an eighth, so that memory never doubles."""
        if rows <= self.capacity:
            return
        capacity = max(rows, self.capacity + self.capacity // 8)
        for arrays in self._arrays:
            for i, old in enumerate(arrays):
                new = np.zeros((capacity, *old.shape[1:]), old.dtype)
                new[: self.capacity] = old[: self.capacity]
                arrays[i] = new
        self.capacity = capacity

    def dump(self, rows: IntArray) -> Bytes:
        """The digests of rows in all layers, uint8 [n, layers * H * page_bytes]: layer by layer, array by array."""
        return np.concatenate([array[rows] for array in self._bytes()], axis=1)

    def load(self, rows: IntArray, digests: Bytes) -> None:
        """Make rows below `capacity` hold what `dump` gave for as many; raises InputError for another size."""
        wanted = (len(rows), self.layers * self.kv_heads * self.page_bytes)
        if digests.shape != wanted:
            raise InputError(f"digests: {list(digests.shape)} bytes are not the {list(wanted)} of these rows")
        at = 0
        for array in self._bytes():
            array[rows] = digests[:, at : at + array.shape[1]]
            at += array.shape[1]

    def _bytes(self) -> list[Bytes]:
        """Each layer's arrays as bytes, views uint8 [capacity, bytes of a row]."""
        return [
            a.view(np.uint8).reshape(len(a), math.prod(a.shape[1:]) * a.itemsize)
            for layer in self._arrays
            for a in layer
        ]

    def choose(
        self, layer: int, rows: IntArray, tile: TileQuery, starts: IntArray, own_lse: FloatArray, room: Room
    ) -> Choice:
        """Choose among the pages of built rows [n], as in :class:`kvpager.ports.Digest`.

        Of each query head every `sample`-th query of the tile takes part (see `looks`).
        """
        begun = perf_counter()
        chosen = choose(self.shares(layer, rows, tile, starts, own_lse, self.sample), room)
        self.seconds += perf_counter() - begun
        return chosen

    def shares(
        self,
        layer: int,
        rows: IntArray,
        tile: TileQuery,
        starts: IntArray,
        own_lse: FloatArray | None = None,
        sample: int = 1,
    ) -> FloatArray:
        """Estimated attention mass of candidate pages, query by query.

        rows     int [n], built rows of `layer`; ascending runs without gaps are read in place
        tile     queries [H * G, T, D] with scale, softcap and window; all candidates lie before the tile
        starts   int [n], position of each page's first token; read only under a window
        own_lse  float32 [H * G, T]: log-sum-exp of each query's scores of the tile's own keys. With it, masses are
                 shares of all attention and not of the candidates' alone: a third to a half of what 2-bit selection
                 loses against the best one is won back (measured by benchmarks/digest_quality.py)
        sample   which queries take part, W of each KV head: see `looks`

        Returns float32 [n, H, W]. Each query's softmax is taken by itself; queries are never averaged. A query
        whose window hides every candidate gives nothing to any.
        """
        n, heads = len(rows), self.kv_heads
        query_heads, tokens, head_dim = tile.queries.shape
        member, token = looks(query_heads // heads, tokens, sample)
        queries = tile.queries.reshape(heads, -1, tokens, head_dim)[:, member, token]
        width = len(token)
        if n == 0:
            return np.zeros((0, heads, width), np.float32)
        features = self._features(queries * np.float32(tile.scale))
        ascending = bool(rows[-1] - rows[0] == n - 1 and (np.diff(rows) == 1).all())
        slab = SLAB_FLOATS // (heads * self.units * max(self.features, width))
        slab = min(max(slab // BOX_BLOCK * BOX_BLOCK, BOX_BLOCK), SLAB_PAGES)
        shares = np.empty((n, heads, width), np.float32)
        peaks = np.empty((-(-n // slab), heads, width), np.float32)
        for i, low in enumerate(range(0, n, slab)):
            part = slice(low, min(low + slab, n))
            taken = slice(int(rows[0]) + low, int(rows[0]) + part.stop) if ascending else rows[part]
            scores = self._scores(layer, taken, part.stop - low, features)
            self._cap_and_hide(scores, tile, starts[part], tile.start + token)
            np.maximum(scores.max(axis=0).max(axis=1), LOWEST, out=peaks[i])
            scores -= peaks[i][:, None, :]
            np.exp(scores, out=scores)
            np.sum(scores, axis=2, out=shares[part])
        own = None if own_lse is None else own_lse.reshape(heads, -1, tokens)[:, member, token]
        return normalised(shares, peaks, slab, own)

    def _cap_and_hide(self, scores: FloatArray, tile: TileQuery, starts: IntArray, positions: IntArray) -> None:
        """Apply the soft cap, and the window: a unit seen in part counts by the share of its tokens seen.

        scores [n, H, U, W] of queries at `positions` [W].
        """
        if tile.softcap is not None:
            scores *= np.float32(1 / tile.softcap)
            np.tanh(scores, out=scores)
            scores *= np.float32(tile.softcap)
        if tile.window is None:
            return
        first_seen = positions - tile.window + 1
        if starts.min() >= first_seen.max():
            return
        span = self.page_size // self.units
        ends = starts[:, None] + np.arange(1, self.units + 1) * span
        seen = np.clip(ends[:, :, None] - first_seen, 0, span)
        with np.errstate(divide="ignore"):
            log_share = np.log(seen.astype(np.float32) / np.float32(span))
        scores += log_share[:, None]

    def _buffer(self, name: str, *shape: int) -> FloatArray:
        """Reused scratch of a shape; its content is whatever was there."""
        size = int(np.prod(shape))
        if name not in self._scratch or self._scratch[name].size < size:
            self._scratch[name] = np.zeros(size, np.float32)
        return self._scratch[name][:size].reshape(shape)


class CodedDigest(Digest):
    """Keys, or means of equal runs of keys, in a few bits: per page and channel an 8-bit step and offset.

    A number is held as ``offset + step * code``. Offset and step are whole multiples (int8, uint8) of two
    scales a page (float32), rounded outwards so that the codes span all of the channel's numbers: what comes
    back differs by at most half a step.
    """

    def __init__(
        self, layers: int, kv_heads: int, head_dim: int, page_size: int, *, bits: int, units: int | None = None
    ) -> None:
        self.bits = bits
        self.units = units or page_size
        self.per_byte = 8 // bits
        self.features = -(-head_dim // self.per_byte) * self.per_byte
        shifts = np.arange(self.per_byte) * bits
        self._decode = ((np.arange(256)[:, None] >> shifts) & (2**bits - 1)).astype(np.float32)
        self._encode = (1 << shifts).astype(np.float32)
        super().__init__(layers, kv_heads, head_dim, page_size)

    def _fields(self) -> list[Field]:
        codes = (self.units, self.features // self.per_byte)
        return [(codes, np.uint8), ((self.features,), np.uint8), ((self.features,), np.int8), ((2,), np.float32)]

    def build(self, layer: int, rows: IntArray, keys: FloatArray) -> None:
        """Make the digests of whole pages: rows int [n] below `capacity`, keys float32 [n, H, P, D]."""
        n, heads, units, top = len(rows), self.kv_heads, self.units, 2**self.bits - 1
        numbers = np.zeros((n, heads, units, self.features), np.float32)
        numbers[..., : self.head_dim] = keys.reshape(n, heads, units, -1, self.head_dim).mean(axis=3)
        low, high = numbers.min(axis=2), numbers.max(axis=2)
        scales = np.empty((n, heads, 2), np.float32)
        offset_scale, step_scale = scales[..., :1], scales[..., 1:]
        np.maximum(np.abs(low).max(axis=2, keepdims=True) / 127, EPSILON, out=offset_scale)
        offset = np.maximum(np.floor(low / offset_scale), -128)
        spread = (high - offset * offset_scale) / top
        np.maximum(spread.max(axis=2, keepdims=True) / 255, EPSILON, out=step_scale)
        step = np.clip(np.ceil(spread / step_scale), 1, 255)
        numbers -= (offset * offset_scale)[:, :, None]
        numbers /= (step * step_scale)[:, :, None]
        np.clip(np.rint(numbers, out=numbers), 0, top, out=numbers)
        codes = numbers.reshape(n, heads, units, -1, self.per_byte) @ self._encode
        for array, made in zip(self._arrays[layer], (codes, step, offset, scales), strict=True):
            array[rows] = made.astype(array.dtype)

    def decode(self, layer: int, rows: IntArray) -> tuple[FloatArray, FloatArray]:
        """Keys (or means) as held, float32 [n, H, U, D], and their steps [n, H, D]."""
        step, offset = self._scales(layer, rows)
        keys = self._codes(layer, rows, len(rows)) * step[:, :, None] + offset[:, :, None]
        return keys[..., : self.head_dim], step[..., : self.head_dim]

    def _codes(self, layer: int, rows: Rows, pages: int) -> FloatArray:
        codes = self._arrays[layer][0][rows]
        out = self._buffer("keys", pages, self.kv_heads, self.units, self.features)
        by_byte = out.reshape(*codes.shape, self.per_byte)
        np.take(self._decode, codes, axis=0, out=by_byte, mode="clip")
        return out

    def _scales(self, layer: int, rows: Rows) -> tuple[FloatArray, FloatArray]:
        _, step, offset, scales = (array[rows] for array in self._arrays[layer])
        unit = scales.astype(np.float32, copy=False)
        return (
            np.multiply(step, unit[..., 1:], dtype=np.float32),
            np.multiply(offset, unit[..., :1], dtype=np.float32),
        )

    def _features(self, queries: FloatArray) -> FloatArray:
        heads, width, _ = queries.shape
        features = np.zeros((heads, self.features, width), np.float32)
        features[:, : self.head_dim] = queries.swapaxes(1, 2)
        return features

    def _scores(self, layer: int, rows: Rows, pages: int, features: FloatArray) -> FloatArray:
        width = features.shape[2]
        step, offset = self._scales(layer, rows)
        keys = self._codes(layer, rows, pages)
        if width > self.units:
            keys *= step[:, :, None]
            keys += offset[:, :, None]
            out = self._buffer("scores", pages, self.kv_heads, self.units, width)
            return _multiply(keys, features, out)
        # Few queries: scale them by the steps, not the many keys; units go last, where sums over them are quick.
        out = self._buffer("scores", pages, self.kv_heads, width, self.units)
        rowwise = np.ascontiguousarray(features.swapaxes(1, 2))
        np.matmul(rowwise * step[:, :, None], keys.swapaxes(2, 3), out=out)
        shift = np.matmul(offset.swapaxes(0, 1), features)  # [H, pages, width]
        out += shift.swapaxes(0, 1)[..., None]
        return out.swapaxes(2, 3)


class BoxDigest(Digest):
    """Centre and spread of each channel in float16: a page scores ``q . centre + |q| . spread``.

    `summary` gives both from keys [n, H, P, D], as [n, H, D] each.
    """

    units = 1

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        summary: Callable[[FloatArray], tuple[FloatArray, FloatArray]],
    ) -> None:
        self.features = 2 * head_dim
        self._summary = summary
        super().__init__(layers, kv_heads, head_dim, page_size)

    def _fields(self) -> list[Field]:
        return [((self.features,), np.float16)]

    def build(self, layer: int, rows: IntArray, keys: FloatArray) -> None:
        """Make the digests of whole pages: rows int [n] below `capacity`, keys float32 [n, H, P, D]."""
        limit = np.finfo(np.float16).max
        both = np.concatenate(self._summary(keys), axis=-1)
        self._arrays[layer][0][rows] = np.clip(both, -limit, limit).astype(np.float16)

    def _features(self, queries: FloatArray) -> FloatArray:
        columns = queries.swapaxes(1, 2)
        return np.concatenate([columns, np.abs(columns)], axis=1)

    def _scores(self, layer: int, rows: Rows, pages: int, features: FloatArray) -> FloatArray:
        heads, width, blocks = self.kv_heads, features.shape[2], -(-pages // BOX_BLOCK)
        boxes = self._buffer("keys", blocks * BOX_BLOCK, heads, self.features)
        boxes[:pages] = self._arrays[layer][0][rows]
        boxes[pages:] = 0
        blocked = boxes.reshape(blocks, BOX_BLOCK, heads, self.features).swapaxes(1, 2)
        scores = _multiply(blocked, features, self._buffer("scores", blocks, heads, BOX_BLOCK, width))
        by_page = self._buffer("pages", blocks, BOX_BLOCK, heads, width)
        by_page[...] = scores.swapaxes(1, 2)
        return by_page.reshape(blocks * BOX_BLOCK, heads, 1, width)[:pages]


def make_digest(kind: str, layers: int, kv_heads: int, head_dim: int, page_size: int, sample: int = 1) -> Digest:
    """A digest of one of `kvpager.config.DIGESTS`, without rows yet; raises ConfigError for another kind.

    Of each query head every `sample`-th query of a tile takes part in a choice.
    """
    shape = (layers, kv_heads, head_dim, page_size)
    made: Digest
    match kind:
        case "2bit":
            made = CodedDigest(*shape, bits=2)
        case "4bit":
            made = CodedDigest(*shape, bits=4)
        case "submeans":
            made = CodedDigest(*shape, bits=4, units=SUBMEANS)
        case "minmax":
            made = BoxDigest(*shape, summary=_middle_and_half_range)
        case "mean-dev":
            made = BoxDigest(*shape, summary=_mean_and_deviation)
        case _:
            raise ConfigError(f"digest: {kind!r} is not one of {', '.join(DIGESTS)}")
    made.sample = sample
    made.kind = f"{kind}/numpy/1"
    return made


def _middle_and_half_range(keys: FloatArray) -> tuple[FloatArray, FloatArray]:
    low, high = keys.min(axis=2), keys.max(axis=2)
    return (high + low) / 2, (high - low) / 2


def _mean_and_deviation(keys: FloatArray) -> tuple[FloatArray, FloatArray]:
    mean = keys.mean(axis=2)
    return mean, np.abs(keys - mean[:, :, None]).mean(axis=2)


def _multiply(units: FloatArray, features: FloatArray, out: FloatArray) -> FloatArray:
    """units [.., H, R, F] x features [H, F, W] into out [.., H, R, W], in products that stay on one core."""
    width = features.shape[2]
    step = max(SERIAL_PRODUCT // (units.shape[-2] * units.shape[-1]), 1)
    for low in range(0, width, step):
        np.matmul(units, features[:, :, low : low + step], out=out[..., low : low + step])
    return out
