"""What contenders attend to: every page once, in the order of a pager's groups, and never one place twice in a row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvpager.bench.cases import Case, Heads
from kvpager.bench.contenders import GROUP_PAGES, Paged, Sdpa, SdpaMemory, groups
from kvpager.bench.layered import Layered
from kvpager.bench.rounds import Runner, play
from kvpager.errors import ConfigError, KVPagerError
from kvpager.kernels.reference import ReferenceKernel
from kvpager.ports import FrameStorage, PageList, Partial, TileQuery

HEADS = Heads(4, 2, 16)


class Watching(ReferenceKernel):
    """Keeps the frames of each call, and can be wrong."""

    def __init__(self, factor: float = 1.0) -> None:
        self.seen: list[np.ndarray[Any, Any]] = []
        self.factor = np.float32(factor)

    def attend(self, storage: FrameStorage, tile: TileQuery, pages: PageList) -> Partial:
        self.seen.append(pages.frames)
        part = super().attend(storage, tile, pages)  # type: ignore[arg-type]
        return part._replace(output=part.output * self.factor)


@pytest.mark.parametrize(("tokens", "tile"), [(1, 1), (16, 1), (17, 1), (100, 1), (100, 64), (64, 64), (9000, 1)])
def test_groups_hold_every_page_once_and_the_own_ones_first(tokens: int, tile: int) -> None:
    case = Case(HEADS, tokens, tile=tile)
    frames = np.random.default_rng(0).permutation(case.pages).reshape(2, case.blocks)
    found = groups(case, frames)
    assert sorted(np.concatenate([group.frames for group in found]).tolist()) == list(range(case.pages))
    own = (tokens - tile) // 16
    assert (found[0].starts >= own * 16).all()
    assert all((group.starts < own * 16).all() for group in found[1:])
    for group in found:
        assert 0 < len(group.frames) <= GROUP_PAGES
        order = group.heads * tokens + group.starts
        assert (np.diff(order) > 0).all()
        assert (group.frames == frames[group.heads, group.starts // 16]).all()
        assert (group.counts == np.minimum(tokens - group.starts, 16)).all()


def test_groups_can_be_of_another_size() -> None:
    case = Case(HEADS, 9000)
    frames = np.arange(case.pages).reshape(2, case.blocks)
    assert [len(group.frames) for group in groups(case, frames, 1000)] == [2, 1000, case.pages - 1002]


def test_places_share_no_frame_and_are_visited_in_turn() -> None:
    kernel = Watching()
    case = Case(HEADS, 100, batch=2)
    paged = Paged(kernel, "reference", HEADS, "bfloat16")
    paged.fill(3 * paged.case_bytes(case))
    places = paged.places(case, 100)
    assert len(places) == 3
    runner = Runner(places)
    play([runner], 1, lambda: None)
    kernel.seen.clear()
    runner.seconds.clear()
    for _ in range(3):
        runner._block(1)
    frames = np.concatenate(kernel.seen)
    assert len(set(frames.tolist())) == len(frames) == 3 * case.pages
    assert len(paged.places(case, 2)) == 2


@pytest.mark.parametrize("tile", [1, 20])
def test_a_layer_in_one_call_gives_what_calls_by_group_give(tile: int) -> None:
    case = Case(HEADS, 100, tile=tile)
    layered = Layered(ReferenceKernel(), "layer", HEADS, "float32", group_pages=3)
    paged = Paged(ReferenceKernel(), "groups", HEADS, "float32")
    rng = np.random.default_rng(0)
    frames = rng.permutation(case.pages).reshape(2, case.blocks)
    storage = ReferenceKernel().storage(case.pages, HEADS.shape("float32"), 16)
    storage.write(frames.ravel(), 0, *rng.standard_normal((2, case.pages, 16, 16), np.float32))
    queries = TileQuery(rng.standard_normal((4, tile, 16), np.float32), 100 - tile, 0.25, None, None)
    outputs = [one._output(case, storage, frames, queries) for one in (layered, paged)]
    np.testing.assert_allclose(outputs[0], outputs[1], atol=1e-5)


def test_a_place_of_several_sequences_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = ReferenceKernel()
    case = Case(HEADS, 100, batch=3)
    layered = Layered(kernel, "layer", HEADS, "bfloat16")
    layered.fill(2 * layered.case_bytes(case))
    calls: list[int] = []
    batch = kernel.batch

    def counted(*args: Any) -> Any:
        calls.append(len(args[1].fields))
        return batch(*args)

    monkeypatch.setattr(kernel, "batch", counted)
    for place in layered.places(case, 100):
        place()
    assert calls == [3, 3]


def test_a_kernel_that_is_wrong_gets_no_row() -> None:
    assert Paged(Watching(), "right", HEADS, "bfloat16").check() < 1e-5
    with pytest.raises(KVPagerError, match=r"wrong \(float32, 4/2x16\) differs from the reference by"):
        Paged(Watching(1.5), "wrong", HEADS, "float32").check()


def test_pytorch_places_hold_finite_numbers_in_both_formats() -> None:
    memory = SdpaMemory()
    memory.fill(2**16)
    case = Case(HEADS, 128, tile=64)
    for name in ("float32", "bfloat16"):
        sdpa = Sdpa(memory, HEADS, name)  # type: ignore[arg-type]
        places = sdpa.places(case, 100)
        assert len(places) == 2**16 // sdpa.case_bytes(case)
        for place in places:
            place()
    assert np.isfinite(memory.data.view(np.float32)).all()
    assert 0.1 < np.abs(memory.data.view(np.float32)).mean() < 10


def test_a_slow_runner_takes_fewer_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpager.bench.rounds.RUNNER_SECONDS", 0.0)
    calls: list[int] = []
    slow = Runner([lambda: calls.append(1)])
    between: list[int] = []
    play([slow], 5, lambda: between.append(1))
    assert len(slow.seconds) == 1
    assert len(between) == 6


def test_a_runner_whose_data_would_stay_in_a_cache_runs_once_a_turn() -> None:
    calls: list[int] = []
    quick = Runner([lambda: calls.append(1)], most_runs=1)
    play([quick], 3, lambda: None)
    assert len(calls) == 2 + 3


def test_a_tile_longer_than_the_sequence_is_refused() -> None:
    with pytest.raises(ConfigError, match="tile: 64 queries are more than 40 tokens"):
        Case(HEADS, 40, tile=64)
