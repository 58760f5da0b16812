"""``kvpager bench serve``: requests against a server, by rate or by number at once, and when every piece came back.

A request's clock starts when it is sent. What was sent later than its arrival said is told (`late`), so that a
generator that can't keep up is seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from kvpager.bench.workload import Item
from kvpager.errors import RemoteError
from kvpager.remote import Piece

__all__ = ["Limits", "Load", "Record", "Send", "drive"]

Send = Callable[[Item], AsyncIterator[Piece]]
"""Makes one request; raises RemoteError."""


@dataclass(frozen=True)
class Limits:
    """concurrency: requests at once at most (None: no limit); timeout: seconds of one request; seconds: of them all."""

    concurrency: int | None = None
    timeout: float = 600.0
    seconds: float = 3600.0


@dataclass
class Record:
    """What became of one request. Times are seconds on the run's clock, which is 0 when the run starts.

    pieces  when each piece with text came
    usage   as the server told it; None where it told nothing
    error   what kind of failure, None where all went well; "unfinished" when the run ended first
    """

    item: Item
    sent: float
    pieces: list[float] = field(default_factory=list)
    characters: int = 0
    ended: float = 0.0
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    error: str | None = None
    message: str | None = None
    retry_after: float | None = None

    @property
    def told_tokens(self) -> int | None:
        """Tokens written, as the server counted them; None where it did not."""
        told = None if self.usage is None else self.usage.get("completion_tokens")
        return told if isinstance(told, int) else None

    @property
    def output_tokens(self) -> int:
        """Tokens written: as the server counted them, else a token for each piece."""
        return len(self.pieces) if self.told_tokens is None else self.told_tokens

    @property
    def prompt_tokens(self) -> int:
        """Tokens read: as the server counted them, else as many as were meant to be sent."""
        told = None if self.usage is None else self.usage.get("prompt_tokens")
        return told if isinstance(told, int) else self.item.prompt_tokens

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of the prompt that the server did not have to compute; None where it does not tell."""
        details = (self.usage or {}).get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, Mapping) else None
        return cached if isinstance(cached, int) else None

    @property
    def first(self) -> float | None:
        """Seconds to the first text (TTFT)."""
        return self.pieces[0] - self.sent if self.pieces else None

    @property
    def whole(self) -> float:
        """Seconds to the end of the answer."""
        return self.ended - self.sent

    @property
    def per_token(self) -> float | None:
        """Seconds a token after the first text; None for one token or one piece."""
        more = self.output_tokens - 1
        return (self.pieces[-1] - self.pieces[0]) / more if len(self.pieces) > 1 and more > 0 else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between pieces; a server may put several tokens in one."""
        return [late - early for early, late in pairwise(self.pieces)]


@dataclass
class Load:
    """All requests of a run as far as they were made; `interrupted` says that the user ended it."""

    records: list[Record] = field(default_factory=list)
    seconds: float = 0.0
    most_at_once: int = 0
    interrupted: bool = False
    out_of_time: bool = False


class _Run:
    """One run: its clock, and how many requests are under way."""

    def __init__(
        self, load: Load, send: Send, limits: Limits, clock: Callable[[], float], progress: Callable[[int], None]
    ) -> None:
        self.load = load
        self._send = send
        self._limits = limits
        self._clock = clock
        self._progress = progress
        self._started = clock()
        self._running = 0
        self._done = 0

    def now(self) -> float:
        """Seconds since the run started."""
        return self._clock() - self._started

    async def one(self, item: Item) -> None:
        """Make one request and keep what became of it."""
        record = Record(item, sent=self.now())
        self.load.records.append(record)
        self._running += 1
        self.load.most_at_once = max(self.load.most_at_once, self._running)
        try:
            async with asyncio.timeout(self._limits.timeout):
                await self._receive(record)
        except RemoteError as error:
            record.error, record.message, record.retry_after = error.kind, str(error), error.retry_after
        except TimeoutError:
            record.error, record.message = "timeout", f"no end after {self._limits.timeout:g} seconds"
        except asyncio.CancelledError:
            record.error, record.message = "unfinished", "the run ended first"
            raise
        finally:
            record.ended = self.now()
            self._running -= 1
            self._done += 1
            self._progress(self._done)

    async def _receive(self, record: Record) -> None:
        async for piece in self._send(record.item):
            if piece.text:
                record.pieces.append(self.now())
                record.characters += len(piece.text)
            record.finish_reason = piece.finish_reason or record.finish_reason
            record.usage = piece.usage or record.usage
        if not record.pieces and not record.told_tokens:
            raise RemoteError("empty", "the stream ended without any text")


async def drive(
    send: Send,
    items: Sequence[Item],
    limits: Limits,
    load: Load,
    *,
    clock: Callable[[], float],
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    progress: Callable[[int], None] = lambda done: None,
) -> None:
    """Make all requests, each at its time, and fill `load`; returns early when the time is over or the task cancelled.

    `progress` gets the requests that have ended.
    """
    run = _Run(load, send, limits, clock, progress)
    try:
        async with asyncio.timeout(limits.seconds):
            await _make(run, items, limits.concurrency, sleep)
    except TimeoutError:
        load.out_of_time = True
    except asyncio.CancelledError:
        load.interrupted = True
    finally:
        load.seconds = run.now()
        load.records.sort(key=lambda record: record.item.index)


async def _make(
    run: _Run, items: Sequence[Item], concurrency: int | None, sleep: Callable[[float], Awaitable[object]]
) -> None:
    places = asyncio.Semaphore(concurrency or len(items))

    async def make(item: Item) -> None:
        try:
            await run.one(item)
        finally:
            places.release()

    async with asyncio.TaskGroup() as group:
        for item in items:
            if (wait := item.at - run.now()) > 0:
                await sleep(wait)
            await places.acquire()
            group.create_task(make(item))
