"""Digests: what they hold, and that the estimate is what its definition says, written slowly."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvpager.config import DIGESTS
from kvpager.core import digest as digest_module
from kvpager.core.digest import CodedDigest, Digest, make_digest
from kvpager.core.selection import looks
from kvpager.errors import ConfigError, InputError
from kvpager.ports import TileQuery

HEADS, GROUP = 2, 3
Floats = npt.NDArray[np.float32]


def random_keys(rng: np.random.Generator, pages: int, page_size: int, head_dim: int) -> Floats:
    """Keys with channels of very different sizes and offsets, as rotated keys have."""
    size = np.exp(rng.normal(size=(1, HEADS, 1, head_dim)))
    offset = rng.normal(size=(1, HEADS, 1, head_dim)) * 3
    return (rng.normal(size=(pages, HEADS, page_size, head_dim)) * size + offset).astype(np.float32)


def random_tile(
    rng: np.random.Generator,
    tokens: int,
    head_dim: int,
    start: int,
    window: int | None = None,
    cap: float | None = None,
) -> TileQuery:
    queries = rng.normal(size=(HEADS * GROUP, tokens, head_dim)).astype(np.float32)
    return TileQuery(queries, start, head_dim**-0.5, window, cap)


def built(kind: str, keys: Floats) -> Digest:
    pages, heads, page_size, head_dim = keys.shape
    digest = make_digest(kind, 1, heads, head_dim, page_size)
    digest.grow(pages)
    digest.build(0, np.arange(pages), keys)
    return digest


def units_and_features(kind: str, digest: Digest, keys: Floats) -> tuple[Floats, bool]:
    """The vectors [n, H, U, F] that a query, or a query and its absolute values, are multiplied with."""
    if isinstance(digest, CodedDigest):
        return digest.decode(0, np.arange(len(keys)))[0], False
    if kind == "minmax":
        low, high = keys.min(2), keys.max(2)
        pair = [(low + high) / 2, (high - low) / 2]
    else:
        pair = [keys.mean(2), np.abs(keys - keys.mean(2, keepdims=True)).mean(2)]
    return np.concatenate(pair, -1).astype(np.float16).astype(np.float32)[:, :, None], True


def estimate(digest: Digest, *arguments: Any) -> Floats:
    """The digest's masses summed over the tile's queries and the group: [H, n]."""
    return digest.shares(*arguments).sum(axis=2).T


def slow_estimate(units: Floats, with_absolute: bool, tile: TileQuery, page_size: int, own: Floats | None) -> Floats:
    """The definition, one query and one unit at a time, in float64."""
    pages, heads, per_page, _ = units.shape
    span = page_size // per_page
    mass = np.zeros((heads, pages))
    for query_head, token in np.ndindex(tile.queries.shape[:2]):
        head = query_head // GROUP
        query = tile.queries[query_head, token].astype(np.float64)
        if with_absolute:
            query = np.concatenate([query, np.abs(query)])
        parts = np.zeros(pages)
        for page, unit in np.ndindex(pages, per_page):
            score = float(query @ units[page, head, unit]) * tile.scale
            if tile.softcap is not None:
                score = tile.softcap * math.tanh(score / tile.softcap)
            first = page * page_size + unit * span
            seen = sum(
                tile.window is None or position > tile.start + token - tile.window
                for position in range(first, first + span)
            )
            parts[page] += math.exp(score) * seen / span
        total = parts.sum() + (0.0 if own is None else math.exp(own[query_head, token]))
        if total > 0:
            mass[head] += parts / total
    return mass.astype(np.float32)


@pytest.mark.parametrize("tokens", [1, 5, 64])
@pytest.mark.parametrize("kind", DIGESTS)
def test_estimate_equals_its_definition(kind: str, tokens: int) -> None:
    rng = np.random.default_rng(1)
    keys = random_keys(rng, 9, 16, 20)
    digest, tile = built(kind, keys), random_tile(rng, tokens, 20, start=144)
    units, absolute = units_and_features(kind, digest, keys)
    got = estimate(digest, 0, np.arange(9), tile, np.arange(9) * 16)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, slow_estimate(units, absolute, tile, 16, None), rtol=2e-4, atol=1e-6)
    np.testing.assert_allclose(got.sum(1), GROUP * tokens, rtol=1e-5)


@pytest.mark.parametrize("tokens", [1, 24])
@pytest.mark.parametrize("kind", DIGESTS)
def test_estimate_honours_window_softcap_and_the_tile_s_own_keys(kind: str, tokens: int) -> None:
    rng = np.random.default_rng(2)
    keys = random_keys(rng, 6, 16, 16)
    tile = random_tile(rng, tokens, 16, start=96, window=53, cap=4.0)
    own = rng.normal(size=(HEADS * GROUP, tokens)).astype(np.float32)
    digest = built(kind, keys)
    units, absolute = units_and_features(kind, digest, keys)
    for given in (None, own):
        got = estimate(digest, 0, np.arange(6), tile, np.arange(6) * 16, given)
        np.testing.assert_allclose(got, slow_estimate(units, absolute, tile, 16, given), rtol=2e-4, atol=1e-6)
    assert (got[:, :2] == 0).all()  # positions up to 43 lie outside of every query's window
    assert (got[:, 2] > 0).all()


def test_queries_whose_window_hides_every_candidate_add_nothing() -> None:
    rng = np.random.default_rng(3)
    digest = built("2bit", random_keys(rng, 2, 16, 16))
    rows, starts = np.arange(2), np.arange(2) * 16
    half = estimate(digest, 0, rows, random_tile(rng, 32, 16, start=32, window=17), starts)
    np.testing.assert_allclose(half.sum(1), GROUP * 16, rtol=1e-5)
    assert (estimate(digest, 0, rows, random_tile(rng, 4, 16, start=96, window=8), starts) == 0).all()


@pytest.mark.parametrize("kind", DIGESTS)
@pytest.mark.parametrize("page_size", [8, 16, 32])
@pytest.mark.parametrize("head_dim", [1, 16, 21, 24, 64, 80, 96, 128])
def test_every_page_size_and_head_dim_works(kind: str, page_size: int, head_dim: int) -> None:
    rng = np.random.default_rng(4)
    keys = random_keys(rng, 3, page_size, head_dim)
    tile = random_tile(rng, 2, head_dim, start=3 * page_size)
    digest = built(kind, keys)
    units, absolute = units_and_features(kind, digest, keys)
    got = estimate(digest, 0, np.arange(3), tile, np.arange(3) * page_size)
    np.testing.assert_allclose(got, slow_estimate(units, absolute, tile, page_size, None), rtol=5e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "bits"), [("2bit", 2), ("4bit", 4)])
@pytest.mark.parametrize("head_dim", [20, 21, 64])
def test_coded_keys_come_back_within_half_a_step(kind: str, bits: int, head_dim: int) -> None:
    rng = np.random.default_rng(5)
    keys = random_keys(rng, 50, 16, head_dim)
    digest = built(kind, keys)
    assert isinstance(digest, CodedDigest)
    got, step = digest.decode(0, np.arange(50))
    assert (np.abs(got - keys) <= 0.5001 * step[:, :, None] + 1e-5).all()
    # Rounding outwards costs at most a unit of the 8-bit step and of the 8-bit offset.
    spread = (keys.max(2) - keys.min(2)) / (2**bits - 1)
    slack = spread.max(2, keepdims=True) / 100 + np.abs(keys.min(2)).max(2, keepdims=True) / 100
    assert (step <= spread + slack).all()


@pytest.mark.parametrize("value", [0.0, 3.5, -7.25])
def test_constant_keys_are_held_without_loss_and_without_nan(value: float) -> None:
    keys = np.full((2, HEADS, 16, 20), value, np.float32)
    digest = built("2bit", keys)
    assert isinstance(digest, CodedDigest)
    np.testing.assert_allclose(digest.decode(0, np.arange(2))[0], keys, rtol=1e-6)


def test_boxes_of_keys_beyond_float16_stay_finite() -> None:
    keys = np.full((2, HEADS, 16, 16), 1e6, np.float32)
    tile = TileQuery(np.full((HEADS * GROUP, 1, 16), 1e-4, np.float32), 32, 1.0, None, None)
    assert np.isfinite(estimate(built("minmax", keys), 0, np.arange(2), tile, np.arange(2) * 16)).all()


def test_very_large_scores_do_not_overflow() -> None:
    rng = np.random.default_rng(6)
    keys = random_keys(rng, 5, 16, 16) * 100
    tile = random_tile(rng, 3, 16, start=80)
    got = estimate(built("2bit", keys), 0, np.arange(5), tile, np.arange(5) * 16)
    np.testing.assert_allclose(got.sum(1), GROUP * 3, rtol=1e-5)


@pytest.mark.parametrize(("kind", "limit"), [("2bit", 400), ("minmax", 400), ("mean-dev", 400), ("submeans", 400)])
def test_bytes_a_page_at_page_size_16_and_head_dim_64(kind: str, limit: int) -> None:
    digest = make_digest(kind, 4, HEADS, 64, 16)
    assert digest.page_bytes <= limit
    assert digest.nbytes == 0
    digest.grow(10)
    assert digest.nbytes == 10 * 4 * HEADS * digest.page_bytes


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_two_bit_keys_take_under_a_tenth_of_a_bfloat16_page(head_dim: int) -> None:
    assert make_digest("2bit", 1, 1, head_dim, 16).page_bytes < 0.1 * (2 * 16 * head_dim * 2)


def test_growing_keeps_what_is_held_and_adds_at_least_an_eighth() -> None:
    rng = np.random.default_rng(7)
    keys = random_keys(rng, 80, 16, 16)
    digest, tile = built("2bit", keys), random_tile(rng, 1, 16, start=1280)
    before = estimate(digest, 0, np.arange(80), tile, np.arange(80) * 16)
    digest.grow(81)
    assert digest.capacity == 90
    digest.grow(50)
    assert digest.capacity == 90
    np.testing.assert_array_equal(estimate(digest, 0, np.arange(80), tile, np.arange(80) * 16), before)


@pytest.mark.parametrize("tokens", [1, 64])
@pytest.mark.parametrize("kind", DIGESTS)
@pytest.mark.promise(1)
def test_estimate_does_not_depend_on_where_rows_lie(kind: str, tokens: int) -> None:
    rng = np.random.default_rng(8)
    keys = random_keys(rng, 40, 16, 24)
    tile, starts = random_tile(rng, tokens, 24, start=640), np.arange(40) * 16
    expected = estimate(built(kind, keys), 0, np.arange(40), tile, starts)
    scattered = make_digest(kind, 2, HEADS, 24, 16)
    scattered.grow(100)
    rows = rng.permutation(100)[:40]
    for part in np.array_split(np.arange(40), 7):  # built in other batches, in another layer; the rest never
        scattered.build(1, rows[part], keys[part])
    np.testing.assert_array_equal(estimate(scattered, 1, rows, tile, starts), expected)


@pytest.mark.parametrize("kind", DIGESTS)
def test_rows_that_were_dumped_and_loaded_elsewhere_give_the_same_estimate_to_the_bit(kind: str) -> None:
    rng = np.random.default_rng(11)
    held, other = (make_digest(kind, 2, HEADS, 21, 16) for _ in range(2))
    rows, starts = rng.permutation(50)[:40], np.arange(40) * 16
    held.grow(40)
    other.grow(50)
    keys = random_keys(rng, 40, 16, 21), random_keys(rng, 40, 16, 21)
    for layer in range(2):
        held.build(layer, np.arange(40), keys[layer])
    digests = held.dump(np.arange(40))
    assert digests.dtype == np.uint8
    assert digests.shape == (40, 2 * HEADS * held.page_bytes)
    other.load(rows, digests)
    tile = random_tile(rng, 3, 21, start=640)
    for layer in range(2):
        expected = estimate(held, layer, np.arange(40), tile, starts)
        np.testing.assert_array_equal(estimate(other, layer, rows, tile, starts), expected)
    np.testing.assert_array_equal(other.dump(rows), digests)
    assert other.dump(rows[:0]).shape == (0, digests.shape[1])


def test_each_kind_of_digest_has_a_name_for_its_bytes() -> None:
    assert len({make_digest(kind, 1, HEADS, 16, 16).kind for kind in DIGESTS}) == len(DIGESTS)


def test_digests_of_another_size_are_refused() -> None:
    digest = make_digest("2bit", 1, HEADS, 16, 16)
    digest.grow(2)
    with pytest.raises(InputError, match=r"digests: \[2, 7\] bytes are not the \[2, "):
        digest.load(np.arange(2), np.zeros((2, 7), np.uint8))


@pytest.mark.parametrize("kind", DIGESTS)
def test_slabs_change_only_rounding_and_bound_scratch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(9)
    keys = random_keys(rng, 77, 16, 16)
    tile, starts = random_tile(rng, 32, 16, start=77 * 16, window=900), np.arange(77) * 16
    whole = estimate(built(kind, keys), 0, np.arange(77), tile, starts)
    monkeypatch.setattr(digest_module, "SLAB_FLOATS", 1 << 12)
    digest = built(kind, keys)
    np.testing.assert_allclose(estimate(digest, 0, np.arange(77), tile, starts), whole, rtol=1e-4, atol=1e-6)
    small = digest.scratch_nbytes
    for _ in range(3):
        estimate(digest, 0, np.tile(np.arange(77), 4), tile, np.tile(starts, 4))
    assert digest.scratch_nbytes == small


def test_no_candidates_give_no_mass() -> None:
    digest = make_digest("2bit", 1, HEADS, 16, 16)
    empty = np.zeros(0, np.int64)
    assert estimate(digest, 0, empty, random_tile(np.random.default_rng(0), 1, 16, 0), empty).shape == (HEADS, 0)


def test_an_unknown_kind_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'3bit' is not one of 2bit"):
        make_digest("3bit", 1, 1, 16, 16)


def test_each_query_head_of_a_group_looks_from_other_positions() -> None:
    member, token = looks(group=3, tokens=12, sample=4)
    assert member.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert token.tolist() == [3, 7, 11, 2, 6, 10, 1, 5, 9]


@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("tokens", [1, 2, 5, 64])
@pytest.mark.parametrize("sample", [1, 2, 3, 7, 100])
def test_every_query_head_looks_and_the_last_query_always_takes_part(group: int, tokens: int, sample: int) -> None:
    member, token = looks(group, tokens, sample)
    assert set(member.tolist()) == set(range(group))
    assert token[member == 0].max() == tokens - 1
    assert token.min() >= 0
    for one in range(group):
        assert (np.diff(token[member == one]) == sample).all()
        assert tokens // sample <= (member == one).sum() + 1
    if sample == 1:
        assert token.tolist() == list(range(tokens)) * group


@pytest.mark.parametrize("kind", ["2bit", "minmax"])
def test_a_sampled_query_sees_what_it_sees_among_all(kind: str) -> None:
    rng = np.random.default_rng(10)
    digest = built(kind, random_keys(rng, 20, 16, 24))
    tile, starts = random_tile(rng, 30, 24, start=320, window=150, cap=3.0), np.arange(20) * 16
    own = rng.normal(size=(HEADS * GROUP, 30)).astype(np.float32)
    member, token = looks(GROUP, 30, 4)
    every = digest.shares(0, np.arange(20), tile, starts, own)
    some = digest.shares(0, np.arange(20), tile, starts, own, 4)
    np.testing.assert_allclose(some, every[:, :, member * 30 + token], rtol=1e-5, atol=1e-7)
