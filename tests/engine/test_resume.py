"""A request that is cut at any step goes on in another engine as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpager.config import DType, PagerConfig
from kvpager.engine.engine import Engine
from kvpager.engine.params import SamplingParams
from kvpager.errors import EngineStopped, InputError
from kvpager.journaled import Resumable
from tests.engine import rig
from tests.engine.journal import MemoryJournal
from tests.engine.rig import SMALL, Answers, greedy, prompt, run
from tests.memory_store import MemoryStore

BUDGETED = replace(SMALL, budget=64)
STEPS = 40


def params(kind: str) -> SamplingParams:
    """Requests of many kinds, about 30 tokens each."""
    return {
        "greedy": greedy(30),
        "drawn": SamplingParams(max_tokens=30, temperature=1.3, seed=7, top_p=0.95, repetition_penalty=1.1),
        "engine's seed": SamplingParams(max_tokens=30, frequency_penalty=0.5),
        "logprobs": SamplingParams(max_tokens=24, seed=3, logprobs=2, logit_bias={5: 1.5}),
        "three": SamplingParams(max_tokens=20, n=3, seed=1),
        "stop": SamplingParams(max_tokens=30, seed=11, stop=("never there", "e"), min_tokens=12),
    }[kind]


def told(answers: Answers, name: str, n: int) -> list[Any]:
    """What a client sees of a request in the end."""
    return [
        (
            answers.tokens[name, index],
            answers.text[name, index],
            answers.last[name, index].finish_reason,
            answers.last[name, index].stop_reason,
            [one for output in answers.outputs if output.index == index for one in output.logprobs or ()],
        )
        for index in range(n)
    ]


class Cut:
    """A request in an engine with a journal, until `steps` of it have been run; then everything else of it is gone."""

    def __init__(
        self, given: SamplingParams, steps: int, pager: PagerConfig = BUDGETED, kv_dtype: DType | None = None
    ) -> None:
        self.params = given
        self.kind: dict[str, Any] = {"pager": pager, "kv_dtype": kv_dtype, "max_num_batched_tokens": 80}
        self.store, self.journal = MemoryStore(), MemoryJournal()
        self.before = Answers()
        stores: dict[str, Any] = {"store": self.store, "journal": self.journal, "kv_dtype": kv_dtype}
        engine = Engine(rig.loaded(), pager, rig_config(), clock=lambda: 0.0, **stores)
        engine.add("one", prompt(75, 4), given, deadline=100.0, client=b"who")
        for _ in range(steps):
            self.before.take(engine.step())
        self.ended = not engine.has_work
        engine.pager.shutdown()  # not `close`: nothing is saved at the end

    def resumable(self) -> Resumable:
        (one,) = self.journal.resumables()
        return one

    def undisturbed(self) -> list[Any]:
        with rig.engine(store=MemoryStore(), **self.kind) as engine:
            engine.add("one", prompt(75, 4), self.params)
            return told(run(engine), "one", self.params.n)

    def goes_on(self, resumable: Resumable, store: MemoryStore | None = None) -> Answers:
        """The rest of it in another engine, which begins with all that was said."""
        journal = MemoryJournal()
        store = self.store.reopened() if store is None else store
        with rig.engine(store=store, journal=journal, **self.kind) as engine:
            engine.resume(resumable)
            answers = Answers()
            answers.take(engine.step())
            for place, tokens in enumerate(resumable.outputs):
                assert answers.tokens.get(("one", place), [])[: len(tokens)] == list(tokens)
            run(engine, answers)
        (again,) = journal.resumables()
        assert [list(tokens) for tokens in again.outputs] == [answers.tokens["one", i] for i in range(self.params.n)]
        assert all(end is not None for end in again.told)
        return answers


def rig_config() -> Any:
    return rig.EngineConfig(max_num_batched_tokens=80)


@pytest.mark.promise(4)
@pytest.mark.parametrize("kind", ["greedy", "drawn", "engine's seed", "logprobs", "three", "stop"])
@settings(max_examples=12, deadline=None)
@given(st.data())
def test_a_request_goes_on_in_another_engine_as_if_undisturbed(kind: str, data: st.DataObject) -> None:
    given_params = params(kind)
    steps = data.draw(st.integers(0, given_params.max_tokens or 0))
    pager = data.draw(st.sampled_from([SMALL, BUDGETED]))
    dtype = data.draw(st.sampled_from([None, "bfloat16", "float16", "int8"]))
    cut = Cut(given_params, steps, pager, dtype)
    resumable = cut.resumable()
    assert resumable.accepted.client == b"who"
    assert resumable.accepted.seconds == 100.0
    store = cut.store.reopened()
    lost = data.draw(st.sampled_from(["nothing", "store", "blocks", "open blocks", "sequences"]))
    if lost == "store":
        store = MemoryStore()
    elif lost == "blocks":
        for key in data.draw(st.lists(st.sampled_from(sorted(store.shelf.blocks)))) if store.shelf.blocks else []:
            store.shelf.blocks.pop(key, None)
    elif lost == "open blocks":
        saved = [one and replace(one, slots=b"") for one in resumable.saved]
        resumable = replace(resumable, saved=saved)
    elif lost == "sequences":
        resumable = replace(resumable, saved=[None] * len(resumable.saved))
    rest = told(cut.goes_on(resumable, store), "one", given_params.n)
    undisturbed = cut.undisturbed()
    if lost != "blocks":
        assert rest == undisturbed
    elif (
        dtype is None
    ):  # matrix products of other sizes round otherwise: the text is the same, log-probabilities nearly
        assert [one[:4] for one in rest] == [one[:4] for one in undisturbed]
    else:  # which few bits of a page can turn into other tokens
        assert all(reason is not None for _, _, reason, _, _ in rest)


@pytest.mark.parametrize("steps", range(1, 12))
def test_nothing_is_computed_twice_where_nothing_was_lost(steps: int) -> None:
    cut = Cut(greedy(20), steps)
    resumable = cut.resumable()
    saved = resumable.saved[0]
    assert saved is not None
    with rig.engine(pager=BUDGETED, store=cut.store.reopened()) as engine:
        engine.resume(resumable)
        engine.step()
        (choice,) = engine._answers.requests["one"].choices
        known = 75 + len(resumable.outputs[0])
        assert choice.length == known
        assert saved.header["length"] == max(known - 1, 64 if steps == 1 else 75)
        assert choice.sequence is not None
        assert engine.pager.stats().store_tokens_hit == saved.header["length"] // 16 * 16


def test_every_step_is_told_and_no_more_of_it_however_long_the_answer() -> None:
    cut = Cut(greedy(40), 40)
    sizes = []
    for step in cut.journal.steps[2:-1]:
        (one,) = step
        assert one.gained is not None
        assert len(one.tokens) == 1
        sizes.append((len(one.gained.keys), len(one.gained.slots)))
    slot = max(slots for _, slots in sizes)
    assert set(sizes) == {(0, slot), (32, 0)}
    assert cut.store.published == [cut.resumable().saved[0].keys[i : i + 32] for i in range(0, 7 * 32, 32)]  # type: ignore[union-attr]


@pytest.mark.parametrize("kept", [True, False])
def test_after_its_end_nothing_is_left_that_only_it_could_go_on_with(kept: bool) -> None:
    store, journal, plain = MemoryStore(), MemoryJournal(), MemoryStore()
    session = {"session": "talk"} if kept else {}
    for one, more in ((plain, {}), (store, {"journal": journal})):
        with rig.engine(pager=BUDGETED, store=one, **more) as engine:
            engine.add("one", prompt(75, 4), greedy(60), **session)
            run(engine)
            assert engine.pager.stats().sequences == 0
    assert set(store.shelf.blocks) == set(plain.shelf.blocks)
    assert len(store.published) == 8  # full blocks, while it ran


def test_answers_that_have_ended_are_told_again() -> None:
    cut = Cut(SamplingParams(max_tokens=12, n=2, seed=5), 40)
    assert cut.ended
    resumable = cut.resumable()
    assert all(resumable.told)
    answers = cut.goes_on(resumable, MemoryStore())
    assert told(answers, "one", 2) == told(cut.before, "one", 2)
    assert [output.usage for output in answers.last.values()] == [output.usage for output in cut.before.last.values()]
    assert all(len(output.token_ids) == 1 for output in answers.outputs)


@pytest.mark.parametrize("end", ["abort", "deadline"])
def test_an_answer_that_was_ended_from_outside_has_an_end_of_its_own(end: str) -> None:
    now = [0.0]
    journal, before = MemoryJournal(), Answers()
    with rig.engine(store=MemoryStore(), journal=journal, clock=lambda: now[0]) as engine:
        engine.add("one", prompt(20), greedy(30), deadline=1.0)
        for _ in range(6):
            before.take(engine.step())
        now[0] = 2.0 * (end == "deadline")
        if end == "abort":
            engine.abort("one")
        run(engine, before)
    (resumable,) = journal.resumables()
    with rig.engine(store=MemoryStore()) as engine:
        engine.resume(resumable)
        answers = run(engine)
    assert told(answers, "one", 1) == told(before, "one", 1)
    assert answers.outputs[-1].token_ids == ()
    assert answers.outputs[-1].finish_reason == end


@pytest.mark.promise(6)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda one: replace(one, outputs=[]), "not of 1 answers"),
        (lambda one: replace(one, logprobs=[[{"token_id": 1, "logprob": 0.0, "top": []}]]), "log-probabilities"),
        (lambda one: replace(one, accepted=replace(one.accepted, params={"colour": 1})), "colour"),
        (lambda one: replace(one, accepted=replace(one.accepted, params={"n": 0})), "n: 0"),
        (lambda one: replace(one, accepted=replace(one.accepted, prompt=[])), "empty"),
    ],
)
def test_what_is_no_request_is_refused(change: Callable[[Resumable], Resumable], said: str) -> None:
    resumable = Cut(greedy(20), 5).resumable()
    with rig.engine(store=MemoryStore()) as engine:
        with pytest.raises(InputError, match=said):
            engine.resume(change(resumable))
        assert not engine.has_work
        engine.resume(resumable)
        with pytest.raises(InputError, match="served already"):
            engine.resume(resumable)
        run(engine)
    with pytest.raises(EngineStopped):
        engine.resume(resumable)


def test_requests_that_ask_for_the_prompts_probabilities_are_not_told() -> None:
    journal = MemoryJournal()
    with rig.engine(store=MemoryStore(), journal=journal) as engine:
        engine.add("one", prompt(20), greedy(4, prompt_logprobs=1))
        called: list[int] = []
        while engine.has_work:
            engine.step(lambda: called.append(1))
        engine.add("two", prompt(20), greedy(4), client=None)  # nobody could come back to it
        run(engine)
    assert not journal.known
    assert called


def test_guided_answers_go_on_in_their_grammar() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]}
    given_params = SamplingParams(max_tokens=30, seed=2, json_schema=schema)
    for steps in (3, 9, 17):
        cut = Cut(given_params, steps)
        assert told(cut.goes_on(cut.resumable()), "one", 1) == cut.undisturbed()


def _copy(store: MemoryStore, *, blocks: bool = True, records: bool = True) -> MemoryStore:
    """The same shelf for a process of its own, as far as it was not lost."""
    kept = dict(store.shelf.blocks) if blocks else {}
    return MemoryStore(
        replace(store.shelf, blocks=kept, records=dict(store.shelf.records) if records else {}, claims={})
    )


@pytest.mark.parametrize("budget", [None, 64])
@pytest.mark.parametrize(("blocks", "records"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("steps", [1, 2, 9])
def test_a_turn_of_a_conversation_goes_on(steps: int, blocks: bool, records: bool, budget: int | None) -> None:
    """Under a budget what an earlier answer left in the pages depends on its having been written token by token."""
    pager = replace(SMALL, budget=budget)
    drawn = SamplingParams(max_tokens=25)
    store = MemoryStore()
    with rig.engine(pager=pager, store=store, max_num_batched_tokens=80) as engine:
        engine.add("first", prompt(60, 1), drawn, session="talk")
        ids = [*prompt(60, 1), *run(engine)["first"], *prompt(40, 2)]
    with rig.engine(pager=pager, store=_copy(store), max_num_batched_tokens=80) as engine:
        engine.add("second", ids, drawn, session="talk")
        whole = run(engine)["second"]
        engine.add("third", [*ids, *whole, 5, 6, 7], drawn, session="talk")
        after = run(engine)["third"]
    journal, cut = MemoryJournal(), _copy(store)
    lost = Engine(rig.loaded(), pager, rig_config(), store=cut, journal=journal)
    lost.add("second", ids, drawn, session="talk")
    for _ in range(steps):
        lost.step()
    lost.pager.shutdown()
    (resumable,) = journal.resumables()
    left = _copy(cut, blocks=blocks, records=records)
    with rig.engine(pager=pager, store=left, max_num_batched_tokens=80) as engine:
        engine.resume(resumable)
        assert run(engine)["second"] == whole
        engine.add("third", [*ids, *whole, 5, 6, 7], drawn, session="talk")
        found = run(engine)["third"]
        if records:  # else nobody knows the session's seed any more
            assert found == after
