"""Answers that come piece by piece, and clients that go away: in both the request ends where its reader does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvpager.engine.outputs import Output
from kvpager.engine.stream import Stream

__all__ = ["DONE", "ClientGone", "EventStream", "all_or_none", "comment", "ended", "event", "merged", "unless_gone"]

DONE = b"data: [DONE]\n\n"
SEND_SECONDS = 120.0  # a client that has read nothing for so long counts as gone
T = TypeVar("T")


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


def event(data: dict[str, Any], position: str | None = None) -> bytes:
    """One server-sent event; `position` is its id."""
    head = b"" if position is None else f"id: {position}\n".encode()
    return head + b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


def comment(text: str) -> bytes:
    """A line of a stream that clients pass over."""
    return f": {text}\n\n".encode()


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client closes its connection: that raises ClientGone."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return await working
    finally:
        await ended(working, watching)


async def all_or_none(submits: Iterable[Coroutine[Any, Any, Stream]]) -> list[Stream]:
    """The streams of several requests, submitted together; where one is refused, none of them."""
    tasks = [asyncio.ensure_future(submit) for submit in submits]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        await ended(*tasks)
        for task in tasks:
            if not task.cancelled() and task.exception() is None:
                task.result().close()
        raise


async def merged(streams: Sequence[Stream]) -> AsyncGenerator[tuple[int, Output]]:
    """Outputs of several streams as they come, with the number of each one's stream."""
    if len(streams) == 1:  # the usual case, without a task for each output
        async for output in streams[0]:
            yield 0, output
        return
    waiting = {asyncio.ensure_future(stream.__anext__()): number for number, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number = waiting.pop(task)
                try:
                    output = task.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(streams[number].__anext__())] = number
                yield number, output
    finally:
        await ended(*waiting)


class EventStream(Response):
    """A response of server-sent events that ends with its client; `streams` are closed whatever happens."""

    def __init__(
        self, events: AsyncGenerator[bytes], streams: Sequence[Stream], headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})},
        )
        self._events = events
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events as they are made."""
        try:
            with suppress(ClientGone):
                await unless_gone(receive, self._send(send))
        finally:
            for stream in self._streams:
                stream.close()

    async def _send(self, send: Send) -> None:
        # a body that ends has a length in no header: events come as they are made
        headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with aclosing(self._events) as events:
            async for data in events:
                try:
                    async with asyncio.timeout(SEND_SECONDS):
                        await send({"type": "http.response.body", "body": data, "more_body": True})
                except TimeoutError:
                    raise ClientGone from None
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def ended(*tasks: asyncio.Future[Any]) -> None:
    """Cancel what has not ended, and wait until it has, so that whatever it holds is let go."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
