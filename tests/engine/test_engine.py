"""The engine's answers are each request's own, whatever runs beside it; bad requests harm nobody."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvpager import PagerConfig
from kvpager.engine.engine import Engine, EngineConfig
from kvpager.engine.params import SamplingParams
from kvpager.errors import (
    CacheMismatch,
    ConfigError,
    EngineStopped,
    InputError,
    QueueFull,
    RequestTooLarge,
)
from tests.engine import rig
from tests.engine.rig import SMALL, greedy, oracle, prompt, run

LENGTHS = (1, 3, 17, 40, 64, 130)


@pytest.mark.promise(2)
@pytest.mark.parametrize("name", ["llama", "llama-mqa", "llama-h24", "qwen3-sliding", "gemma2"])
def test_a_batch_of_mixed_requests_equals_each_alone(name: str) -> None:
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    for order in (prompts, prompts[::-1]):
        with rig.engine(name) as engine:
            for ids in order:
                engine.add(str(len(ids)), ids, greedy(20))
            answers = run(engine)
        for ids in order:
            assert answers[str(len(ids))] == oracle(ids, 20, name)
            assert answers.reason(str(len(ids))) == "length"


@pytest.mark.parametrize("late", [1, 5, 30])
def test_a_request_that_comes_later_changes_nobodys_answer(late: int) -> None:
    first, second = prompt(90, seed=1), prompt(33, seed=2)
    with rig.engine(max_num_seqs=2, max_num_batched_tokens=66) as engine:
        engine.add("first", first, greedy(40))
        answers = rig.Answers()
        for _ in range(late):
            answers.take(engine.step())
        engine.add("second", second, greedy(40))
        run(engine, answers)
    assert answers["first"] == oracle(first, 40)
    assert answers["second"] == oracle(second, 40)


@pytest.mark.parametrize("mode", ["recall", "discard"])
def test_answers_under_a_budget_do_not_depend_on_what_else_runs(mode: Any) -> None:
    pager = replace(SMALL, budget=64, mode=mode)
    prompts = {str(length): prompt(length, seed=length) for length in (150, 200, 40)}
    alone = {}
    for name, ids in prompts.items():
        with rig.engine(pager=pager, max_num_batched_tokens=512) as engine:
            engine.add(name, ids, greedy(30))
            alone[name] = run(engine)[name]
    assert alone["200"] != oracle(prompts["200"], 30)  # the budget leaves something out
    for tokens in (80, 200):
        with rig.engine(pager=pager, max_num_batched_tokens=tokens, enable_prefix_caching=False) as engine:
            for name, ids in prompts.items():
                engine.add(name, ids, greedy(30))
            answers = run(engine)
        assert {name: answers[name] for name in prompts} == alone


def test_several_answers_share_the_prompt_and_part_after_it() -> None:
    ids = prompt(70, seed=3)
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5, n=3)
    with rig.engine() as engine:
        engine.add("three", ids, params)
        answers = run(engine)
        assert engine.stats().prompt_tokens == 70
        tiles = {answers.last["three", index].usage.pages_attended for index in range(3)}  # type: ignore[union-attr]
        assert len(tiles) == 1  # each counts the prompt, which was computed once
    texts = [answers.tokens["three", index] for index in range(3)]
    assert len({tuple(text) for text in texts}) == 3
    with rig.engine() as engine:
        engine.add("other", prompt(50, seed=9), greedy(30))
        engine.add("three", ids, params)
        again = run(engine)
    assert [again.tokens["three", index] for index in range(3)] == texts


def test_several_greedy_answers_are_one_answer() -> None:
    for length in (15, 16, 17, 64):
        ids = prompt(length, seed=4)
        with rig.engine() as engine:
            engine.add("two", ids, greedy(20, n=2))
            answers = run(engine)
        assert answers.tokens["two", 0] == answers.tokens["two", 1] == oracle(ids, 20)


def test_answers_end_by_token_text_and_length() -> None:
    ids = prompt(20, seed=6)
    expected = oracle(ids, 30)
    place = next(index for index in range(3, 30) if expected[index] not in expected[:index])
    with rig.engine(end_ids=frozenset({expected[place]})) as engine:
        engine.add("end", ids, greedy(30))
        engine.add("on", ids, greedy(30, ignore_eos=True))
        answers = run(engine)
    assert answers["end"] == expected[: place + 1]
    assert answers.reason("end") == "stop"
    assert answers.last["end", 0].stop_reason is None
    assert answers["on"] == expected
    with rig.engine() as engine:
        engine.add("id", ids, greedy(30, stop_token_ids=(expected[place],)))
        engine.add("whole", ids, greedy(30))
        answers = run(engine)
        assert answers["id"] == expected[: place + 1]
        assert answers.last["id", 0].stop_reason == expected[place]
        text = answers.text["whole", 0]
        stop = text[4:7]
        engine.add("text", ids, greedy(30, stop=(stop,)))
        stopped = run(engine)
    assert stopped.text["text", 0] == text[: text.index(stop)]
    assert (stopped.reason("text"), stopped.last["text", 0].stop_reason) == ("stop", stop)


def test_an_answer_without_a_bound_ends_at_the_models_length() -> None:
    ids = prompt(20, seed=7)
    with rig.engine(max_model_len=50) as engine:
        engine.add("long", ids, greedy(None))
        answers = run(engine)
    assert answers["long"] == oracle(ids, 30)
    assert answers.reason("long") == "length"


@pytest.mark.parametrize("times", [1, 2])
def test_usage_counts_each_token_once(times: int) -> None:  # BUGS.md, G23
    ids = prompt(40, seed=8)
    with rig.engine() as engine:
        for _ in range(times - 1):
            engine.add("before", ids, greedy(4))
            run(engine)
        engine.add("one", ids, greedy(12))
        engine.add("three", ids, greedy(12, n=3))
        answers = run(engine)
        stats = engine.stats()
    for key in (("one", 0), ("three", 0), ("three", 1), ("three", 2)):
        usage = answers.last[key].usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (40, 12)
        assert usage.cached_tokens in ((0, 32) if times == 1 else (32,))
        assert 0 <= usage.queue_s <= (usage.first_token_s or -1) <= usage.total_s
        assert usage.estimated_mass_coverage == 1.0
        assert usage.pages_attended > 0
    assert sum(output.usage is not None for output in answers.outputs) == 4
    assert stats.completion_tokens == 12 * 4 + 4 * (times - 1)
    assert stats.prompt_tokens == 40 * (times + 1)


def test_log_probabilities_of_prompt_and_answer() -> None:
    ids = prompt(70, seed=11)
    _, plain = rig.tiny.pair("llama")
    params = greedy(5, logprobs=2, prompt_logprobs=1)
    with rig.engine(max_num_seqs=1, max_num_batched_tokens=65) as engine:
        for _ in range(2):  # the second time the prompt is known, and told all the same
            engine.add("told", ids, params)
            answers = run(engine)
            told = [output.prompt_logprobs for output in answers.outputs if output.prompt_logprobs is not None]
            assert len(told) == 1
            with torch.no_grad():
                logits = plain(input_ids=torch.tensor([ids + answers["told"]])).logits[0].float().log_softmax(-1)
            assert [one.token_id for one in told[0]] == ids[1:]
            for place, one in enumerate(told[0]):
                assert one.logprob == pytest.approx(float(logits[place, ids[place + 1]]), abs=1e-3)
                assert one.top[0][0] == int(logits[place].argmax())
            own = [one for output in answers.outputs for one in output.logprobs or ()]
            assert [one.token_id for one in own] == answers["told"]
            for place, one in enumerate(own):
                assert one.logprob == pytest.approx(float(logits[69 + place].max()), abs=1e-3)
                assert len(one.top) == 2


@pytest.mark.promise(6)
@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([], "prompt: it is empty"),
        ([1, 128], "token id 128 is not in 0..127"),
        ([-1], "token id -1"),
        (["a"], "prompt: expected a list of token ids"),
        (None, "prompt: expected"),
        ([1.5], "prompt: expected"),
    ],
)
def test_a_bad_prompt_is_refused_and_others_go_on(ids: Any, words: str) -> None:  # BUGS.md, G20
    good = prompt(20, seed=12)
    with rig.engine() as engine:
        engine.add("good", good, greedy(10))
        answers = rig.Answers()
        answers.take(engine.step())
        with pytest.raises(InputError, match=words):
            engine.add("bad", ids, greedy(10))
        run(engine, answers)
    assert answers["good"] == oracle(good, 10)


@pytest.mark.promise(6)
def test_bad_arguments_are_named() -> None:
    with rig.engine() as engine:
        engine.add("a", [1], greedy(1))
        for wrong, words in (
            ({"request_id": "a"}, "being served already"),
            ({"request_id": ""}, "request_id"),
            ({"params": None}, "params"),
            ({"params": greedy(1, stop_token_ids=(128,))}, "stop_token_ids"),
            ({"priority": 1.5}, "priority"),
            ({"deadline": "soon"}, "deadline"),
            ({"salt": "text"}, "salt"),
        ):
            arguments: dict[str, Any] = {"request_id": "b", "prompt": [1], "params": greedy(1), **wrong}
            with pytest.raises(InputError, match=words):
                engine.add(**arguments)
        run(engine)


def test_a_full_queue_refuses_and_a_closed_engine_too() -> None:
    with rig.engine(max_queue=2) as engine:
        engine.add("a", [1], greedy(2))
        engine.add("b", [1], greedy(2))
        with pytest.raises(QueueFull, match="2 requests wait"):
            engine.add("c", [1], greedy(2))
        answers = rig.Answers()
        answers.take(engine.step())
        engine.add("c", [1], greedy(2))
        run(engine, answers)
        assert set(answers.last) == {("a", 0), ("b", 0), ("c", 0)}
    engine.close()
    with pytest.raises(EngineStopped):
        engine.add("d", [1], greedy(2))
    with pytest.raises(EngineStopped):
        engine.step()


@pytest.mark.promise(6)
def test_settings_that_cannot_work_are_refused() -> None:
    for settings, words in (
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_batched_tokens": 70, "max_num_seqs": 7}, "max_num_batched_tokens: 70 is less than 71"),
        ({"max_model_len": 2000}, "max_model_len: 2000 is more than the model's own limit, 1024"),
        ({"max_queue": -1}, "max_queue"),
    ):
        with pytest.raises(ConfigError, match=words):
            Engine(rig.loaded(), SMALL, EngineConfig(**settings))
    plain = replace(rig.loaded(), model=rig.tiny.pair("llama")[1])
    with pytest.raises(CacheMismatch, match="eager"):
        Engine(plain, SMALL)


@pytest.mark.promise(6)
def test_what_can_never_fit_is_refused_with_its_size_and_the_limit() -> None:  # BUGS.md, G13
    cases: list[tuple[PagerConfig, dict[str, Any], int, SamplingParams, str]] = [
        (SMALL, {"max_model_len": 512}, 600, greedy(1), "600 tokens.*max_model_len allows 512"),
        (SMALL, {"max_model_len": 512}, 500, greedy(20), "500 tokens and max_tokens 20, together 520.*512"),
        (replace(SMALL, max_tokens=128), {}, 300, greedy(None), "300 tokens.*max_tokens allows 128"),
        (replace(SMALL, max_tokens=128), {}, 20, greedy(60, n=2), "160, and the pager's max_tokens is 128"),
        (replace(SMALL, pool=8), {}, 20, greedy(60), "frames, and the pool has 8"),
        (replace(SMALL, budget=64, mode="discard", pool=30), {}, 100, greedy(4), "frames, and the pool has 30"),
        (SMALL, {"max_num_seqs": 2}, 5, greedy(4, n=3), "n: 3 answers at once, and max_num_seqs is 2"),
    ]
    for pager, settings, length, params, words in cases:
        with rig.engine(pager=pager, **settings) as engine:
            with pytest.raises(RequestTooLarge, match=words):
                engine.add("large", prompt(length), params)
            assert not engine.has_work


def test_the_model_failing_on_one_request_ends_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = {"good": prompt(20, seed=1), "bad": [127] * 5, "fine": prompt(9, seed=2)}
    with rig.engine() as engine:
        forward = engine._runner._ragged.forward

        def failing(sequences: Any, token_ids: Any, keep: Any) -> torch.Tensor:
            if any(ids[0] == 127 and len(ids) == 5 for ids in token_ids):
                raise RuntimeError("a row of NaN")
            return forward(sequences, token_ids, keep)

        monkeypatch.setattr(engine._runner._ragged, "forward", failing)
        for name, ids in prompts.items():
            engine.add(name, ids, greedy(8))
        answers = run(engine)
    assert answers.reason("bad") == "error"
    assert "a row of NaN" in str(answers.last["bad", 0].error)
    for name in ("good", "fine"):
        assert answers[name] == oracle(prompts[name], 8)


def test_aborts_and_deadlines_at_any_moment() -> None:
    now = [0.0]
    ids = prompt(200, seed=1)
    with rig.engine(max_num_seqs=1, max_num_batched_tokens=65, clock=lambda: now[0]) as engine:
        assert not engine.abort("nobody")
        engine.add("prefill", ids, greedy(10))
        engine.add("waiting", ids, greedy(10))
        engine.add("late", ids, greedy(10), deadline=5.0)
        engine.step()
        assert engine.abort("prefill")  # in the middle of its prompt
        assert engine.abort("waiting")
        assert not engine.abort("waiting")
        assert engine.has_work
        answers = rig.Answers()
        for _ in range(6):
            answers.take(engine.step())
        written = len(answers["late"])
        assert 0 < written < 10
        now[0] = 6.0
        run(engine, answers)
        engine.add("gone", ids, greedy(10), deadline=6.0)
        run(engine, answers)
    assert {name: answers.reason(name) for name in ("prefill", "waiting", "late", "gone")} == {
        "prefill": "abort",
        "waiting": "abort",
        "late": "deadline",
        "gone": "deadline",
    }
    assert answers["late"] == oracle(ids, 10)[:written]
