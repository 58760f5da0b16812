"""Outputs wait for the journal, in order, and nobody waits for them: neither the engine nor other requests."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpager.engine.outputs import Output
from kvpager.engine.releases import Releases
from tests.engine.test_async_engine import PROMPT, collected, params, running, text_of, until


class Late:
    """A journal whose acknowledgements a test gives."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.told: list[Sequence[Output]] = []

    def step(self, told: Sequence[Output], done: Callable[[], None]) -> None:
        self.told.append(told)
        self.waiting.append(done)

    def resumable(self, id: str) -> bool:
        return id == "a"


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=40), st.randoms(use_true_random=False))
def test_steps_are_given_on_in_their_order_however_they_are_acknowledged(
    history: list[tuple[bool, int]], chance: random.Random
) -> None:
    releases, given_on = Releases(), list[int]()
    made, calls = [], list[Callable[[], None]]()
    for makes, pick in history:
        if makes:
            release = releases.next()
            calls += [partial(release.give, partial(given_on.append, len(made))), release.done]
            made.append(release)
        elif calls:
            calls.pop(pick % len(calls))()
        assert given_on == list(range(len(given_on)))
    chance.shuffle(calls)
    for call in calls:
        call()
    assert given_on == list(range(len(made)))


def test_outputs_come_when_the_journal_has_them_and_the_engine_runs_on() -> None:
    async def main() -> None:
        journal = Late()
        async with running(journal=journal) as (engine, fake):
            assert engine.resumable("a")
            assert engine.resumable("b") is False
            stream = await engine.submit("a", PROMPT, params(9))
            await until(lambda: not fake.requests)
            reading = asyncio.ensure_future(stream.__anext__())
            await asyncio.sleep(0.02)
            assert not reading.done()
            first = next(place for place, told in enumerate(journal.told) if told)
            for done in journal.waiting[: first + 1]:
                done()
            output = await reading
            assert len(output.token_ids) == 1
            waiting = journal.waiting[first + 1 :]
            for done in waiting[1:]:
                done()
            reading = asyncio.ensure_future(stream.__anext__())
            await asyncio.sleep(0.02)
            assert not reading.done(), "it overtook one that is not acknowledged"
            waiting[0]()
            rest = await reading
            assert output.text + rest.text == "the quick "
            assert rest.finish_reason == "length"

    asyncio.run(main())


def test_a_step_that_fails_is_told_after_what_waits_for_the_journal() -> None:
    async def main() -> None:
        journal = Late()
        async with running(journal=journal) as (engine, fake):
            fake.gate.let(3)
            stream = await engine.submit("a", PROMPT, params(9), apart=True)
            await until(lambda: fake.steps == 3)
            fake.fail.append(RuntimeError("no"))
            fake.gate.let(1)
            await until(lambda: fake.aborts == 1)
            assert not stream.finished
            for done in journal.waiting:
                done()
            outputs = await collected(stream)
            assert [output.finish_reason for output in outputs] == [None, None, "error"]

    asyncio.run(main())


@pytest.mark.parametrize("leaves", [True, False])
def test_what_was_left_or_is_stopped_waits_for_nothing(leaves: bool) -> None:
    async def main() -> None:
        journal = Late()
        async with running(journal=journal) as (engine, fake):
            fake.gate.let(4)
            stream: Any = await engine.submit("a", PROMPT, params(50))
            await until(lambda: fake.steps == 4)
            if leaves:
                stream.close()
            fake.gate.set()
            await until(lambda: fake.aborts == 1 or not leaves)
            if leaves:
                async with aclosing(engine.generate("b", PROMPT, params(3))) as again:
                    reading = asyncio.ensure_future(collected(again))

                    def over() -> bool:
                        for done in journal.waiting:
                            done()
                        return reading.done()

                    await until(over)
                    assert text_of(await reading) == "the "

    asyncio.run(main())
