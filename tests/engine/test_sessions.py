"""A session goes on where it was left, whatever came between: the answers are those of an engine that never stopped."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from kvpager import PagerConfig
from kvpager.core.blocks import tenant
from kvpager.engine.engine import Engine, EngineConfig
from kvpager.engine.outputs import TokenLogprob
from kvpager.engine.params import SamplingParams
from kvpager.errors import InputError, PageLost, SessionBusy
from kvpager.stored import StoredBlock
from tests.engine import rig
from tests.engine.rig import SMALL, Answers, greedy, oracle, prompt, run
from tests.memory_store import MemoryStore

TIGHT = replace(SMALL, pool=6 * 4 + 4)  # six blocks and a group
BUDGETS = [None, 64]


def drawn(max_tokens: int = 30, **more: Any) -> SamplingParams:
    """Tokens left to chance, from the seed that the session has."""
    return SamplingParams(max_tokens=max_tokens, **more)


class Talk:
    """A conversation of one session: what is said and answered, in one engine or a new one for each turn."""

    def __init__(self, store: MemoryStore, pager: PagerConfig, restarts: bool) -> None:
        self.store, self.pager, self.restarts = store, pager, restarts
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.scores: list[Any] = []
        self.cached: list[int] = []
        self._turns = 0

    def turns(self, said: list[list[int]], params: SamplingParams) -> Talk:
        """Say and be answered."""
        if self.restarts:
            for words in said:
                with self.engine() as engine:
                    self._turn(engine, words, params)
        else:
            with self.engine() as engine:
                for words in said:
                    self._turn(engine, words, params)
        return self

    @contextmanager
    def engine(self) -> Iterator[Engine]:
        """One over the same shelf."""
        self.store = self.store.reopened()
        with rig.engine(pager=self.pager, store=self.store) as engine:
            yield engine

    def _turn(self, engine: Engine, words: list[int], params: SamplingParams) -> None:
        self.ids += words
        name = str(self._turns)
        self._turns += 1
        engine.add(name, self.ids, params, session="talk")
        answers = Answers()
        while engine.has_work:
            choice = engine._answers.requests[name].choices[0]
            if choice.sequence is not None and len(choice.output) == (params.max_tokens or 0) - 1:
                self.scores.append([scores(engine, choice.sequence, layer) for layer in range(2)])
            answers.take(engine.step())
        self.ids += answers[name]
        self.logprobs += [one for output in answers.outputs for one in output.logprobs or ()]
        self.cached.append(usage(answers, name).cached_tokens)


def scores(engine: Engine, sequence: Any, layer: int) -> list[tuple[int, int, float]]:
    """A layer's pages in the order in which they would leave, could they all."""
    found = [(one.score, one.block, one.kv_head) for one in engine.pager.scores(sequence, layer)]
    return [(block, head, score) for score, block, head in sorted(found)]


def usage(answers: Answers, name: str) -> Any:
    return answers.last[name, 0].usage


SAID = [prompt(150, seed=1), prompt(50, seed=2), prompt(77, seed=3), prompt(5, seed=4)]


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
        talk._turn(engine, SAID[3], drawn(max_tokens))
        assert engine.stats().replays == 1
    assert failed == [6]
    assert talk.ids == whole.ids


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


@pytest.mark.parametrize("change", ["params", "prompt", "budget"])
def test_another_request_does_not_go_on_with_an_answer_that_was_cut_short(change: str) -> None:
    store, ids = MemoryStore(), prompt(100, seed=1)
    cut_short(store, ids, greedy(40))
    params = greedy(41) if change == "params" else greedy(40)
    other = [*ids, 5] if change == "prompt" else ids
    pager = replace(SMALL, budget=1024) if change == "budget" else SMALL
    with rig.engine(pager=pager, store=store.reopened()) as engine:
        engine.add("other", other, params, session="talk")
        answers = run(engine)
        assert max(len(output.token_ids) for output in answers.outputs) == 1
        assert usage(answers, "other").cached_tokens == 64


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


# -- one writer


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


# -- forgetting


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
        assert engine.erase(b"a") == 7  # six blocks and a session
        assert engine.erase(b"a") == 0
        assert run(engine, answers)["running"] == oracle(ids, 50)
        assert {block.head.depth for block in blocks_of(store, b"a")} <= {6, 7, 8}  # computed since
        assert len(store.shelf.records) == 1  # what ran is not saved
        for name, salt, cached in (("c", b"a", 0), ("d", b"b", 96)):
            engine.add(name, ids, greedy(5), salt=salt)
            assert usage(run(engine), name).cached_tokens == cached


def blocks_of(store: MemoryStore, salt: bytes) -> list[StoredBlock]:
    return [block for block in store.shelf.blocks.values() if block.head.tenant == tenant(salt)]


# -- what breaks


@pytest.mark.promise(2)
def test_what_was_computed_under_a_budget_is_no_part_of_an_exact_answer() -> None:
    talk = Talk(MemoryStore(), replace(SMALL, budget=64), restarts=True).turns(SAID[:2], greedy(20))
    talk.pager = SMALL
    talk.turns([SAID[3]], greedy(20))
    assert talk.ids[-20:] == oracle(talk.ids[:-20], 20)
    assert talk.cached[-1] < 200


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


# -- beside others


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
