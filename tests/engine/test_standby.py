"""An engine that is on standby, serves, and lets go of all it does; nothing of that is told or kept."""

from __future__ import annotations

import asyncio

import pytest

from kvpager.engine.async_engine import AsyncEngine
from kvpager.errors import SteppedDown
from tests.engine import rig
from tests.engine.fake import FakeEngine
from tests.engine.journal import MemoryJournal
from tests.engine.test_async_engine import PROMPT, TOKENIZER, collected, params, running, text_of, until
from tests.engine.test_releases import Late
from tests.memory_store import MemoryStore


def test_on_standby_it_takes_no_requests_until_it_is_activated() -> None:
    async def main() -> None:
        engine = AsyncEngine(lambda: FakeEngine(TOKENIZER), standby=True)  # type: ignore[arg-type, return-value]
        engine.start()
        await engine.ready()
        assert engine.health.state == "standby"
        assert engine.health.alive
        with pytest.raises(SteppedDown):
            await engine.submit("a", PROMPT, params())
        engine.activate()
        assert text_of(await collected(engine.generate("a", PROMPT, params(3)))) == "the "
        await engine.stop()

    asyncio.run(main())


@pytest.mark.parametrize("flushes", [True, False])
def test_all_that_runs_is_let_go_and_what_was_told_is_given_out_if_it_was_written(flushes: bool) -> None:
    async def main() -> None:
        journal = Late()
        async with running(journal=journal) as (engine, fake):
            fake.gate.let(4)
            stream = await engine.submit("a", PROMPT, params(50), apart=True)
            await until(lambda: fake.steps == 4)
            reading = asyncio.ensure_future(stream.__anext__())

            def flush() -> None:
                for done in journal.waiting:
                    done()

            fake.gate.let(1)
            await engine.abandon(flush if flushes else None)
            assert engine.health.state == "standby"
            assert not fake.requests
            if flushes:
                assert (await reading).token_ids
                with pytest.raises(SteppedDown):
                    await collected(stream)
            else:
                with pytest.raises(SteppedDown):
                    await reading
                flush()  # what comes late is given to nobody
            engine.activate()
            fake.gate.set()
            again = await engine.submit("a", PROMPT, params(3))  # of the same name
            stream.close()
            await until(lambda: not fake.requests)
            flush()
            assert text_of(await collected(again)) == "the "

    asyncio.run(main())


def test_an_engine_lets_go_of_its_requests_without_telling_anyone() -> None:
    journal, store = MemoryJournal(), MemoryStore()
    with rig.engine(store=store, journal=journal) as engine:
        engine.add("a", range(3, 23), params(30), client=b"who")
        engine.add("b", range(3, 23), params(30), session="talk")
        for _ in range(8):
            engine.step()
        engine.abandon()
        assert not engine.has_work
        assert engine.step() == []
        engine.add("b", range(3, 23), params(2), session="talk")  # its session is free
        assert engine.stats().sessions.resumed == 0
    known = {one.accepted.id: one for one in journal.resumables()}
    assert known["a"].told == [None]
    assert 0 < len(known["a"].outputs[0]) < 30
