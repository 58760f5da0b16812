"""Little memory, priorities, broken swap: everyone still gets each token once, and nobody waits for ever."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvpager import PagerConfig
from kvpager.engine.engine import Engine
from kvpager.errors import PageLost, SwapFull
from tests.engine import rig
from tests.engine.rig import SMALL, Answers, greedy, oracle, prompt, run

BLOCK = 4  # pages of a block of the tiny Llama: 2 layers of 2 KV heads
GROUP = 4


def blocks(count: int) -> PagerConfig:
    """A pool of `count` blocks and a group."""
    return replace(SMALL, pool=count * BLOCK + GROUP)


@pytest.mark.promise(1)
@pytest.mark.parametrize("budget", [None, 64])
def test_the_pool_changes_no_answer(budget: int | None) -> None:
    prompts = {str(length): prompt(length, seed=length) for length in (5, 90, 130, 200)}
    found = []
    for pool in (4096, 5 * BLOCK + GROUP):
        pager = replace(SMALL, pool=pool, budget=budget)
        with rig.engine(pager=pager) as engine:
            for name, ids in prompts.items():
                engine.add(name, ids, greedy(40))
            answers = run(engine)
            found.append([answers[name] for name in prompts])
            recalls = engine.stats().pager.recalls
        if budget is None:
            assert found[-1] == [oracle(ids, 40) for ids in prompts.values()]
    assert found[0] == found[1]
    assert recalls > 0


def test_two_requests_on_a_pool_for_one_and_a_half_finish_with_each_token_once() -> None:  # BUGS.md, G15
    prompts = {"one": prompt(5, seed=1), "two": prompt(5, seed=2)}
    with rig.engine(pager=blocks(3)) as engine:
        for name, ids in prompts.items():
            engine.add(name, ids, greedy(100))
        answers = Answers()
        while engine.has_work:
            answers.take(engine.step())
            engine.check()
    for name, ids in prompts.items():
        assert answers[name] == oracle(ids, 100)
        assert answers.last[name, 0].usage.completion_tokens == 100  # type: ignore[union-attr]


def test_a_prompt_larger_than_the_pool_does_not_block_short_ones() -> None:  # BUGS.md, G13
    with rig.engine(pager=PagerConfig(pool=8 * BLOCK, group_pages=4), max_model_len=512) as engine:
        prompts = {"long": prompt(300, seed=1), **{str(n): prompt(20, seed=n) for n in (2, 3, 4)}}
        for name, ids in prompts.items():
            engine.add(name, ids, greedy(20))
        answers = run(engine)
    for name, ids in prompts.items():
        assert answers[name] == oracle(ids, 20)


def test_twelve_requests_on_a_small_pool_all_finish() -> None:  # BUGS.md, G14
    shared = prompt(32, seed=0)
    with rig.engine(pager=PagerConfig(pool=8 * BLOCK, group_pages=4)) as engine:
        prompts = {str(n): (shared if n % 2 else []) + prompt(60 - 32 * (n % 2), seed=n) for n in range(12)}
        for name, ids in prompts.items():
            engine.add(name, ids, greedy(60))
        answers = Answers()
        idle = 0
        while engine.has_work:
            answers.take(engine.step())
            stats = engine.stats()
            idle = idle + 1 if not stats.running and stats.waiting else 0
            assert idle <= 1
        assert all(output.usage.preemptions <= 2 for output in answers.last.values() if output.usage)
    for name, ids in prompts.items():
        assert answers[name] == oracle(ids, 60)


@pytest.mark.parametrize("mode", ["recall", "discard"])
def test_a_higher_priority_takes_the_place_of_a_lower_one_which_goes_on_later(mode: Any) -> None:
    low, high = prompt(40, seed=1), prompt(30, seed=2)
    pager = replace(SMALL, mode=mode, budget=1024 if mode == "discard" else None)
    with rig.engine(pager=pager, max_num_seqs=1) as engine:
        engine.add("low", low, greedy(30), priority=1)
        answers = Answers()
        for _ in range(10):
            answers.take(engine.step())
        tiles = engine.stats().pager.tiles
        engine.add("high", high, greedy(10), priority=0)
        engine.add("equal", high, greedy(2), priority=1)
        answers.take(engine.step())
        assert (engine.stats().running, engine.stats().preempted) == (1, 1)
        engine.check()
        run(engine, answers)
        if mode == "recall":  # nothing was computed again: a tile a layer for each token, and for each chunk of prompt
            assert engine.stats().pager.tiles - tiles == 2 * (20 + 10 + 2)
    assert answers["low"] == oracle(low, 30)
    assert answers["high"] == oracle(high, 10)
    assert answers.last["low", 0].usage.preemptions == 1  # type: ignore[union-attr]
    ends = [output.request_id for output in answers.outputs if output.finish_reason]
    assert ends == ["high", "low", "equal"]


def test_a_parked_request_goes_on_where_a_higher_priority_waits_for_what_it_holds() -> None:  # BUGS.md, G14
    """Parked, it still counts against max_tokens; each of the two waited for the other, for ever."""
    with rig.engine(pager=replace(SMALL, max_tokens=200), max_num_seqs=1) as engine:
        engine.add("low", prompt(60, seed=1), greedy(60), priority=1)
        answers = Answers()
        for _ in range(5):
            answers.take(engine.step())
        engine.add("high", prompt(40, seed=2), greedy(20))
        answers.take(engine.step())
        assert engine.stats().preempted == 1
        engine.add("large", prompt(100, seed=3), greedy(50))
        run(engine, answers, steps=300)
    assert answers["low"] == oracle(prompt(60, seed=1), 60)
    assert answers["high"] == oracle(prompt(40, seed=2), 20)
    assert answers["large"] == oracle(prompt(100, seed=3), 50)


def test_a_request_is_parked_before_its_first_token_and_with_several_answers() -> None:
    long, many = prompt(200, seed=1), prompt(20, seed=2)
    with rig.engine(max_num_seqs=3, max_num_batched_tokens=67) as engine:
        engine.add("long", long, greedy(5), priority=2)
        engine.step()
        engine.add("many", many, greedy(25, n=3), priority=1)
        answers = Answers()
        for _ in range(9):
            answers.take(engine.step())
        assert answers.tokens["many", 2]
        engine.add("first", [1, 2, 3], greedy(5, n=3))
        answers.take(engine.step())
        assert engine.stats().preempted == 2
        run(engine, answers)
    assert answers["long"] == oracle(long, 5)
    for index in range(3):
        assert answers.tokens["many", index] == oracle(many, 25)
        assert answers.tokens["first", index] == oracle([1, 2, 3], 5)


def test_a_parked_request_can_be_aborted_and_its_deadline_holds() -> None:
    now = [0.0]
    with rig.engine(max_num_seqs=1, clock=lambda: now[0]) as engine:
        for name in ("aborted", "late"):
            engine.add(name, prompt(20), greedy(50), priority=9, deadline=1.0)
            engine.step()
            engine.add("first" + name, prompt(10), greedy(50))
            engine.step()
            assert engine.stats().preempted == 1
            if name == "aborted":
                assert engine.abort(name)
            else:
                now[0] = 2.0
            outputs = [output for output in engine.step() if output.request_id == name]
            assert [output.finish_reason for output in outputs] == ["abort" if name == "aborted" else "deadline"]
            engine.check()
            engine.abort("first" + name)


class _Damaged:
    """Damages what swap holds: the next so many reads find pages that differ from what was written."""

    def __init__(self, engine: Engine, times: int, which: int = 0) -> None:
        swap = engine.pager._state.swap
        assert swap is not None
        self.left, self.read, self.which = times, swap.read, which
        self.rows: set[int] = set()
        swap.read = self  # type: ignore[method-assign]

    def __call__(self, slots: Any, *into: Any) -> Any:
        if self.left:
            self.left -= 1
            bad = np.asarray(slots)[self.which : self.which + 1].tolist()
            raise PageLost(f"swap slots {bad} differ from what was written (checksum)", bad)
        return self.read(slots, *into)


@pytest.mark.promise(4)
@pytest.mark.parametrize("budget", [None, 64])
@pytest.mark.parametrize("at", [3, 30])
def test_a_lost_page_is_computed_again_and_no_token_is_given_twice(at: int, budget: int | None) -> None:
    prompts = {str(length): prompt(length, seed=length) for length in (150, 100, 60)}
    pager = replace(blocks(5), budget=budget)
    with rig.engine(pager=replace(pager, pool=4096)) as engine:
        for name, ids in prompts.items():
            engine.add(name, ids, greedy(50))
        whole = run(engine)
    with rig.engine(pager=pager) as engine:
        for name, ids in prompts.items():
            engine.add(name, ids, greedy(50))
        answers = Answers()
        for _ in range(at):
            answers.take(engine.step())
        _Damaged(engine, 1)
        run(engine, answers)
        assert 1 <= engine.stats().replays <= 2
    for name in prompts:
        assert answers[name] == whole[name]
        assert answers.reason(name) == "length"


def test_pages_that_are_lost_again_and_again_end_their_request_alone() -> None:
    prompts = {"victim": prompt(150, seed=1), "short": prompt(5, seed=2)}
    with rig.engine(pager=blocks(4)) as engine:
        for name, ids in prompts.items():
            engine.add(name, ids, greedy(8))  # of the short one no page ever fills
        _Damaged(engine, 1000)
        answers = run(engine)
        assert "pages were lost 4 times" in str(answers.last["victim", 0].error)
        assert answers["short"] == oracle(prompts["short"], 8)


def test_a_shared_page_that_is_lost_is_computed_again_for_all_who_hold_it() -> None:
    shared = prompt(96, seed=1)
    prompts = {str(n): shared + prompt(10, seed=n) for n in range(3)}
    with rig.engine(pager=blocks(5)) as engine:
        for name, ids in prompts.items():
            engine.add(name, ids, greedy(30))
        answers = Answers()
        for _ in range(8):
            answers.take(engine.step())
        _Damaged(engine, 1)
        run(engine, answers)
        assert engine.stats().replays == 3
    for name, ids in prompts.items():
        assert answers[name] == oracle(ids, 30)


def test_a_parked_sequence_whose_open_page_is_lost_is_computed_again() -> None:
    low = prompt(40, seed=1)
    with rig.engine(max_num_seqs=1) as engine:
        engine.add("low", low, greedy(30), priority=1)
        answers = Answers()
        for _ in range(10):
            answers.take(engine.step())
        engine.add("high", prompt(5), greedy(3))
        answers.take(engine.step())
        _Damaged(engine, 1)
        run(engine, answers)
        assert engine.stats().replays == 1
    assert answers["low"] == oracle(low, 30)


def _full(*_: Any) -> Any:
    raise SwapFull("swap is full")


@pytest.mark.promise(4)
def test_when_swap_takes_no_more_the_last_one_makes_way_and_all_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = {str(n): prompt(60, seed=n) for n in range(4)}
    with rig.engine(pager=blocks(9)) as engine:  # one of them fits without swap, with an answer of 60 tokens
        monkeypatch.setattr(engine.pager._state.swap, "write", _full)
        for name, ids in prompts.items():
            engine.add(name, ids, greedy(60))
        answers = Answers()
        while engine.has_work:
            answers.take(engine.step())
            engine.check()
        assert engine.stats().preemptions > 0
    for name, ids in prompts.items():
        assert answers[name] == oracle(ids, 60)


@pytest.mark.promise(4)
def test_a_request_that_needs_swap_ends_with_an_error_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with rig.engine(pager=blocks(9)) as engine:
        monkeypatch.setattr(engine.pager._state.swap, "write", _full)
        engine.add("long", prompt(200, seed=1), greedy(10))
        engine.add("short", prompt(20, seed=2), greedy(10))
        answers = run(engine)
    assert answers.reason("long") == "error"
    assert "swap is full" in str(answers.last["long", 0].error)
    assert answers["short"] == oracle(prompt(20, seed=2), 10)


def test_swaps_limit_bounds_what_is_admitted() -> None:
    pager = replace(blocks(9), swap_limit=60 * rig_page_bytes())
    with rig.engine(pager=pager) as engine:
        prompts = {str(n): prompt(90, seed=n) for n in range(4)}
        for name, ids in prompts.items():
            engine.add(name, ids, greedy(20))
        answers = Answers()
        most = 0
        while engine.has_work:
            answers.take(engine.step())
            most = max(most, engine.stats().running)
        assert most == 2  # 7 blocks of 4 pages each
        assert engine.stats().preemptions == 0
    for name, ids in prompts.items():
        assert answers[name] == oracle(ids, 20)


def rig_page_bytes() -> int:
    with rig.engine() as engine:
        return engine.pager.shape.page_bytes(16)


def test_max_tokens_bounds_what_is_admitted() -> None:
    with rig.engine(pager=replace(SMALL, max_tokens=200)) as engine:
        for n in range(5):
            engine.add(str(n), prompt(60, seed=n), greedy(20))
        answers = Answers()
        most = 0
        while engine.has_work:
            answers.take(engine.step())
            most = max(most, engine.stats().pager.tokens)
        assert 130 < most <= 200
    assert all(output.finish_reason == "length" for output in answers.last.values())
