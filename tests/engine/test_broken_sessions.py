"""Sessions where something breaks: answers are right, and what was saved before stays."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from kvpager.engine.engine import Engine
from kvpager.errors import PageLost
from tests.engine import rig
from tests.engine.rig import SMALL, Answers, greedy, oracle, prompt, run
from tests.engine.talk import SAID, TIGHT, Talk, drawn
from tests.memory_store import MemoryStore


@pytest.mark.promise(4)
@pytest.mark.parametrize("max_tokens", [1, 30])
@pytest.mark.parametrize("restarts", [False, True])
def test_pages_that_are_lost_in_a_later_turn_are_computed_anew_in_the_order_of_the_first_time(
    monkeypatch: pytest.MonkeyPatch, restarts: bool, max_tokens: int
) -> None:
    pager = replace(SMALL, budget=64)
    whole = Talk(MemoryStore(), pager, restarts).turns(SAID, drawn(max_tokens))
    talk = Talk(MemoryStore(), pager, restarts).turns(SAID[:3], drawn(max_tokens))
    with talk.engine() as engine:
        forward, failed = engine._runner._ragged.forward, []

        def failing(sequences: Any, tokens: Any, keep: Any) -> Any:
            if not failed:
                failed.append(len(tokens[0]))
                error = PageLost("a page is gone")
                error.sequences = (sequences[0].id,)
                raise error
            return forward(sequences, tokens, keep)

        monkeypatch.setattr(engine._runner._ragged, "forward", failing)
        talk.turn(engine, SAID[3], drawn(max_tokens))
        assert engine.stats().replays == 1
    assert failed == [6]
    assert talk.ids == whole.ids


@pytest.mark.promise(4)
@pytest.mark.parametrize("broken", ["store", "record", "blocks", "model"])
def test_where_a_session_cannot_be_read_its_request_begins_anew(broken: str) -> None:
    store = MemoryStore()
    talk = Talk(store, SMALL, restarts=True).turns(SAID[:1], greedy(20))
    pager = SMALL
    if broken == "record":
        key, (whose, data) = next(iter(store.shelf.records.items()))
        store.shelf.records[key] = (whose, data[:-9])
    elif broken == "blocks":
        for key in list(store.shelf.blocks):
            store.damage(key)
    elif broken == "model":
        pager = replace(SMALL, namespace="another")
    ids = [*talk.ids, *SAID[1]]
    again = store.reopened()
    again.broken = broken == "store"
    with rig.engine(pager=pager, store=again) as engine:
        engine.add("next", ids, greedy(20), session="talk")
        answers = run(engine)
        assert answers["next"] == oracle(ids, 20)
        lost = engine.stats().sessions.lost
    assert lost >= (broken != "blocks")


def test_a_request_that_failed_leaves_the_session_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    talk = Talk(MemoryStore(), SMALL, restarts=True).turns(SAID[:1], greedy(20))
    before = dict(talk.store.shelf.records)
    with talk.engine() as engine:
        monkeypatch.setattr(engine._runner, "run", _failing)
        engine.add("next", [*talk.ids, 5], greedy(5), session="talk")
        assert run(engine).reason("next") == "error"
    assert talk.store.shelf.records == before
    assert not talk.store.shelf.claims


def _failing(entries: Any) -> Any:
    raise RuntimeError("the model failed")


def test_a_step_that_was_broken_off_saves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    for how in ("abort", "close"):
        engine = Engine(rig.loaded(), SMALL, store=store.reopened())
        engine.add("one", prompt(40), greedy(20), session="talk")
        engine.step()
        with monkeypatch.context() as patch:
            patch.setattr(engine._runner, "run", _broken_off)
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        if how == "abort":
            engine.abort("one")
        engine.close()
    assert not store.shelf.records


def _broken_off(entries: Any) -> Any:
    raise KeyboardInterrupt


def test_an_engine_that_is_whole_after_a_failed_step_saves_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    with rig.engine(store=store) as engine:
        engine.add("one", prompt(40), greedy(20), session="talk")
        with monkeypatch.context() as patch:
            patch.setattr(engine._scheduler, "schedule", _failing)
            with pytest.raises(RuntimeError):
                engine.step()
        engine.check()
        engine.step()
        engine.abort("one")
    assert len(store.shelf.records) == 1


def test_a_request_that_never_began_leaves_the_session_as_it_was() -> None:
    talk = Talk(MemoryStore(), SMALL, restarts=True).turns(SAID[:1], greedy(20))
    before = dict(talk.store.shelf.records)
    with talk.engine() as engine:
        engine.add("next", [*talk.ids, 5], greedy(5), session="talk")
        engine.abort("next")
        run(engine)
        assert engine.stats().sessions.held == 0
    assert talk.store.shelf.records == before


@pytest.mark.promise(1)
@pytest.mark.parametrize("seed", range(6))
def test_random_conversations_with_random_ends_are_answered_as_by_the_model(seed: int) -> None:
    """Three sessions on a small pool: requests are aborted, engines closed, blocks lost; each answer is the model's."""
    draw = random.Random(seed)
    store = MemoryStore()
    texts: dict[str, list[int]] = {name: [] for name in "abc"}
    asked: dict[str, list[int]] = {}
    done = 0
    for _ in range(8):
        with rig.engine(pager=TIGHT, store=store, max_num_batched_tokens=80) as engine:
            for turn in range(draw.randint(1, 4)):
                names = draw.sample("abc", draw.randint(1, 3))
                for name in names:
                    if name not in asked or draw.random() < 0.2:  # what was cut short is mostly asked for again
                        asked[name] = texts[name] + prompt(draw.randint(1, 70), seed=draw.randrange(1000))
                    engine.add(f"{turn}{name}", asked[name], greedy(12), session=name)
                answers = Answers()
                for _ in range(draw.choice([3, 9, 1000])):
                    answers.take(engine.step() if engine.has_work else [])
                for name in draw.sample(names, draw.randint(0, len(names))):
                    engine.abort(f"{turn}{name}")
                closes = draw.random() < 0.3
                if not closes:
                    run(engine, answers)
                for name in names:
                    given = answers.tokens.get((f"{turn}{name}", 0), [])
                    assert given == oracle(asked[name], 12)[: len(given)]
                    if len(given) == 12:
                        texts[name] = asked.pop(name) + given
                        done += 1
                if closes:
                    break
        for key in draw.sample(sorted(store.shelf.blocks), len(store.shelf.blocks) // 10):
            store.damage(key)
        store = store.reopened()
    assert done > 5
