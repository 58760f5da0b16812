"""Compiled digests against the core's, over every instruction set that runs here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpager.core.digest import Digest as CoreDigest
from kvpager.core.digest import make_digest
from kvpager.errors import InputError
from kvpager.ports import Choice, Digest, Room, TileQuery

_native = pytest.importorskip("kvpager._native", reason="the compiled kernels are not built here")

from kvpager.kernels import native_digest  # noqa: E402

Floats = npt.NDArray[np.float32]
ROOM = Room(pages=8, sinks=1, recent=2)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    isa, threads = _native.isa(), _native.threads()
    yield
    _native.set_isa(isa)
    _native.set_threads(max(threads, 1))


@dataclass(frozen=True)
class Case:
    keys: Floats  # [n, H, P, D]
    tile: TileQuery
    own: Floats
    sample: int = 1

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        return np.arange(len(self.keys)) * self.keys.shape[2]

    def native(self, rows: npt.NDArray[np.int64] | None = None) -> native_digest.NativeDigest:
        """Built digests of layer 1."""
        _, heads, page_size, head_dim = self.keys.shape
        digest = native_digest.make("2bit", 2, heads, head_dim, page_size, self.sample)
        assert digest is not None
        rows = np.arange(len(self.keys)) if rows is None else rows
        digest.grow(int(rows.max()) + 1)
        digest.build(1, rows, self.keys)
        return digest

    def reference(self) -> CoreDigest:
        _, heads, page_size, head_dim = self.keys.shape
        digest = make_digest("2bit", 2, heads, head_dim, page_size, self.sample)
        digest.grow(len(self.keys))
        digest.build(1, np.arange(len(self.keys)), self.keys)
        return digest

    def choose(self, digest: Digest, room: Room = ROOM, rows: npt.NDArray[np.int64] | None = None) -> Choice:
        rows = np.arange(len(self.keys)) if rows is None else rows
        return digest.choose(1, rows, self.tile, self.starts, self.own, room)


def lifelike(
    seed: int,
    pages: int = 60,
    heads: int = 3,
    group: int = 3,
    page_size: int = 16,
    head_dim: int = 64,
    tokens: int = 1,
    sample: int = 1,
    window: int | None = None,
    softcap: float | None = None,
) -> Case:
    """Keys whose channels differ much in size and offset, as rotated keys do."""
    rng = np.random.default_rng(seed)
    size, offset = np.exp(rng.normal(size=head_dim)), 2 * rng.normal(size=head_dim)
    keys = (rng.normal(size=(pages, heads, page_size, head_dim)) * size + offset).astype(np.float32)
    queries = rng.normal(size=(heads * group, tokens, head_dim)).astype(np.float32)
    tile = TileQuery(queries, pages * page_size, head_dim**-0.5, window, softcap)
    own = rng.normal(size=(heads * group, tokens)).astype(np.float32) + 3
    return Case(keys, tile, own, sample)


def exact(
    seed: int,
    pages: int,
    heads: int,
    group: int,
    page_size: int,
    head_dim: int,
    tokens: int,
    sample: int,
    window: int | None,
    softcap: float | None,
) -> Case:
    """Keys and queries that lose nothing in 2 and 8 bits, so that only the exponential's rounding is left."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 4, size=(pages, heads, page_size, head_dim))
    codes[:, :, 0], codes[:, :, 1] = 0, 3
    steps = 3 * rng.integers(1, 86, size=(pages, heads, 1, head_dim))
    offsets = rng.integers(-127, 128, size=(pages, heads, 1, head_dim))
    steps[..., 0], offsets[..., 0] = 255, -127
    keys = (offsets / 8 + codes * steps / 64).astype(np.float32)
    queries = rng.integers(-127, 128, size=(heads * group, tokens, head_dim))
    queries[..., 0] = 127
    tile = TileQuery(queries.astype(np.float32), pages * page_size, float(0.004 * head_dim**-0.5), window, softcap)
    own = rng.normal(size=(heads * group, tokens)).astype(np.float32) + 2
    return Case(keys, tile, own, sample)


def assert_consistent(choice: Choice, room: Room) -> None:
    """The budget is met, what is chosen has a ratio of 1 or more, and nothing that is left out has."""
    heads, pages = choice.chosen.shape
    assert choice.chosen.dtype == np.bool_
    assert choice.ratio.dtype == np.float32
    assert choice.chosen.sum() == heads * min(room.pages, pages)
    assert choice.chosen[:, pages - min(room.recent, pages) :].all()
    assert choice.chosen[:, : max(room.sinks - room.first_block, 0)].all()
    assert (choice.ratio[choice.chosen] >= 1).all()
    if room.pages > room.sinks + room.recent:
        assert (choice.ratio[~choice.chosen] <= 1).all()
    assert 0 <= choice.missed < 1.0001


@pytest.mark.parametrize("isa", _native.isas())
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_without_rounding_it_chooses_as_the_core_does(isa: str, data: st.DataObject) -> None:
    _native.set_isa(isa)
    _native.set_threads(data.draw(st.sampled_from([1, 2, 3])))
    page_size = data.draw(st.sampled_from([8, 16, 32]), "page_size")
    pages = data.draw(st.integers(1, 50), "pages")
    case = exact(
        data.draw(st.integers(0, 1000), "seed"),
        pages,
        heads=data.draw(st.integers(1, 3), "heads"),
        group=data.draw(st.integers(1, 5), "group"),
        page_size=page_size,
        head_dim=8 * data.draw(st.sampled_from([1, 2, 3, 5, 8, 12, 32]), "head_dim / 8"),
        tokens=data.draw(st.sampled_from([1, 2, 3, 8, 13]), "tokens"),
        sample=data.draw(st.integers(1, 5), "sample"),
        window=data.draw(st.none() | st.integers(1, 60 * page_size), "window"),
        softcap=data.draw(st.none() | st.sampled_from([2.0, 30.0]), "softcap"),
    )
    room = Room(data.draw(st.integers(4, 40), "room"), sinks=2, recent=2, first_block=data.draw(st.integers(0, 2)))
    got, expected = case.choose(case.native(), room), case.choose(case.reference(), room)
    assert_consistent(got, room)
    np.testing.assert_allclose(got.ratio, expected.ratio, rtol=2e-3, atol=1e-5)
    assert got.missed == pytest.approx(expected.missed, rel=2e-3, abs=2e-6)
    unsure = np.abs(expected.ratio - 1) < 2e-3
    np.testing.assert_array_equal((got.chosen == expected.chosen) | unsure, True)


@pytest.mark.parametrize("isa", _native.isas())
@pytest.mark.parametrize("tokens", [1, 64])
@pytest.mark.parametrize(("page_size", "head_dim"), [(16, 64), (8, 64), (32, 128), (16, 24)])
def test_on_lifelike_keys_the_choice_is_nearly_the_core_s(isa: str, tokens: int, page_size: int, head_dim: int) -> None:
    _native.set_isa(isa)
    case = lifelike(1, 100, page_size=page_size, head_dim=head_dim, tokens=tokens, sample=4)
    room = Room(25, 1, 2)
    got, expected = case.choose(case.native(), room), case.choose(case.reference(), room)
    assert_consistent(got, room)
    assert (got.chosen & expected.chosen).sum() >= 0.95 * expected.chosen.sum()  # many are near the threshold here
    assert got.missed == pytest.approx(expected.missed, rel=0.01)
    # The mass that the core's exact arithmetic ascribes to what was chosen.
    shares = case.reference().shares(1, np.arange(100), case.tile, case.starts, case.own, 4).sum(axis=2).T
    assert shares[got.chosen].sum() >= 0.995 * shares[expected.chosen].sum()


@pytest.mark.parametrize("isa", _native.isas())
@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.promise(1)
def test_a_choice_is_the_same_to_the_bit_wherever_rows_lie_and_for_any_number_of_threads(isa: str, tokens: int) -> None:
    _native.set_isa(isa)
    case = lifelike(2, 150, tokens=tokens, sample=2)
    _native.set_threads(1)
    expected = case.choose(case.native())
    scattered = np.random.default_rng(0).permutation(70_000)[:150]
    for threads in (1, 2, 5):
        _native.set_threads(max(threads, 1))
        got = case.choose(case.native(scattered), rows=scattered)
        np.testing.assert_array_equal(got.chosen, expected.chosen)
        np.testing.assert_array_equal(got.ratio, expected.ratio)
        assert got.missed == expected.missed


@pytest.mark.parametrize(("page_size", "head_dim"), [(16, 64), (8, 24), (32, 128)])
def test_rows_that_were_dumped_and_loaded_elsewhere_give_the_same_choice_to_the_bit(
    page_size: int, head_dim: int
) -> None:
    case = lifelike(13, 150, page_size=page_size, head_dim=head_dim, tokens=5)
    held = case.native()
    expected, digests = case.choose(held), held.dump(np.arange(150))
    assert digests.dtype == np.uint8
    assert digests.shape == (150, 2 * 3 * held.page_bytes)
    other = native_digest.make("2bit", 2, 3, head_dim, page_size, 1)
    assert other is not None
    assert other.kind == held.kind
    rows = np.random.default_rng(0).permutation(1000)[:150]
    other.grow(1000)
    other.load(rows, digests)
    got = case.choose(other, rows=rows)
    np.testing.assert_array_equal(got.chosen, expected.chosen)
    np.testing.assert_array_equal(got.ratio, expected.ratio)
    assert got.missed == expected.missed
    np.testing.assert_array_equal(other.dump(rows[::-1]), digests[::-1])
    assert other.dump(rows[:0]).shape == (0, digests.shape[1])


def test_digests_of_the_core_and_of_the_kernel_are_told_apart() -> None:
    case = lifelike(13, 2)
    assert case.native().kind != case.reference().kind


@pytest.mark.parametrize("isa", _native.isas())
def test_what_an_earlier_call_left_in_scratch_changes_nothing(isa: str) -> None:
    _native.set_isa(isa)
    case, digest = lifelike(3, 45, tokens=5), lifelike(3, 45, tokens=5).native()
    expected = case.choose(case.native())
    poison = TileQuery(np.full((9, 64, 64), np.nan, np.float32), 720, 0.125, None, None)
    digest.choose(1, np.arange(45), poison, case.starts, np.full((9, 64), np.nan, np.float32), ROOM)
    got = case.choose(digest)
    np.testing.assert_array_equal(got.chosen, expected.chosen)
    np.testing.assert_array_equal(got.ratio, expected.ratio)


def test_rows_can_be_built_in_other_batches_and_keep_when_the_store_grows() -> None:
    case = lifelike(4, 50)
    expected = case.choose(case.native())
    digest = native_digest.make("2bit", 2, 3, 64, 16, 1)
    assert digest is not None
    for part in np.array_split(np.arange(50), 7):
        digest.grow(int(part.max()) + 1)
        digest.build(1, part, case.keys[part])
    np.testing.assert_array_equal(case.choose(digest).ratio, expected.ratio)


def test_queries_may_be_a_slice_of_a_longer_forward() -> None:
    case = lifelike(5, 30, tokens=8)
    longer = np.full((9, 40, 64), np.nan, np.float32)
    longer[:, 16:24] = case.tile.queries
    sliced = TileQuery(longer[:, 16:24], case.tile.start, case.tile.scale, None, None)
    got = case.native().choose(1, np.arange(30), sliced, case.starts, case.own, ROOM)
    np.testing.assert_array_equal(got.ratio, case.choose(case.native()).ratio)


@pytest.mark.parametrize("isa", _native.isas())
def test_between_equals_the_earlier_block_wins_then_the_lower_head(isa: str) -> None:
    _native.set_isa(isa)
    case = lifelike(6, 40)
    alike = Case(np.broadcast_to(case.keys[:1, :1], case.keys.shape).copy(), case.tile, case.own)
    alike.tile.queries[:] = case.tile.queries[:1]
    alike.own[:] = 3
    for pages in (3, 5, 8, 39, 40):
        got, expected = (alike.choose(digest, Room(pages, 1, 2)) for digest in (alike.native(), alike.reference()))
        np.testing.assert_array_equal(got.chosen, expected.chosen)


@pytest.mark.parametrize("pages", [1, 2, 3])
def test_fewer_candidates_than_room_are_all_in(pages: int) -> None:
    case = lifelike(7, pages)
    got = case.choose(case.native(), Room(6, 1, 2))
    assert got.chosen.all()
    assert got.missed == 0


def test_no_candidates_give_an_empty_choice() -> None:
    case = lifelike(7, 1)
    nothing = np.zeros(0, np.int64)
    got = case.native().choose(1, nothing, case.tile, nothing, case.own, ROOM)
    assert got.chosen.shape == got.ratio.shape == (3, 0)
    assert got.missed == 0


def test_very_large_scores_do_not_overflow() -> None:
    case = lifelike(8, 30)
    large = Case(case.keys * 1000, case.tile, case.own)
    got = large.choose(large.native())
    assert np.isfinite(got.ratio).all()
    assert_consistent(got, ROOM)


def test_keys_and_queries_that_are_not_numbers_break_nothing() -> None:
    case = lifelike(9, 30)
    case.keys[3, 0, 2, 5], case.keys[7, 1, 2, 5], case.tile.queries[1, 0, 3] = np.nan, np.inf, np.nan
    assert case.choose(case.native()).chosen.shape == (3, 30)


@pytest.mark.parametrize(("page_size", "head_dim"), [(16, 64), (16, 128), (32, 64), (32, 256)])
def test_a_digest_takes_under_a_tenth_of_a_bfloat16_page(page_size: int, head_dim: int) -> None:
    digest = native_digest.make("2bit", 3, 2, head_dim, page_size, 1)
    assert digest is not None
    assert digest.page_bytes < 0.1 * (2 * page_size * head_dim * 2)
    assert digest.page_bytes == make_digest("2bit", 3, 2, head_dim, page_size).page_bytes
    assert digest.nbytes == 0
    digest.grow(10)
    assert digest.nbytes == 10 * 3 * 2 * digest.page_bytes
    digest.grow(11)
    assert digest.nbytes == 11 * 3 * 2 * digest.page_bytes
    digest.grow(5)
    assert digest.nbytes == 11 * 3 * 2 * digest.page_bytes


def test_kept_scratch_is_bounded() -> None:
    case = lifelike(10, 2000, tokens=64)
    digest = case.native()
    case.choose(digest)
    assert digest.scratch_nbytes <= 8 * 2**20


@pytest.mark.parametrize(("kind", "head_dim"), [("4bit", 64), ("minmax", 64), ("2bit", 20), ("2bit", 264), ("2bit", 4)])
def test_what_only_the_core_has_is_left_to_it(kind: str, head_dim: int) -> None:
    assert native_digest.make(kind, 1, 1, head_dim, 16, 1) is None


def test_a_budget_below_the_protected_pages_is_refused() -> None:
    case = lifelike(11, 30)
    with pytest.raises(InputError, match="a budget of 2 a KV head is less than its 3 protected"):
        case.choose(case.native(), Room(2, 1, 2))


def test_wrong_arguments_are_refused_by_name() -> None:
    case = lifelike(12, 30)
    digest = case.native()
    with pytest.raises(ValueError, match="rows: 30 is not below 30"):
        digest.build(0, np.array([30]), case.keys[:1])
    with pytest.raises(ValueError, match="rows: -1"):
        case.choose(digest, rows=np.full(30, -1))
    with pytest.raises(ValueError, match=r"layer: 2 is not in 0\.\.1"):
        digest.build(2, np.array([0]), case.keys[:1])
    with pytest.raises(ValueError, match="keys: axis 3 has 32 entries, not 64"):
        digest.build(0, np.array([0]), case.keys[:1, :, :, :32])
    with pytest.raises(ValueError, match="rows: 31 is not below 30"):
        digest.dump(np.array([3, 31]))
    with pytest.raises(ValueError, match=r"digests: not \[rows, 2352\]"):
        digest.load(np.arange(2), np.zeros((2, 2351), np.uint8))
    with pytest.raises(ValueError, match="digests: not"):
        digest.load(np.arange(3), np.zeros((2, 2352), np.uint8))
    with pytest.raises(ValueError, match="starts: not one for each"):
        digest.choose(1, np.arange(30), case.tile, case.starts[:9], case.own, ROOM)
    with pytest.raises(ValueError, match="own_lse: not one for each"):
        digest.choose(1, np.arange(30), case.tile, case.starts, case.own[:3], ROOM)
    wide = TileQuery(case.tile.queries[:, :, :32], 480, 1.0, None, None)
    with pytest.raises(ValueError, match="queries: not head_dim"):
        digest.choose(1, np.arange(30), wide, case.starts, case.own, ROOM)
    with pytest.raises(ValueError, match="page_size: 12 is not 8, 16 or 32"):
        _native.DigestStore(1, 1, 64, 12)
    with pytest.raises(ValueError, match="head_dim: 20 is not a multiple of 8"):
        _native.DigestStore(1, 1, 20, 16)


def test_time_is_counted_from_the_beginning() -> None:
    case = lifelike(1)
    digest = case.native()
    built = digest.seconds
    assert built >= 0
    case.choose(digest)
    spent = digest.seconds
    assert spent > built
    case.choose(digest)
    assert digest.seconds > spent
