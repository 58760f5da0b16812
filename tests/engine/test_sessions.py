"""A session goes on where it was left, whatever came between: the answers are those of an engine that never stopped."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpager import PagerConfig
from kvpager.core.blocks import tenant
from kvpager.errors import InputError, SessionBusy
from kvpager.stored import StoredBlock
from tests.engine import rig
from tests.engine.rig import SMALL, Answers, greedy, oracle, prompt, run
from tests.engine.talk import BUDGETS, SAID, TIGHT, Talk, drawn, usage
from tests.memory_store import MemoryStore


@pytest.mark.promise(1)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("pager", [SMALL, TIGHT], ids=["roomy", "tight"])
def test_a_session_goes_on_after_a_restart_as_if_there_had_been_none(pager: PagerConfig, budget: int | None) -> None:
    params = drawn(33, logprobs=2)
    pager = replace(pager, budget=budget)
    going, stopped = (Talk(MemoryStore(), pager, restarts).turns(SAID, params) for restarts in (False, True))
    assert stopped.ids == going.ids
    assert stopped.logprobs == going.logprobs  # bit for bit
    assert stopped.scores == going.scores  # and so are the next victims
    # all but the last token of an answer, which was drawn and not read, goes on
    assert stopped.cached == going.cached == [0, 150 + 32, 150 + 33 + 50 + 32, 150 + 33 + 50 + 33 + 77 + 32]


def test_a_sessions_answers_are_those_of_the_model() -> None:
    talk = Talk(MemoryStore(), TIGHT, restarts=True).turns(SAID, greedy(20))
    at = 0
    for words in SAID:
        at += len(words)
        assert talk.ids[at : at + 20] == oracle(talk.ids[:at], 20)
        at += 20


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_text_that_changed_goes_on_from_the_last_common_tile(budget: int | None) -> None:
    pager = replace(SMALL, budget=budget)
    talk = Talk(MemoryStore(), pager, restarts=True).turns(SAID[:2], greedy(30))
    ids = [*talk.ids[:210], talk.ids[210] ^ 1, *prompt(20, seed=9)]
    with talk.engine() as engine:
        engine.add("other", ids, greedy(20), session="talk")
        answers = run(engine)
        assert usage(answers, "other").cached_tokens == 192
        if budget is None:
            assert answers["other"] == oracle(ids, 20)
        engine.add("same", ids, greedy(20), session="talk")  # complete, so it is asked for anew
        assert run(engine)["same"] == answers["other"]
        assert engine.stats().sessions.saved == 2


def test_a_session_has_one_writer_here_and_elsewhere() -> None:
    store = MemoryStore()
    ids = prompt(40, seed=1)
    with rig.engine(store=store) as engine, rig.engine(store=store.reopened()) as other:
        engine.add("one", ids, greedy(5), session="talk")
        for second in (engine, other):
            with pytest.raises(SessionBusy, match="session: another request is using it"):
                second.add("two", ids, greedy(5), session="talk")
            with pytest.raises(SessionBusy):
                second.forget_session(b"", "talk")
        assert engine.stats().sessions.held == 1
        assert not other.has_work
        other.add("elsewhere", ids, greedy(5), session="other talk")
        other.add("tenant", ids, greedy(5), session="talk", salt=b"tenant")
        run(engine)
        other.add("two", [*ids, 9], greedy(5), session="talk")  # the first has ended
        answers = run(other)
        assert usage(answers, "two").cached_tokens == 32
        assert engine.stats().sessions.held == other.stats().sessions.held == 0
    assert not store.shelf.claims


def test_a_request_that_is_refused_leaves_its_session_free() -> None:
    store = MemoryStore()
    with rig.engine(store=store) as engine:
        for params in (greedy(5, n=2), greedy(5, prompt_logprobs=1), greedy(10**6)):
            with pytest.raises(InputError):
                engine.add("one", prompt(40), params, session="talk")
        for name in ("", "x" * 129, "a\nb"):
            with pytest.raises(InputError, match="session"):
                engine.add("one", prompt(40), greedy(5), session=name)
        assert not store.shelf.claims
        assert not engine.has_work


def test_without_a_store_there_are_no_sessions() -> None:
    with rig.engine() as engine:
        with pytest.raises(InputError, match="session: there is no store"):
            engine.add("one", prompt(40), greedy(5), session="talk")
        with pytest.raises(InputError, match="session: there is no store"):
            engine.forget_session(b"", "talk")
        assert not engine.has_work
        assert engine.stats().store is None


@pytest.mark.promise(5)
def test_another_tenants_session_of_the_same_name_is_another() -> None:
    store, ids = MemoryStore(), prompt(100, seed=1)
    with rig.engine(store=store) as engine:
        for name, salt, cached in (("a", b"a", 0), ("b", b"b", 0), ("c", b"", 0), ("d", b"a", 96)):
            engine.add(name, ids, greedy(5), session="talk", salt=salt)
            answers = run(engine)
            assert usage(answers, name).cached_tokens == cached or name == "d"
            assert answers[name] == oracle(ids, 5)
        assert usage(answers, "d").cached_tokens == 64  # its own, up to a tile
    assert len(store.shelf.records) == 3


def test_a_forgotten_session_begins_anew() -> None:
    talk = Talk(MemoryStore(), replace(SMALL, budget=64), restarts=True).turns(SAID[:1], greedy(30))
    with talk.engine() as engine:
        assert engine.forget_session(b"", "talk")
        assert not engine.forget_session(b"", "talk")
        engine.add("next", [*talk.ids, 5], greedy(5), session="talk")
        assert usage(run(engine), "next").cached_tokens == 128  # as any prompt that begins like an earlier one


@pytest.mark.promise(5)
def test_what_a_tenant_erases_is_gone_from_pool_and_store_and_others_keep_theirs() -> None:
    store, ids = MemoryStore(), prompt(100, seed=1)
    with rig.engine(store=store) as engine:
        for salt in (b"a", b"b"):
            engine.add(salt.decode(), ids, greedy(5), session="talk", salt=salt)
        run(engine)
        engine.add("running", ids, greedy(50), session="other", salt=b"a")
        answers = Answers()
        answers.take(engine.step())
        assert engine.erase(b"a").wait() == 7  # six blocks and a session
        assert engine.erase(b"a").wait() == 0
        assert run(engine, answers)["running"] == oracle(ids, 50)
        assert {block.head.depth for block in blocks_of(store, b"a")} <= {6, 7, 8}  # computed since
        assert len(store.shelf.records) == 1  # what ran is not saved
        for name, salt, cached in (("c", b"a", 0), ("d", b"b", 96)):
            engine.add(name, ids, greedy(5), salt=salt)
            assert usage(run(engine), name).cached_tokens == cached


def blocks_of(store: MemoryStore, salt: bytes) -> list[StoredBlock]:
    return [block for block in store.shelf.blocks.values() if block.head.tenant == tenant(salt)]


@pytest.mark.promise(2)
def test_what_was_computed_under_a_budget_is_no_part_of_an_exact_answer() -> None:
    talk = Talk(MemoryStore(), replace(SMALL, budget=64), restarts=True).turns(SAID[:2], greedy(20))
    talk.pager = SMALL
    talk.turns([SAID[3]], greedy(20))
    assert talk.ids[-20:] == oracle(talk.ids[:-20], 20)
    assert talk.cached[-1] < 200


def test_a_session_that_has_its_beginning_does_not_wait_for_another_to_compute_it() -> None:
    pager = replace(SMALL, budget=64)
    talk = Talk(MemoryStore(), pager, restarts=True).turns(SAID[:1], greedy(150))
    answers = Answers()
    with rig.engine(pager=pager, store=talk.store.reopened(), max_num_batched_tokens=80) as engine:
        engine.add("long", [*talk.ids, *prompt(100, seed=9)], greedy(5), priority=1)
        answers.take(engine.step())
        engine.add("talk", [*talk.ids, 5], greedy(5), session="talk")
        answers.take(engine.step())
        assert len(answers["talk"]) == 1
        run(engine, answers)
