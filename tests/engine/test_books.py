"""Whatever happens in whatever order: books balance, each token comes once, and memory stays flat."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpager import PagerConfig
from kvpager.engine.engine import Engine, EngineConfig
from kvpager.engine.params import SamplingParams
from tests.engine import rig
from tests.engine.rig import SMALL, Answers, greedy, oracle, prompt, run


@pytest.mark.promise(3)
def test_requests_that_share_and_part_leave_balanced_books() -> None:  # BUGS.md, G16
    draw = random.Random(0)
    shared = prompt(64, seed=0)
    with rig.engine(pager=replace(SMALL, pool=60)) as engine:
        for turn in range(60):
            for n in range(5):
                engine.add(str(n), shared + prompt(draw.randint(1, 20), seed=n), greedy(draw.randint(1, 12)))
            answers = Answers()
            while engine.has_work:
                answers.take(engine.step())
                if draw.random() < 0.15:
                    engine.abort(str(draw.randrange(5)))
            engine.check()
            assert len(answers.last) == 5, turn
            stats = engine.stats().pager
            assert (stats.sequences, stats.tokens) == (0, 0)
            assert 0 <= stats.frames_used <= stats.cached_blocks * 4


@pytest.mark.promise(3)
def test_when_all_are_cancelled_nothing_runs_and_nothing_is_held() -> None:  # BUGS.md, G18
    with rig.engine(enable_prefix_caching=False) as engine:
        for n in range(20):
            engine.add(str(n), prompt(30, seed=n), greedy(50))
        for _ in range(3):
            engine.step()
        for n in range(20):
            assert engine.abort(str(n))
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.preempted, stats.pager.frames_used) == (0, 0, 0, 0)
        assert stats.finished == {"abort": 20}
        assert len([output for output in engine.step() if output.finish_reason == "abort"]) == 20
        assert not engine.has_work
        assert engine.step() == []


@pytest.mark.promise(1)
def test_answers_hold_nothing_of_other_requests() -> None:  # BUGS.md, G19
    draw = random.Random(1)
    prompts = {str(n): prompt(draw.randint(5, 60), seed=100 + n) for n in range(16)}
    with rig.engine(pager=PagerConfig(pool=60, group_pages=4), max_num_seqs=8) as engine:
        for _ in range(4):
            names = list(prompts)
            draw.shuffle(names)
            answers = Answers()
            for name in names:
                engine.add(name, prompts[name], greedy(10))
                if draw.random() < 0.5:
                    answers.take(engine.step())
            run(engine, answers)
            for name, ids in prompts.items():
                assert answers[name] == oracle(ids, 10)


class Histories(RuleBasedStateMachine):
    """Requests come, go, are aborted and run out of time on a pool nearly too small; each prompt is one of few."""

    config: PagerConfig = PagerConfig(pool=28, group_pages=4, prefix_tokens=64)

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        settings_ = EngineConfig(max_num_seqs=3, max_num_batched_tokens=19, max_queue=6, max_model_len=96)
        self.engine = Engine(rig.loaded(), replace(self.config, tile=16), settings_, clock=lambda: self.now)
        self.answers = Answers()
        self.requests: dict[str, tuple[list[int], SamplingParams]] = {}

    @precondition(lambda self: self.engine.stats().waiting < 6)
    @rule(
        length=strategies.sampled_from([1, 15, 16, 17, 40, 64]),
        seed=strategies.integers(0, 1),
        most=strategies.integers(1, 24),
        n=strategies.integers(1, 2),
        priority=strategies.integers(0, 2),
        time=strategies.sampled_from([None, 3.0]),
        salt=strategies.sampled_from([b"", b"a"]),
    )
    def add(self, length: int, seed: int, most: int, n: int, priority: int, time: float | None, salt: bytes) -> None:
        name = str(len(self.requests))
        ids, params = prompt(64, seed)[:length], greedy(most, n=n)
        self.requests[name] = (ids, params)
        deadline = None if time is None else self.now + time
        self.engine.add(name, ids, params, priority=priority, deadline=deadline, salt=salt)

    @precondition(lambda self: self.engine.has_work)
    @rule(times=strategies.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.now += 0.25
            self.answers.take(self.engine.step())

    @precondition(lambda self: self.requests)
    @rule(which=strategies.integers(0, 100))
    def abort(self, which: int) -> None:
        name = str(which % len(self.requests))
        ended = all((name, index) in self.answers.last for index in range(self.requests[name][1].n))
        assert not (self.engine.abort(name) and ended)
        assert not self.engine.abort(name)

    @invariant()
    def balanced(self) -> None:
        self.engine.check()

    def teardown(self) -> None:
        run(self.engine, self.answers, 2000)
        self.engine.check()
        assert self.engine.stats().pager.sequences == 0
        for name, (ids, params) in self.requests.items():
            for index in range(params.n):
                tokens, last = self.answers.tokens[name, index], self.answers.last[name, index]
                expected = oracle(ids, params.max_tokens or 0)
                assert last.finish_reason in ("length", "abort", "deadline")
                assert tokens == (expected if last.finish_reason == "length" else expected[: len(tokens)])
        self.engine.close()


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=8, stateful_step_count=16, deadline=None)
TestHistories = pytest.mark.promise(3)(TestHistories)


@pytest.mark.slow
def test_ten_thousand_requests_leave_memory_as_it_was() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    draw = random.Random(2)
    with rig.engine(pager=PagerConfig(pool=400, group_pages=8)) as engine:
        done = added = 0
        before = 0
        while done < 10_000:
            while added < 10_000 and added - done < 24:
                ids = prompt(draw.randint(1, 24), seed=draw.randrange(400))
                engine.add(str(added), ids, greedy(draw.randint(1, 4)))
                added += 1
                if draw.random() < 0.05:
                    engine.abort(str(draw.randrange(max(0, added - 24), added)))
            done += sum(output.finish_reason is not None for output in engine.step())
            if not before and done > 1000:
                before = resident()
        assert resident() < before * 1.02
        engine.check()
        stats = engine.stats()
        assert sum(stats.finished.values()) == 10_000
        assert 300 < stats.finished["abort"] < 700
