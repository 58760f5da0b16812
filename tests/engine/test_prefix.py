"""Prompts that begin alike share what was computed, within a tenant; a hit changes no answer."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvpager import PagerConfig
from kvpager.engine.engine import Engine
from tests.engine import rig
from tests.engine.rig import SMALL, Answers, greedy, oracle, prompt, run
from tests.memory_store import MemoryStore


def cached(answers: Answers, name: str) -> int:
    usage = answers.last[name, 0].usage
    assert usage is not None
    return usage.cached_tokens


def tokens_run(engine: Engine) -> list[int]:
    """Counts the tokens of each forward from now on."""
    counts: list[int] = []
    forward = engine._runner._ragged.forward

    def counting(sequences: object, token_ids: list[list[int]], keep: object) -> object:
        counts.append(sum(len(ids) for ids in token_ids))
        return forward(sequences, token_ids, keep)  # type: ignore[arg-type]

    engine._runner._ragged.forward = counting  # type: ignore[method-assign,assignment]
    return counts


@pytest.mark.parametrize("length", [32, 33, 64, 100])
def test_a_repeated_prompt_gives_the_same_answer_with_sliding_windows(length: int) -> None:  # BUGS.md, G06
    ids = prompt(length, seed=length)
    with rig.engine("qwen3-sliding") as engine:
        for turn in range(4):
            engine.add(str(turn), ids, greedy(40))
            answers = run(engine)
            assert answers[str(turn)] == oracle(ids, 40, "qwen3-sliding")
            assert cached(answers, str(turn)) == (0 if turn == 0 else (length - 1) // 16 * 16)


@pytest.mark.promise(5)
def test_reused_pages_never_answer_for_what_they_held_before() -> None:  # BUGS.md, G08
    draw = random.Random(0)
    prompts = [prompt(64, seed=seed) for seed in range(3)]
    with rig.engine(pager=PagerConfig(pool=32, group_pages=4, prefix_tokens=96)) as engine:
        hits = 0
        for turn in range(50):
            chosen = [0] if turn in (0, 1, 49) else draw.choices(range(3), k=draw.randint(1, 2))
            for place, which in enumerate(chosen):
                engine.add(f"{turn}.{place}", prompts[which], greedy(6))
            answers = run(engine)
            engine.check()
            for place, which in enumerate(chosen):
                assert answers[f"{turn}.{place}"] == oracle(prompts[which], 6)
                hits += cached(answers, f"{turn}.{place}")
    assert hits > 0


@pytest.mark.parametrize("tokens", [80, 512])
def test_a_prompt_that_is_wholly_known_computes_its_last_token(tokens: int) -> None:  # BUGS.md, G09
    for length in (15, 16, 17, 31, 32, 33, 48):
        ids = prompt(length, seed=length)
        with rig.engine(max_num_batched_tokens=tokens) as engine:
            for turn in range(2):
                counts = tokens_run(engine)
                engine.add(str(turn), ids, greedy(8))
                answers = run(engine)
                assert answers[str(turn)] == oracle(ids, 8)
                assert cached(answers, str(turn)) == turn * ((length - 1) // 16 * 16)
                assert sum(counts) == length - cached(answers, str(turn)) + 7


@pytest.mark.promise(5)
@pytest.mark.parametrize(("first", "second"), [(b"a", b"b"), (b"", b"a"), (b"a", b""), (b"ab", b"a")])
def test_tenants_never_share_what_was_computed(first: bytes, second: bytes) -> None:  # BUGS.md, G10
    ids = prompt(100, seed=1)
    with rig.engine() as engine:
        for name, salt, hit in (("one", first, 0), ("two", second, 0), ("again", first, 96), ("more", second, 96)):
            engine.add(name, ids, greedy(4), salt=salt)
            answers = run(engine)
            assert answers[name] == oracle(ids, 4)
            assert cached(answers, name) == hit
        for name, salt in (("p", first + b"p"), ("q", second + b"q")):  # side by side nobody waits for the other
            engine.add(name, ids, greedy(4), salt=salt)
        counts = tokens_run(engine)
        answers = run(engine)
        assert counts[0] == 200
        assert [cached(answers, name) for name in "pq"] == [0, 0]


def test_a_key_of_a_block_as_salt_finds_nothing() -> None:
    ids = prompt(64, seed=1)
    with rig.engine() as engine:
        engine.add("one", ids, greedy(2))
        answers = Answers()
        answers.take(engine.step())
        key = engine._scheduler.running[0].choices[0].sequence.keys[0]  # type: ignore[union-attr]
        engine.add("two", ids[16:], greedy(2), salt=key)
        run(engine, answers)
    assert cached(answers, "two") == 0


@pytest.mark.parametrize("budget", [None, 64])
def test_many_requests_that_begin_alike_compute_their_beginning_once(budget: int | None) -> None:
    shared = prompt(300, seed=1)
    prompts = {str(n): shared + prompt(5 + n, seed=n) for n in range(12)}
    with rig.engine(pager=replace(SMALL, budget=budget), max_num_seqs=8, max_num_batched_tokens=128) as engine:
        counts = tokens_run(engine)
        for name, ids in prompts.items():
            engine.add(name, ids, greedy(3))
        answers = run(engine)
    whole = 300 // 64 * 64 if budget else 288
    assert [cached(answers, name) for name in prompts] == [0] + [whole] * 11
    assert sum(counts) == sum(len(ids) for ids in prompts.values()) - 11 * whole + 2 * 12
    if budget is None:
        for name, ids in prompts.items():
            assert answers[name] == oracle(ids, 3)


def test_a_request_that_waits_for_a_prefix_goes_on_when_the_other_is_gone() -> None:
    shared = prompt(300, seed=1)
    other = prompt(20, seed=3)
    with rig.engine(max_num_batched_tokens=100) as engine:
        engine.add("first", shared, greedy(3))
        engine.add("second", [*shared, 5], greedy(3))
        engine.add("other", other, greedy(3))
        answers = Answers()
        answers.take(engine.step())
        answers.take(engine.step())
        assert engine.stats().waiting == 1  # the second one waits, the other overtakes it
        engine.abort("first")
        run(engine, answers)
    assert answers["second"] == oracle([*shared, 5], 3)
    assert cached(answers, "second") >= 64
    assert answers["other"] == oracle(other, 3)


def test_requests_that_always_begin_alike_do_not_keep_one_waiting() -> None:
    shared = prompt(200, seed=1)
    with rig.engine(max_num_batched_tokens=80, max_num_seqs=4) as engine:
        engine.add("lead", shared, greedy(3))
        engine.step()
        engine.add("one", shared[:150], greedy(3))
        answers = Answers()
        for n in range(40):
            engine.add(str(n), shared[: 100 + n] + prompt(60, seed=n), greedy(3))
            answers.take(engine.step())
        assert answers.reason("one") == "length"
        run(engine, answers)


def test_without_prefix_caching_nothing_is_shared() -> None:
    ids = prompt(100, seed=1)
    with rig.engine(enable_prefix_caching=False) as engine:
        for name in ("one", "two"):
            engine.add(name, ids, greedy(2))
        counts = tokens_run(engine)
        answers = run(engine)
        assert counts[0] == 200
        assert [cached(answers, name) for name in ("one", "two")] == [0, 0]
        assert engine.stats().pager.cached_blocks == 0


def test_what_requests_leave_for_reuse_is_bounded_by_the_pool() -> None:
    with rig.engine(pager=PagerConfig(pool=64, group_pages=4)) as engine:
        for n in range(6):
            engine.add(str(n), prompt(200, seed=n), greedy(2))
        run(engine)
        assert engine.stats().pager.cached_blocks == 64 // 4


def test_what_a_waiting_request_will_want_is_read_ahead() -> None:
    ids = prompt(100, seed=1)
    with rig.engine(store=MemoryStore()) as engine:
        engine.add("a", ids, greedy(4))
        wanted = run(engine)["a"]
        store = engine.pager.store
    assert isinstance(store, MemoryStore)
    store = store.reopened()
    with rig.engine(store=store) as engine:
        engine.add("b", prompt(50, seed=2), greedy(4))
        answers = Answers()
        answers.take(engine.step())
        assert not store.prefetched
        engine.add("a", ids, greedy(4))
        assert [store.shelf.blocks[key].head.depth for key in store.prefetched] == list(range(6))
        while engine.has_work:
            answers.take(engine.step())
        assert answers["a"] == wanted
