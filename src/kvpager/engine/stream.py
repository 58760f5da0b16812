"""The outputs of one request as a stream for the tasks of an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING

from kvpager.engine.outputs import Output

if TYPE_CHECKING:
    from kvpager.engine.async_engine import AsyncEngine

__all__ = ["Stream"]


class Stream:
    """The outputs of one request, all its choices in one stream; iterate, and `close` when leaving early.

    Outputs that were not read yet are joined, one a choice, so that a slow reader costs no more than the text of its
    own answer; with `apart` they stay as they came. Iterating raises EngineStopped where the engine ends before the
    request does.
    """

    def __init__(self, engine: AsyncEngine, request_id: str, choices: int, *, apart: bool = False) -> None:
        self.request_id = request_id
        self._engine = engine
        self._apart = apart
        self._open = set(range(choices))  # choices that have not finished
        self._unread: dict[int, list[Output]] = {}
        self._news = asyncio.Event()
        self._failure: Exception | None = None

    def __aiter__(self) -> AsyncIterator[Output]:
        return self

    async def __anext__(self) -> Output:
        while not self._unread:
            if self._failure is not None:
                raise self._failure
            if not self._open:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        index = next(iter(self._unread))
        unread = self._unread.pop(index)
        if self._apart and len(unread) > 1:
            first = unread.pop(0)
            self._unread[index] = unread
            return first
        return _joined(unread)

    @property
    def finished(self) -> bool:
        """Whether the engine is done with the request; outputs may still be unread."""
        return not self._open or self._failure is not None

    def close(self) -> None:
        """End the request, where it has not ended by itself; what was not read is dropped."""
        self._unread.clear()
        self._engine._leave(self)
        if not self.finished:
            self._open.clear()
            self._engine._abort(self.request_id)
        self._news.set()

    def put(self, output: Output) -> None:
        """Take an output of the engine; on the loop's thread."""
        self._unread.setdefault(output.index, []).append(output)
        if output.finish_reason is not None:
            self._open.discard(output.index)
        self._news.set()

    def put_error(self, text: str) -> None:
        """End every choice that has not finished with an error; on the loop's thread."""
        for index in sorted(self._open):
            self.put(Output(self.request_id, index, "", (), finish_reason="error", error=text))

    def fail(self, error: Exception) -> None:
        """End the stream with an error after what is unread; on the loop's thread."""
        self._failure = error
        self._news.set()


def _joined(outputs: list[Output]) -> Output:
    """Outputs of one choice, in order, as one."""
    if len(outputs) == 1:
        return outputs[0]
    told = [output.logprobs for output in outputs if output.logprobs is not None]
    return replace(
        outputs[-1],
        text="".join(output.text for output in outputs),
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        logprobs=tuple(entry for entries in told for entry in entries) if told else None,
        prompt_logprobs=next((o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None), None),
    )
