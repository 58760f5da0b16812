"""The compiled kernel against the reference, its oracle, for every instruction set that this machine has."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpager import _native
from kvpager.config import KVShape
from kvpager.errors import InputError
from kvpager.kernels.native import NativeKernel, serves
from kvpager.kernels.native_digest import NativeDigest
from kvpager.kernels.reference import ReferenceKernel
from kvpager.ports import Kernel, PageList, Partial, Settled, TileQuery

NATIVE, REFERENCE = NativeKernel(), ReferenceKernel()
CLOSE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 2e-2, "int8": 2e-2}


@pytest.fixture(autouse=True)
def _as_it_was():
    isa, threads = _native.isa(), _native.threads()
    yield
    _native.set_isa(isa)
    _native.set_threads(max(threads, 1))


def joined(pages: np.ndarray) -> np.ndarray:
    return pages.reshape(-1, *pages.shape[2:])


class Case:
    """Pages in random frames, of which the slots that hold no token are NaN; and a tile at their end."""

    def __init__(self, *, heads, group, dim, size, tokens, asked, dtype, seed, window=None, softcap=None, order=None):
        self.rng = np.random.default_rng(seed)
        self.shape = KVShape(1, heads, heads * group, dim, dtype=dtype)
        self.size, self.tokens = size, tokens
        self.blocks = -(-tokens // size)
        self.total = self.blocks * heads + 5
        keys_values = self.rng.standard_normal((2, heads, self.blocks * size, dim)).astype(np.float32)
        keys_values[:, :, tokens:] = np.nan
        self.keys, self.values = keys_values
        asked = min(asked, tokens)
        queries = self.rng.standard_normal((heads * group, asked, dim)).astype(np.float32)
        self.tile = TileQuery(queries, tokens - asked, dim**-0.5, window, softcap)
        places = (self.rng if order is None else np.random.default_rng(order)).permutation(self.total)
        self.frames = places[: self.blocks * heads].reshape(heads, self.blocks)

    def storage(self, kernel: Kernel):
        heads, dim = self.shape.kv_heads, self.shape.head_dim
        storage = kernel.storage(self.total, self.shape, self.size)
        pages = [held.reshape(heads, self.blocks, self.size, dim) for held in (self.keys, self.values)]
        if self.shape.dtype == "int8":
            whole, last = self.tokens // self.size, self.tokens % self.size
            storage.write(self.frames[:, :whole].ravel(), 0, *(joined(held[:, :whole]) for held in pages))
            if last:
                storage.write(self.frames[:, whole], 0, *(joined(held[:, whole:, :last]) for held in pages))
            return storage
        poison = np.full((self.total, self.size, dim), np.nan, np.float32)
        storage.write(np.arange(self.total), 0, poison, poison)
        storage.write(self.frames.ravel(), 0, *(joined(held) for held in pages))
        return storage

    def pages(self, first: int, last: int) -> PageList:
        heads = self.shape.kv_heads
        head = np.repeat(np.arange(heads), last - first)
        block = np.tile(np.arange(first, last), heads)
        counts = np.minimum(self.tokens - block * self.size, self.size)
        return PageList(self.frames[head, block], head, block * self.size, counts, heads)

    def run(self, kernel: Kernel, cuts: tuple[int, ...] = ()) -> tuple[list[Partial], Settled]:
        storage = self.storage(kernel)
        edges = [0, *cuts, self.blocks]
        groups = [self.pages(a, b) for a, b in pairwise(edges) if b > a]
        parts = [kernel.attend(storage, self.tile, group) for group in groups]
        return parts, kernel.settle(parts, np.concatenate([group.heads for group in groups]))


def assert_close(found: np.ndarray, wanted: np.ndarray, tolerance: float) -> None:
    assert found.dtype == wanted.dtype == np.float32
    assert found.shape == wanted.shape
    assert np.array_equal(np.isinf(found), np.isinf(wanted))
    finite = np.isfinite(wanted)
    assert np.isfinite(found[finite]).all()
    error = np.abs(found[finite] - wanted[finite]).max(initial=0)
    assert error <= tolerance * max(1, np.abs(wanted[finite]).max(initial=0)), error


@settings(max_examples=120, deadline=None)
@given(
    isa=st.sampled_from(_native.isas()),
    dtype=st.sampled_from(sorted(CLOSE)),
    heads=st.integers(1, 3),
    group=st.integers(1, 9),
    dim=st.sampled_from([8, 16, 24, 64, 80, 128, 256]),
    size=st.sampled_from([8, 16, 32]),
    tokens=st.integers(1, 600),
    asked=st.sampled_from([1, 2, 5, 16, 64]),
    window=st.none() | st.integers(1, 200),
    softcap=st.none() | st.floats(0.5, 30),
    cut=st.integers(0, 40),
    seed=st.integers(0, 2**16),
)
def test_any_shape_equals_the_reference(isa, cut, **options):
    _native.set_isa(isa)
    case = Case(**options)
    cuts = (min(cut, case.blocks),)
    parts, settled = case.run(NATIVE, cuts)
    wanted_parts, wanted = case.run(REFERENCE, cuts)
    close = CLOSE[options["dtype"]]
    for part, other in zip(parts, wanted_parts, strict=True):
        assert_close(part.output, other.output, close)
        assert_close(part.lse, other.lse, close)
        # far below the row's greatest score a page's sum is nothing in float32
        seen = other.page_lse > other.lse.reshape(-1, *other.page_lse.shape[1:])[case_heads(part, other)] - 60
        assert_close(part.page_lse[seen], other.page_lse[seen], close)
    assert_close(settled.output, wanted.output, close)
    for name in ("peak", "total", "last", "window"):
        assert_close(getattr(settled.masses, name), getattr(wanted.masses, name), close)


def case_heads(part: Partial, other: Partial) -> np.ndarray:
    kv_heads = len(part.output) // part.page_lse.shape[1]
    return np.repeat(np.arange(kv_heads), len(other.page_lse) // kv_heads)


@pytest.mark.promise(1)
@pytest.mark.parametrize("dtype", sorted(CLOSE))
@pytest.mark.parametrize(("asked", "group", "tokens"), [(1, 3, 3000), (64, 3, 1100), (1, 1, 40), (7, 4, 900)])
def test_bits_depend_neither_on_threads_nor_on_where_pages_lie(dtype, asked, group, tokens):
    results = []
    for threads in (1, 2, 3, 4):
        _native.set_threads(max(threads, 1))
        case = Case(
            heads=2, group=group, dim=64, size=16, tokens=tokens, asked=asked, dtype=dtype, seed=1, order=threads
        )
        parts, settled = case.run(NATIVE, (case.blocks // 2,))
        masses = settled.masses
        results.append([settled.output, masses.peak, masses.total, masses.last, masses.window, parts[0].page_lse])
    for other in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_rows_that_see_nothing_give_zeros():
    case = Case(heads=2, group=2, dim=16, size=8, tokens=64, asked=2, dtype="float32", seed=0, window=3)
    storage = case.storage(NATIVE)
    hidden = NATIVE.attend(storage, case.tile, case.pages(0, 2))
    assert not hidden.output.any()
    assert np.isneginf(hidden.lse).all()
    assert np.isneginf(hidden.page_lse).all()
    settled = NATIVE.settle([hidden], case.pages(0, 2).heads)
    assert not settled.output.any()
    assert not settled.masses.peak.any()


def test_a_head_without_pages_gives_zeros():
    case = Case(heads=3, group=2, dim=16, size=8, tokens=64, asked=1, dtype="bfloat16", seed=0)
    pages = case.pages(0, 4)
    middle = pages.heads == 1
    only = PageList(pages.frames[middle], pages.heads[middle], pages.starts[middle], pages.counts[middle], 3)
    part = NATIVE.attend(case.storage(NATIVE), case.tile, only)
    assert part.output[2:4].all()
    assert not part.output[:2].any()
    assert not part.output[4:].any()
    assert np.array_equal(np.isinf(part.lse[:, 0]), [True, True, False, False, True, True])


def test_masses_of_a_query_sum_to_one():
    case = Case(heads=3, group=3, dim=64, size=16, tokens=2048, asked=64, dtype="bfloat16", seed=3)
    _, settled = case.run(NATIVE, (60, 124))
    total = settled.masses.total.sum()
    assert total == pytest.approx(3 * 64, rel=1e-4)


def test_wrong_arguments_are_refused_by_name():
    case = Case(heads=2, group=2, dim=16, size=8, tokens=64, asked=1, dtype="float32", seed=0)
    storage, pages, tile = case.storage(NATIVE), case.pages(0, 8), case.tile

    def attend(**changed: object) -> None:
        fields = {**pages._asdict(), **vars(tile), **changed}
        query = TileQuery(*(fields[name] for name in ("queries", "start", "scale", "window", "softcap")))
        group = PageList(*(fields[name] for name in ("frames", "heads", "starts", "counts", "kv_heads")))
        NATIVE.attend(storage, query, group)

    attend()
    for name, value in {
        "frames": pages.frames + case.total,
        "heads": pages.heads + 1,
        "starts": pages.starts - 1,
        "counts": pages.counts + 1,
        "queries": tile.queries[:, :, :8],
        "start": -1,
        "scale": np.nan,
        "window": -1,
    }.items():
        with pytest.raises(ValueError, match=name):
            attend(**{name: value})
    with pytest.raises(ValueError, match="heads: pages are not sorted"):
        attend(heads=pages.heads[::-1].copy())
    with pytest.raises(ValueError, match="frames: expected a contiguous int64"):
        attend(frames=pages.frames.astype(np.int32))
    with pytest.raises(ValueError, match="counts: expected"):
        attend(counts=pages.counts[1:])
    with pytest.raises(ValueError, match="queries: 4 heads"):
        attend(kv_heads=3)
    with pytest.raises(InputError, match="ReferenceStorage"):
        NATIVE.attend(case.storage(REFERENCE), tile, pages)


def test_wrong_parts_are_refused_by_name():
    case = Case(heads=2, group=2, dim=16, size=8, tokens=64, asked=1, dtype="float32", seed=0)
    part = NATIVE.attend(case.storage(NATIVE), case.tile, case.pages(0, 8))
    heads = case.pages(0, 8).heads
    with pytest.raises(ValueError, match="heads: 15 given for 16 pages"):
        NATIVE.settle([part], heads[1:])
    with pytest.raises(ValueError, match="heads: 2 is not in"):
        NATIVE.settle([part], heads + 1)
    with pytest.raises(ValueError, match="lse: expected"):
        NATIVE.settle([part, Partial(part.output, part.lse[1:], part.page_lse)], np.concatenate([heads, heads]))


def test_serves_what_it_can_hold():
    assert serves(KVShape(1, 1, 1, 256))
    assert not serves(KVShape(1, 1, 1, 20))
    assert not serves(KVShape(1, 1, 1, 264))
    with pytest.raises(ValueError, match="head_dim: 20 is not a multiple of 8"):
        NATIVE.storage(4, KVShape(1, 1, 1, 20), 16)


def test_digests_are_compiled_where_there_are_any():
    assert isinstance(NATIVE.digest("2bit", 1, 1, 64, 16, 1), NativeDigest)
    assert NATIVE.digest("minmax", 1, 1, 64, 16, 1) is None
