"""Answers that a client may come back to: they go on without their reader for a while, and what they gave is kept.

Who sends an Idempotency-Key owns such an answer. Keys belong to a tenant: another's key is another key.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

from kvpager.engine.async_engine import AsyncEngine
from kvpager.engine.outputs import Output
from kvpager.engine.stream import Stream
from kvpager.errors import EngineStopped, KVPagerError, SessionBusy
from kvpager.journaled import Resumable
from kvpager.server.errors import ApiError
from kvpager.server.streaming import all_or_none, merged

__all__ = ["Client", "Position", "Reply", "Returning", "idempotency_key"]

GONE = "Nothing is known of this Idempotency-Key any more. Without Last-Event-ID it begins anew."
MOST_CHARACTERS = 255
BUSY_SECONDS, BUSY_PAUSE = 15.0, 0.25  # for a session of a server that was lost: longer than its claim lasts
_POSITION = re.compile(r"[0-9]{1,9}\.?(,[0-9]{1,9}\.?)*")


def idempotency_key(header: str | None) -> str | None:
    """The key that a client sent; raises ApiError (400) for what is none."""
    if header is None or (0 < len(header) <= MOST_CHARACTERS and header.isascii() and header.isprintable()):
        return header
    text = f"Idempotency-Key: it has 1 to {MOST_CHARACTERS} printable ASCII characters"
    raise ApiError(400, text, param="Idempotency-Key", code="invalid_value")


class Position:
    """How far a reader is: of each answer the tokens, and whether its end was told; the `id` of an event."""

    def __init__(self, choices: int) -> None:
        self.tokens = [0] * choices
        self.ended = [False] * choices

    @classmethod
    def parse(cls, text: str, choices: int) -> Position:
        """What `str` gave; raises ApiError (400) for anything else."""
        parts = text.split(",") if _POSITION.fullmatch(text) else []
        if len(parts) != choices:
            told = f"Last-Event-ID: it is not the id of an event of {choices} answers"
            raise ApiError(400, told, param="Last-Event-ID", code="invalid_value")
        position = cls(choices)
        position.tokens = [int(part.rstrip(".")) for part in parts]
        position.ended = [part.endswith(".") for part in parts]
        return position

    def __str__(self) -> str:
        return ",".join(f"{tokens}{'.' * ended}" for tokens, ended in zip(self.tokens, self.ended, strict=True))

    def add(self, choice: int, output: Output) -> None:
        """Go on by an output."""
        self.tokens[choice] += len(output.token_ids)
        self.ended[choice] |= output.finish_reason is not None

    def covers(self, other: Position, choice: int) -> bool:
        """Whether who is here has had all of an answer that `other` has."""
        return other.tokens[choice] <= self.tokens[choice] and self.ended[choice] >= other.ended[choice]

    def passes(self, other: Position, choice: int) -> bool:
        """Whether who is here says to have had more of an answer than there is, as its end in `other` tells."""
        return other.ended[choice] and self.tokens[choice] > other.tokens[choice]


@dataclass(frozen=True)
class Client:
    """What a server must know of a request to answer who comes back to it: one of `prompts` of an HTTP request.

    key      the client's; digest: of what it asked for; id, created: as in the answer
    """

    key: str
    digest: str
    id: str
    created: int
    number: int
    prompts: int

    def pack(self) -> bytes:
        """As bytes for a journal."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpack(cls, data: bytes) -> Client | None:
        """What `pack` gave; None for anything else."""
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError):
            return None


@dataclass(eq=False)
class Reply:
    """An answer, under way or just ended.

    outputs    all that it gave, with the number of the prompt; `failure` is what came after them
    requests   its names in the engine
    kept       whether it can be come back to: not once there was too much of it
    """

    digest: str
    id: str
    created: int
    outputs: list[tuple[int, Output]] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)
    begun: asyncio.Task[None] | None = None
    failure: Exception | None = None
    ended: bool = False
    kept: bool = True
    size: int = 0
    base: int = 0  # outputs that are not in `outputs` any more
    reader: int = 0  # the one that reads now: those before it have been taken over from
    news: asyncio.Event = field(default_factory=asyncio.Event)
    timer: asyncio.TimerHandle | None = None


class Returning:
    """The answers of a server that clients may come back to, the oldest first; the loop's thread owns it.

    One that nobody reads is ended after `seconds`, and one that has ended is forgotten after as many. No more than
    `most` are kept, and of what they gave about `most_bytes`: those that have ended make way.
    """

    def __init__(self, engine: AsyncEngine, seconds: float, most: int, most_bytes: int) -> None:
        self._engine = engine
        self._seconds, self._most, self._most_bytes = seconds, most, most_bytes
        self._replies: dict[tuple[bytes, str], Reply] = {}
        self._bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._replies)

    async def join(
        self, salt: bytes, client: Client, submit: Callable[[], Awaitable[list[Stream]]], *, anew: bool
    ) -> Reply | None:
        """The answer of a tenant's key, which `submit` begins if there is none; None where no more can be kept.

        Raises ApiError for a key that was used for something else (422), or that is unknown though it should be known
        (410, unless `anew`), and what `submit` raises.
        """
        reply = self._replies.get((salt, client.key))
        if reply is None:
            if not anew:
                raise ApiError(410, GONE, param="Last-Event-ID", code="stream_gone")
            if not self._room():
                return None
            reply = Reply(client.digest, client.id, client.created)
            self._replies[salt, client.key] = reply
            reply.begun = self._task(self._begin((salt, client.key), reply, submit))
        elif reply.digest != client.digest:
            text = "Idempotency-Key: it was used for another request; use another key"
            raise ApiError(422, text, param="Idempotency-Key", code="idempotency_key_reused")
        if reply.begun is not None:
            await asyncio.shield(reply.begun)  # a client that goes away meanwhile may come back
        return reply

    async def reattach(self, resumables: Sequence[Resumable]) -> set[str]:
        """Go on with requests that another server began, for their clients to come back to; returns their names.

        Those of which a part is missing, that nobody can come back to, or that can't go on here are left out.
        """
        answers: dict[tuple[bytes, str], dict[int, tuple[Client, Resumable]]] = {}
        for one in resumables:
            client = Client.unpack(one.accepted.client)
            if client is not None:
                answers.setdefault((one.accepted.salt, client.key), {})[client.number] = (client, one)
        tries: dict[asyncio.Future[bool], list[str]] = {}
        for key, parts in answers.items():
            client, _ = next(iter(parts.values()))
            if sorted(parts) != list(range(client.prompts)) or key in self._replies or not self._room():
                continue
            reply = self._replies[key] = Reply(client.digest, client.id, client.created)
            own = [parts[number][1] for number in sorted(parts)]
            tried: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            tries[tried] = [one.accepted.id for one in own]
            reply.begun = self._task(self._begin(key, reply, partial(self._resumed, own, tried)))
        return {name for tried, names in tries.items() if await tried for name in names}

    async def _resumed(self, own: Sequence[Resumable], tried: asyncio.Future[bool]) -> list[Stream]:
        """Streams of requests that go on here; `tried` says at once whether they do.

        A session that still counts as in use by the server that was lost is waited for: its clients wait with it.
        """
        last = time.monotonic() + BUSY_SECONDS
        try:
            while True:
                try:
                    return await all_or_none(self._engine.resume(one) for one in own)
                except SessionBusy:
                    if time.monotonic() >= last:
                        raise
                if not tried.done():
                    tried.set_result(True)
                await asyncio.sleep(BUSY_PAUSE)
        except KVPagerError:
            if not tried.done():
                tried.set_result(False)
            raise
        finally:
            if not tried.done():
                tried.set_result(True)

    def abandon(self) -> None:
        """Forget all: clients come back to another server."""
        for key, reply in list(self._replies.items()):
            if reply.ended and reply.timer is not None:
                reply.timer.cancel()
            self._forget(key, reply)

    def resumable(self, reply: Reply) -> bool:
        """Whether its client may come back, here and, where there is a journal, to another server."""
        return reply.kept and all(self._engine.resumable(name) is not False for name in reply.requests)

    def forget(self, salt: bytes) -> None:
        """Forget what has ended of a tenant's."""
        for key, reply in [item for item in self._replies.items() if item[0][0] == salt and item[1].ended]:
            self._forget(key, reply)

    async def read(self, reply: Reply) -> AsyncGenerator[tuple[int, Output]]:
        """All outputs of an answer with the numbers of their prompts, as they come; close it when leaving.

        Who reads last reads: others get ApiError (409). Raises ApiError (410) where its beginning is not kept any more,
        and EngineStopped where the engine ended before the answer.
        """
        if reply.base:
            raise ApiError(410, GONE, param="Last-Event-ID", code="stream_gone")
        reply.reader += 1
        reader, place = reply.reader, 0
        self._stop_timer(reply)
        reply.news.set()
        try:
            while True:
                while place < reply.base + len(reply.outputs):
                    yield reply.outputs[place - reply.base]
                    self._still(reply, reader)
                    place += 1
                    if not reply.kept:
                        del reply.outputs[: place - reply.base]
                        reply.base = place
                if reply.ended:
                    if reply.failure is not None:
                        raise reply.failure
                    return
                reply.news.clear()
                await reply.news.wait()
                self._still(reply, reader)
        finally:
            if reader == reply.reader:
                self._left(reply)

    @staticmethod
    def _still(reply: Reply, reader: int) -> None:
        if reader != reply.reader:
            raise ApiError(409, "Another connection reads this answer now.", code="taken_over")

    # -- their lives

    def _task(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waits for it is told

    async def _begin(self, key: tuple[bytes, str], reply: Reply, submit: Callable[[], Awaitable[list[Stream]]]) -> None:
        try:
            reply.streams = await submit()
        except BaseException:
            if self._replies.get(key) is reply:
                del self._replies[key]
            raise
        reply.requests = [stream.request_id for stream in reply.streams]
        reply.begun = None
        self._task(self._follow(key, reply))
        self._left(reply)

    async def _follow(self, key: tuple[bytes, str], reply: Reply) -> None:
        """Keep what an answer gives, until it ends."""
        try:
            async for prompt, output in merged(reply.streams):
                reply.outputs.append((prompt, output))
                weight = _weight(output)
                reply.size += weight
                self._bytes += weight if reply.kept else 0
                if self._bytes > self._most_bytes:
                    self._make_way(key, reply)
                reply.news.set()
        except EngineStopped as error:
            reply.failure = error
        finally:
            self._stop_timer(reply)  # of one that nobody reads: it is kept from its end on
            reply.ended = True
            reply.news.set()
            if reply.kept:
                loop = asyncio.get_running_loop()
                reply.timer = loop.call_later(self._seconds, self._forget, key, reply)

    def _left(self, reply: Reply) -> None:
        """Nobody reads it: unless somebody does again in time, it is ended. What has ended waits to be forgotten."""
        if not reply.ended:
            self._stop_timer(reply)
            seconds = self._seconds if reply.kept else 0.0
            reply.timer = asyncio.get_running_loop().call_later(seconds, self._abandon, reply)

    def _abandon(self, reply: Reply) -> None:
        for key, one in list(self._replies.items()):
            if one is reply:
                self._forget(key, reply)
        for stream in reply.streams:
            stream.close()

    @staticmethod
    def _stop_timer(reply: Reply) -> None:
        if reply.timer is not None and not reply.ended:
            reply.timer.cancel()
            reply.timer = None

    def _forget(self, key: tuple[bytes, str], reply: Reply) -> None:
        if self._replies.get(key) is reply:
            del self._replies[key]
        if reply.kept:
            reply.kept = False
            self._bytes -= reply.size

    # -- their bounds

    def _room(self) -> bool:
        """Whether one more can be kept, after the oldest that has ended made way."""
        return self._seconds > 0 and (len(self._replies) < self._most or self._drop_ended())

    def _drop_ended(self) -> bool:
        found = next(((key, reply) for key, reply in self._replies.items() if reply.ended), None)
        if found is None:
            return False
        self._forget(*found)
        return True

    def _make_way(self, key: tuple[bytes, str], reply: Reply) -> None:
        """Too much is kept: what has ended goes first, then the one that has just grown can't be come back to."""
        while self._bytes > self._most_bytes:
            if not self._drop_ended():
                self._forget(key, reply)
                if reply.timer is not None:
                    self._left(reply)
                return


def _weight(output: Output) -> int:
    """About what an output takes in memory."""
    logprobs = sum(120 + 100 * len(one.top) for one in output.logprobs or ())
    logprobs += sum(120 + 100 * len(one.top) for one in output.prompt_logprobs or ())
    return 400 + 4 * len(output.text) + 40 * len(output.token_ids) + logprobs
