"""AsyncEngine over a fake engine: threads, streams, cancelling, faults, stopping."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from kvpager.engine.async_engine import AsyncEngine
from kvpager.engine.outputs import Output
from kvpager.engine.params import SamplingParams
from kvpager.engine.stream import Stream
from kvpager.errors import EngineStopped, InputError, QueueFull
from tests.engine.fake import FakeEngine
from tests.small_llm import tokenizer

TOKENIZER = tokenizer()
PROMPT = list(TOKENIZER("the quick brown fox")["input_ids"])


@asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[tuple[AsyncEngine, FakeEngine]]:
    made: list[FakeEngine] = []

    def make() -> Any:
        made.append(FakeEngine(TOKENIZER, **settings))
        return made[0]

    engine = AsyncEngine(make)
    engine.start()
    await engine.ready()
    try:
        yield engine, made[0]
    finally:
        made[0].gate.set()
        await engine.stop()
    assert made[0].closed


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


async def collected(stream: AsyncIterator[Output]) -> list[Output]:
    return [output async for output in stream]


def params(tokens: int = 8, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, **more)


def text_of(outputs: list[Output], index: int = 0) -> str:
    return "".join(output.text for output in outputs if output.index == index)


def test_a_request_streams_its_answer_and_its_end() -> None:
    async def main() -> None:
        async with running() as (engine, fake):
            outputs = await collected(engine.generate("a", PROMPT, params(9)))
            assert text_of(outputs) == "the quick "  # "th" is one token
            assert [output.finish_reason for output in outputs][-1] == "length"
            assert fake.owner != threading.get_ident()

    asyncio.run(main())


def test_all_choices_come_in_one_stream() -> None:
    async def main() -> None:
        async with running() as (engine, _):
            outputs = await collected(engine.generate("a", PROMPT, params(n=3)))
            assert {text_of(outputs, index) for index in range(3)} == {text_of(outputs)}
            assert sum(output.finish_reason is not None for output in outputs) == 3

    asyncio.run(main())


def test_what_is_not_read_is_joined_and_nothing_of_it_is_lost() -> None:
    async def main() -> None:
        async with running() as (engine, fake):
            stream = await engine.submit("a", PROMPT, params(200, n=2, logprobs=1))
            await until(lambda: not fake.requests)
            await until(lambda: stream.finished)
            outputs = await collected(stream)
            assert len(outputs) == 2  # one a choice
            assert [len(output.token_ids) for output in outputs] == [200, 200]
            assert [len(output.logprobs or ()) for output in outputs] == [200, 200]
            assert text_of(outputs).startswith("the quick brown foxthe quick")

    asyncio.run(main())


@pytest.mark.parametrize("way", ["leave", "cancel"])
def test_who_leaves_aborts_within_two_steps(way: str) -> None:
    async def main() -> None:
        async with running() as (engine, fake):
            seen: list[Output] = []

            async def read() -> None:
                async with aclosing(engine.generate("a", PROMPT, params(10**6))) as outputs:
                    async for output in outputs:
                        seen.append(output)
                        if way == "leave" and len(seen) == 3:
                            fake.gate.clear()
                            break

            task = asyncio.create_task(read())
            if way == "leave":
                await task
            else:
                await until(lambda: bool(seen))
                fake.gate.clear()
                task.cancel()
                await asyncio.wait({task})
            before = fake.steps
            fake.gate.set()
            await until(lambda: not fake.requests)
            assert fake.aborts == 1
            assert fake.steps <= before + 2

    asyncio.run(main())


def test_a_request_that_is_cancelled_while_it_is_handed_over_is_aborted() -> None:
    async def main() -> None:
        async with running() as (engine, fake):
            fake.gate.clear()
            first = await engine.submit("first", PROMPT, params(4))
            task = asyncio.create_task(engine.submit("second", PROMPT, params(4)))
            await asyncio.sleep(0.01)  # the engine is in a step, so that the request is on its way
            task.cancel()
            await asyncio.wait({task})
            fake.gate.set()
            await collected(first)
            await until(lambda: not fake.has_work)
            assert fake.aborts == 1

    asyncio.run(main())


def test_what_add_refuses_is_raised_and_others_go_on() -> None:
    async def main() -> None:
        async with running(max_queue=1) as (engine, fake):
            fake.gate.clear()
            good = await engine.submit("good", PROMPT, params())
            fake.gate.set()
            with pytest.raises(InputError, match="in use"):
                await engine.submit("good", PROMPT, params())
            with pytest.raises((QueueFull, InputError)):
                await engine.submit("empty", [], params())
            assert text_of(await collected(good))
            with pytest.raises(InputError, match="empty"):
                await engine.submit("empty", [], params())

    asyncio.run(main())


def test_a_full_queue_is_told() -> None:
    async def main() -> None:
        async with running(max_queue=0) as (engine, _):
            with pytest.raises(QueueFull):
                await engine.submit("a", PROMPT, params())

    asyncio.run(main())


def test_after_a_failed_step_its_requests_end_with_an_error_and_the_engine_goes_on() -> None:
    async def main() -> None:
        async with running() as (engine, fake):
            fake.gate.clear()
            stream = await engine.submit("a", PROMPT, params(n=2))
            fake.fail.append(ValueError("no such thing"))
            fake.gate.set()
            outputs = await collected(stream)
            assert [(output.index, output.finish_reason) for output in outputs] == [(0, "error"), (1, "error")]
            assert outputs[0].error == "ValueError: no such thing"
            assert engine.health.state == "ready"
            assert text_of(await collected(engine.generate("b", PROMPT, params())))

    asyncio.run(main())


def test_an_engine_whose_books_do_not_balance_stops_and_says_so() -> None:
    async def main() -> None:
        async with running() as (engine, fake):
            fake.gate.clear()
            stream = await engine.submit("a", PROMPT, params())
            fake.fail.append(ValueError("no such thing"))
            fake.broken = True
            fake.gate.set()
            with pytest.raises(EngineStopped, match="the books don't balance"):
                await collected(stream)
            assert engine.health.state == "failed"
            assert not engine.health.alive
            with pytest.raises(EngineStopped):
                await engine.submit("b", PROMPT, params())
            with pytest.raises(EngineStopped):
                await engine.stats()

    asyncio.run(main())


def test_an_engine_that_can_not_be_made_says_why() -> None:
    def make() -> Any:
        raise InputError("model: there is none")

    async def main() -> None:
        engine = AsyncEngine(make)
        engine.start()
        with pytest.raises(InputError, match="there is none"):
            await engine.ready()
        assert engine.health.state == "failed"
        await engine.stop()

    asyncio.run(main())


def test_stop_lets_what_runs_finish_and_takes_nothing_new() -> None:
    async def main() -> None:
        async with running() as (engine, fake):
            fake.gate.clear()
            stream = await engine.submit("a", PROMPT, params(50))
            stopping = asyncio.create_task(engine.stop(20))
            await asyncio.sleep(0)
            with pytest.raises(EngineStopped, match="takes no more"):
                await engine.submit("b", PROMPT, params())
            fake.gate.set()
            outputs = await collected(stream)
            assert outputs[-1].finish_reason == "length"
            await stopping
            assert engine.health.state == "stopped"
            assert fake.closed

    asyncio.run(main())


def test_stop_ends_what_has_not_finished_in_time() -> None:
    async def main() -> None:
        async with running() as (engine, fake):
            stream = await engine.submit("a", PROMPT, params(10**6))
            await engine.stop(0.05)
            with pytest.raises(EngineStopped, match="before the answer was complete"):
                await collected(stream)
            assert fake.closed

    asyncio.run(main())


def test_an_idle_engine_sleeps() -> None:
    async def main() -> None:
        async with running() as (engine, fake):
            await collected(engine.generate("a", PROMPT, params()))
            await until(lambda: not fake.has_work)
            looks = 0

            def has_work(_: Any) -> bool:
                nonlocal looks
                looks += 1
                return False

            kind = type("Watched", (FakeEngine,), {"has_work": property(has_work)})
            fake.__class__ = kind
            await asyncio.sleep(0.1)
            assert looks <= 1  # the one that ends its last step; then it waits for news, and looks at nothing

    asyncio.run(main())


def test_many_streams_keep_apart() -> None:
    async def main() -> None:
        async with running() as (engine, _):

            async def one(number: int) -> str:
                prompt = list(TOKENIZER(f"marker {number:03d} ")["input_ids"])
                return text_of(await collected(engine.generate(f"r{number}", prompt, params(40))))

            texts = await asyncio.gather(*(one(number) for number in range(64)))
            for number, text in enumerate(texts):
                assert text.replace(f"marker {number:03d} ", "") in f"marker {number:03d} "

    asyncio.run(main())


def test_a_stream_of_its_own_can_be_closed_twice() -> None:
    async def main() -> None:
        async with running() as (engine, fake):
            stream: Stream = await engine.submit("a", PROMPT, params(10**6))
            stream.close()
            stream.close()
            await until(lambda: not fake.requests)
            assert fake.aborts == 1
            assert await collected(stream) == []

    asyncio.run(main())
