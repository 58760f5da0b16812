"""Whom ``kvpager chat`` talks with: a model in this process, or a server."""

from __future__ import annotations

import argparse
import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol, Self

from kvpager.build import PagerOptions, StoreOptions
from kvpager.cli.options import load_model
from kvpager.errors import InputError, KVPagerError, RemoteError

__all__ = ["Local", "Partner", "Server", "Settings", "Turn"]

Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Settings:
    """How answers are drawn, and how long they may be."""

    max_tokens: int
    temperature: float
    top_p: float
    seed: int


@dataclass(frozen=True)
class Turn:
    """What one answer cost; None where nobody told."""

    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None
    finish_reason: str | None
    first_s: float
    total_s: float

    def line(self) -> str:
        """For people."""
        return (
            f"{_told(self.prompt_tokens)} tokens read, {_told(self.cached_tokens)} of them cached, "
            f"{_told(self.completion_tokens)} written, {self.first_s:.2f} s to the first, {self.total_s:.2f} s in all"
        )


def _told(count: int | None) -> str:
    return "?" if count is None else str(count)


class Partner(Protocol):
    """Answers conversations."""

    name: str

    def answer(self, messages: Messages, show: Callable[[str], None]) -> Turn:
        """Answer the last message and show text as it comes. Raises KVPagerError; KeyboardInterrupt ends the answer."""

    def figures(self) -> list[str]:
        """More lines for ``/stats``."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None: ...


class _Stopwatch:
    """Seconds to the first text."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._started = time.perf_counter()
        self.first: float | None = None

    def show(self, text: str) -> None:
        """Show it; the first one stops the clock."""
        if text:
            self.first = self.seconds if self.first is None else self.first
            self._show(text)

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return time.perf_counter() - self._started


@contextmanager
def _between_steps() -> Iterator[threading.Event]:
    """Let Ctrl-C set the event instead of breaking into a step; a second one breaks in."""
    interrupted = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield interrupted
        return

    def note(number: int, frame: FrameType | None) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()

    signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


class Local:
    """A model in this process; what earlier turns computed is used again."""

    def __init__(
        self, args: argparse.Namespace, options: PagerOptions, store: StoreOptions | None, settings: Settings
    ) -> None:
        options.settings()  # refused before a model is loaded
        from kvpager import build
        from kvpager.llm import LLM

        build.require_engine()
        loaded = load_model(args, identify=store is not None)
        if not loaded.tokenizer.chat_template:
            raise InputError(f"model: {loaded.name} has no chat template")
        from kvpager.engine.engine import EngineConfig

        config = EngineConfig(max_num_seqs=1, seed=args.seed)
        self._llm = LLM.over(loaded, build.make_engine(loaded, options, config, store=store))
        self._settings = settings
        self.name = loaded.name

    def answer(self, messages: Messages, show: Callable[[str], None]) -> Turn:
        """See Partner."""
        from kvpager.engine.params import SamplingParams

        own = self._settings
        ids = self._llm.chat_ids(messages)
        params = SamplingParams(
            max_tokens=self._llm.room(len(ids), own.max_tokens),
            temperature=own.temperature,
            top_p=own.top_p,
            seed=own.seed,
        )
        watch, last = _Stopwatch(show), None
        with _between_steps() as interrupted, closing(self._llm.stream(ids, params)) as outputs:
            for output in outputs:
                watch.show(output.text)
                last = output
                if interrupted.is_set():
                    raise KeyboardInterrupt
        assert last is not None, "an answer has an end"
        if last.error is not None:
            raise KVPagerError(last.error)
        usage = last.usage
        return Turn(
            prompt_tokens=len(ids),
            cached_tokens=None if usage is None else usage.cached_tokens,
            completion_tokens=None if usage is None else usage.completion_tokens,
            finish_reason=last.finish_reason,
            first_s=watch.seconds if watch.first is None else watch.first,
            total_s=watch.seconds,
        )

    def figures(self) -> list[str]:
        """Memory told whole."""
        mib, pager = 2**20, self._llm.stats().pager
        return [
            f"KV in memory {pager.resident_bytes / mib:.1f} MiB (frames {pager.pool_bytes / mib:.1f}, digests "
            f"{pager.digest_bytes / mib:.1f}, tables {pager.table_bytes / mib:.1f}), swap {pager.swap_bytes / mib:.1f} "
            f"MiB; {pager.evictions} pages evicted, {pager.recalls} recalled; peak of the process "
            f"{pager.peak_rss_bytes / mib:.0f} MiB"
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._llm.close()


class Server:
    """A server by its URL; `model` None takes the first that it lists."""

    def __init__(self, url: str, api_key: str | None, model: str | None, settings: Settings) -> None:
        from kvpager.remote import Remote

        self._settings = settings
        self._runner = asyncio.Runner()
        try:
            self._remote = Remote(url, api_key)
            self.name = model or self._first()
        except BaseException:
            self._runner.close()
            raise

    def _first(self) -> str:
        models = self._runner.run(self._remote.models())
        if not models:
            raise InputError(f"model: {self._remote.url} lists none; use --model NAME")
        return models[0]

    def answer(self, messages: Messages, show: Callable[[str], None]) -> Turn:
        """See Partner."""
        return self._runner.run(self._answer(messages, show))

    async def _answer(self, messages: Messages, show: Callable[[str], None]) -> Turn:
        own = self._settings
        body = {
            "model": self.name,
            "messages": [dict(message) for message in messages],
            "max_tokens": own.max_tokens,
            "temperature": own.temperature,
            "top_p": own.top_p,
            "seed": own.seed,
        }
        watch, reason = _Stopwatch(show), None
        usage: Mapping[str, Any] = {}
        async with aclosing(self._remote.stream("chat", body)) as pieces:
            async for piece in pieces:
                watch.show(piece.text)
                reason, usage = piece.finish_reason or reason, piece.usage or usage
        if watch.first is None and reason is None:
            raise RemoteError("empty", f"{self._remote.url} ended its stream without any text")
        details = usage.get("prompt_tokens_details") or {}
        return Turn(
            prompt_tokens=usage.get("prompt_tokens"),
            cached_tokens=details.get("cached_tokens"),
            completion_tokens=usage.get("completion_tokens"),
            finish_reason=reason,
            first_s=watch.seconds if watch.first is None else watch.first,
            total_s=watch.seconds,
        )

    def figures(self) -> list[str]:
        """A server tells no more than the turns do."""
        return []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._runner.run(self._remote.close())
        self._runner.close()
