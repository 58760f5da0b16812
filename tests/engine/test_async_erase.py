"""Erasing takes the store as long as it takes: what others are answered meanwhile does not wait for it."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.engine.fake import FakeEngine
from tests.engine.test_async_engine import PROMPT, collected, params, running, until


class Slow:
    """What a store is erasing until it is told to have ended."""

    def __init__(self) -> None:
        self.ended = False

    def wait(self) -> int:
        assert self.ended
        return 3


class Erasing:
    """Begins to erase, in the engine's place; `begun` are those that it was asked for, with their tenants."""

    def __init__(self, fake: FakeEngine) -> None:
        self.begun: list[tuple[bytes, Slow]] = []
        fake.erase = self.erase  # type: ignore[method-assign]

    def erase(self, salt: bytes) -> Any:
        self.begun.append((salt, Slow()))
        return self.begun[-1][1]


def test_requests_go_on_while_a_store_erases() -> None:
    async def main() -> None:
        async with running() as (engine, fake):
            erasing = Erasing(fake)
            erased = asyncio.create_task(engine.erase(b"a"))
            await until(lambda: bool(erasing.begun))
            outputs = await collected(engine.generate("other", PROMPT, params(9), salt=b"b"))
            assert outputs[-1].finish_reason == "length"
            assert not erased.done()
            erasing.begun[0][1].ended = True
            assert await erased == 3

    asyncio.run(main())


def test_a_tenant_erases_once_at_a_time_and_holds_up_no_other() -> None:
    async def main() -> None:
        async with running() as (engine, fake):
            erasing = Erasing(fake)
            mine = [asyncio.create_task(engine.erase(b"a")) for _ in range(5)]
            await until(lambda: bool(erasing.begun))
            other = asyncio.create_task(engine.erase(b"b"))
            await until(lambda: len(erasing.begun) == 2)
            assert [salt for salt, _ in erasing.begun] == [b"a", b"b"]
            erasing.begun[1][1].ended = True
            assert await other == 3
            for place in (0, 2, 3, 4, 5):
                await until(lambda place=place: len(erasing.begun) > place)  # type: ignore[misc]
                assert len(erasing.begun) == max(place + 1, 2)
                erasing.begun[place][1].ended = True
            assert await asyncio.gather(*mine) == [3] * 5

    asyncio.run(main())
