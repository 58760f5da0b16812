"""An answer that was cut short goes on when it is asked for again, and is the one that it would have been."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvpager.engine.engine import Engine, EngineConfig
from kvpager.engine.params import SamplingParams
from tests.engine import rig
from tests.engine.rig import SMALL, Answers, greedy, oracle, prompt, run
from tests.engine.talk import BUDGETS, SAID, Talk, drawn, usage
from tests.memory_store import MemoryStore


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("end", ["abort", "deadline", "close"])
@pytest.mark.parametrize("steps", [2, 5, 20])
def test_an_answer_that_was_cut_short_goes_on_when_it_is_asked_for_again(
    steps: int, end: str, budget: int | None
) -> None:
    pager = replace(SMALL, budget=budget)
    first = Talk(MemoryStore(), pager, restarts=True).turns(SAID[:1], drawn())
    ids = [*first.ids, *SAID[1]]
    undisturbed = Talk(first.store, pager, restarts=True)
    undisturbed.store = _copy(first.store)
    with undisturbed.engine() as engine:
        engine.add("whole", ids, drawn(40, stop=["never"]), session="talk")
        whole = run(engine)
    now = [0.0]
    store = first.store.reopened()
    config = EngineConfig(max_num_batched_tokens=80)
    cut = Engine(rig.loaded(), pager, config, store=store, clock=lambda: now[0])
    cut.add("first", ids, drawn(40, stop=["never"]), session="talk", deadline=1.0)
    answers = Answers()
    for _ in range(steps):
        answers.take(cut.step())
    now[0] = 2.0 * (end == "deadline")
    if end == "abort":
        cut.abort("first")
    if end != "close":
        answers.take(cut.step())
        assert answers.reason("first") == end
    cut.close()
    said = answers.tokens.get(("first", 0), [])
    with rig.engine(pager=pager, store=store.reopened()) as engine:
        engine.add("again", ids, drawn(40, stop=["never"]), session="talk")
        outputs = engine.step()
        if said:
            assert list(outputs[0].token_ids) == said  # at once, before anything is computed
            assert sum(len(one.token_ids) for one in outputs) <= len(said) + 1
        again = Answers()
        again.take(outputs)
        run(engine, again)
        assert usage(again, "again").cached_tokens >= (len(ids) if said else len(first.ids) - 1)
    assert again["again"] == whole["whole"]
    assert again.text["again", 0] == whole.text["whole", 0]


def _copy(store: MemoryStore) -> MemoryStore:
    shelf = replace(store.shelf, blocks=dict(store.shelf.blocks), records=dict(store.shelf.records), claims={})
    return MemoryStore(shelf)


def cut_short(store: MemoryStore, ids: list[int], params: SamplingParams, steps: int = 12, **more: Any) -> list[int]:
    """Begin a request and leave it; the tokens that it gave."""
    with rig.engine(store=store, **more) as engine:
        engine.add("left", ids, params, session="talk")
        answers = Answers()
        for _ in range(steps):
            answers.take(engine.step())
        engine.abort("left")
        answers.take(engine.step())
    return answers["left"]


@pytest.mark.parametrize("change", ["params", "prompt", "budget", "model"])
def test_another_request_does_not_go_on_with_an_answer_that_was_cut_short(change: str) -> None:
    store, ids = MemoryStore(), prompt(100, seed=1)
    cut_short(store, ids, greedy(40))
    params = greedy(41) if change == "params" else greedy(40)
    other = [*ids, 5] if change == "prompt" else ids
    pager = replace(SMALL, budget=1024 if change == "budget" else None)
    pager = replace(pager, namespace="another" if change == "model" else "")
    with rig.engine(pager=pager, store=store.reopened()) as engine:
        engine.add("other", other, params, session="talk")
        answers = run(engine)
        assert max(len(output.token_ids) for output in answers.outputs) == 1
        assert usage(answers, "other").cached_tokens == (0 if change == "model" else 64)


def test_log_probabilities_of_an_answer_that_was_cut_short_come_with_the_whole_answer() -> None:
    params = drawn(40, logprobs=2)
    store, ids = MemoryStore(), prompt(100, seed=1)
    with rig.engine(store=MemoryStore()) as engine:
        engine.add("whole", ids, params, session="talk")
        whole = run(engine)
    said = cut_short(store, ids, params)
    assert said == whole["whole"][: len(said)]
    with rig.engine(store=store.reopened()) as engine:
        engine.add("again", ids, params, session="talk")
        again = run(engine)
    assert again["again"] == whole["whole"]
    told = [[one for output in answers.outputs for one in output.logprobs or ()] for answers in (whole, again)]
    assert [(one.token_id, len(one.top)) for one in told[0]] == [(one.token_id, len(one.top)) for one in told[1]]
    assert [one.logprob for one in told[0]] == pytest.approx([one.logprob for one in told[1]], abs=1e-4)


def test_an_answer_that_keeps_to_a_schema_goes_on_inside_it() -> None:
    pytest.importorskip("llguidance")
    params = drawn(60, json_schema={"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]})
    store, ids = MemoryStore(), prompt(40, seed=1)
    with rig.engine(store=MemoryStore()) as engine:
        engine.add("whole", ids, params, session="talk")
        whole = run(engine)
    said = cut_short(store, ids, params)
    assert said
    with rig.engine(store=store.reopened()) as engine:
        engine.add("again", ids, params, session="talk")
        again = run(engine)
    assert list(again.outputs[0].token_ids) == said
    assert again["again"] == whole["whole"]


@pytest.mark.promise(4)
def test_an_answer_that_was_cut_short_goes_on_where_its_blocks_are_gone() -> None:
    store, ids = MemoryStore(), prompt(100, seed=1)
    said = cut_short(store, ids, drawn(40))
    store.shelf.blocks.clear()
    with rig.engine(store=MemoryStore()) as engine:
        engine.add("whole", ids, drawn(40), session="talk")
        whole = run(engine)
    with rig.engine(store=store.reopened()) as engine:
        engine.add("again", ids, drawn(40), session="talk")
        answers = run(engine)
        assert answers["again"] == whole["whole"]
        assert list(answers.outputs[0].token_ids) == said
        assert engine.stats().sessions.lost == 1


def test_a_parked_request_is_saved_as_well() -> None:
    store, ids = MemoryStore(), prompt(100, seed=1)
    with rig.engine(store=store, max_num_seqs=1) as engine:
        engine.add("low", ids, greedy(30), priority=1, session="talk")
        answers = Answers()
        for _ in range(10):
            answers.take(engine.step())
        engine.add("high", prompt(30, seed=2), greedy(10))
        answers.take(engine.step())
        assert engine.stats().preempted == 1
        engine.abort("low")
        run(engine, answers)
    said = answers["low"]
    with rig.engine(store=store.reopened()) as engine:
        engine.add("low", ids, greedy(30), session="talk")
        again = run(engine)
        assert list(again.outputs[0].token_ids) == said
        assert again["low"] == oracle(ids, 30)
