"""Who gets how many tokens in a step."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from kvpager.engine.engine import Engine
from tests.engine import rig
from tests.engine.rig import SMALL, Answers, greedy, oracle, prompt, run


class Watched:
    """An engine whose forwards are remembered: (request, start, count) of each entry."""

    def __init__(self, engine: Engine) -> None:
        self.steps: list[list[tuple[str, int, int]]] = []
        schedule = engine._scheduler.schedule

        def watching(now: float) -> Any:
            entries = schedule(now)
            self.steps.append([(one.choice.request.id, one.start, one.tokens) for one in entries])
            return entries

        engine._scheduler.schedule = watching  # type: ignore[method-assign]


@pytest.mark.parametrize("budget", [80, 200])
def test_a_long_prompt_never_holds_up_running_answers(budget: int) -> None:
    with rig.engine(max_num_seqs=16, max_num_batched_tokens=budget) as engine:
        for n in range(4):
            engine.add(str(n), prompt(10 + n, seed=n), greedy(40))
        answers = Answers()
        answers.take(engine.step())
        watched = Watched(engine)
        engine.add("long", prompt(900, seed=9), greedy(5))
        while engine.stats().finished.get("length", 0) < 4:
            outputs = engine.step()
            answers.take(outputs)
            assert {output.request_id for output in outputs} >= {"0", "1", "2", "3"}  # a token each, every step
        run(engine, answers)
        for entries in watched.steps:
            assert sum(count for _, _, count in entries) <= budget
        assert answers["long"] == oracle(prompt(900, seed=9), 5)


@pytest.mark.parametrize("budget", [20, 33, 50])
def test_chunks_of_prompts_end_at_tiles_whatever_the_load(budget: int) -> None:
    pager = replace(SMALL, tile=16)
    with rig.engine(pager=pager, max_num_seqs=4, max_num_batched_tokens=budget) as engine:
        watched = Watched(engine)
        lengths = {str(n): 30 + 37 * n for n in range(5)}
        for name, length in lengths.items():
            engine.add(name, prompt(length, seed=length), greedy(9))
        run(engine)
    done = dict.fromkeys(lengths, 0)
    for entries in watched.steps:
        assert sum(count for _, _, count in entries) <= budget
        for name, start, count in entries:
            assert start == done[name]
            done[name] += count
            if start < lengths[name]:
                assert done[name] % 16 == 0 or done[name] == lengths[name]
            else:
                assert count == 1
    assert done == {name: length + 8 for name, length in lengths.items()}


def test_first_come_first_served_and_lower_priorities_first() -> None:
    with rig.engine(max_num_seqs=1) as engine:
        for name, priority in (("a", 1), ("b", 1), ("c", 0), ("d", 2), ("e", 0)):
            engine.add(name, prompt(5), greedy(2), priority=priority)
        answers = run(engine)
    ends = [output.request_id for output in answers.outputs if output.finish_reason]
    assert ends == ["c", "e", "a", "b", "d"]


def test_where_frames_are_short_everyone_takes_turns() -> None:
    with rig.engine(pager=replace(SMALL, pool=6 * 4 + 4)) as engine:  # five open blocks, and one to go on to
        watched = Watched(engine)
        for n in range(5):
            engine.add(str(n), prompt(16, seed=n), greedy(34))
        answers = run(engine)
    for n in range(5):
        ran = [place for place, entries in enumerate(watched.steps) if str(n) in {name for name, _, _ in entries}]
        assert max(after - before for before, after in pairwise(ran)) <= 5
        assert answers[str(n)] == oracle(prompt(16, seed=n), 34)


def test_a_request_that_does_not_fit_yet_is_not_overtaken() -> None:
    with rig.engine(max_num_seqs=4) as engine:
        engine.add("two", prompt(5), greedy(10, n=2))
        answers = Answers()
        answers.take(engine.step())
        engine.add("three", prompt(6), greedy(2, n=3))
        engine.add("one", prompt(7), greedy(2))
        answers.take(engine.step())
        assert (engine.stats().running, engine.stats().waiting) == (1, 2)
        run(engine, answers)
    counts = {"two": 2, "three": 3, "one": 1}
    assert set(answers.last) == {(name, n) for name, count in counts.items() for n in range(count)}
