"""An engine for asyncio: one thread makes and owns it, requests are streams, and leaving a stream ends its request."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from kvpager.engine.calls import Calls, settle
from kvpager.engine.health import Health, Look, State
from kvpager.engine.outputs import Output
from kvpager.engine.releases import Releases
from kvpager.engine.stream import Stream
from kvpager.errors import EngineStopped, InputError

if TYPE_CHECKING:
    from kvpager.engine.engine import Engine
    from kvpager.engine.outputs import EngineStats
    from kvpager.engine.params import SamplingParams
    from kvpager.journaled import JournalSink, Resumable

__all__ = ["AsyncEngine", "Health", "Look", "State"]

T = TypeVar("T")
LOOK_S = 0.005  # between two looks at a store that erases


class AsyncEngine:
    """Runs an engine in a thread of its own for the tasks of one event loop.

    `make_engine` is called in that thread, and so is everything else that touches the engine. The thread sleeps while
    there is nothing to do, and wakes at once for a new request or an abort. All methods belong to the loop's thread.
    Where the engine has a journal, outputs come once that has them; the engine runs on meanwhile.
    """

    def __init__(self, make_engine: Callable[[], Engine], *, standby: bool = False) -> None:
        """With `standby` it takes no requests of clients until `activate` is called."""
        self._make_engine, self._standby = make_engine, standby
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[str, Stream] = {}  # the loop's
        self._live: dict[str, int] = {}  # requests of the engine, and choices that run; its thread alone uses it
        self._calls = Calls()
        self._erasing: dict[bytes, asyncio.Lock] = {}
        self._outbox: list[Output] = []
        self._outbox_lock = threading.Lock()
        self._releases = Releases()
        self._journal: JournalSink | None = None
        self._health = Health("loading")
        self._store_states: dict[str, str] = {}
        self._made = asyncio.Event()
        self._ended = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._failure: BaseException | None = None

    # ---- what users call, on the loop's thread ----

    def start(self) -> None:
        """Start the thread, which makes the engine; returns at once. See :meth:`ready`."""
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._main, name="kvpager-engine", daemon=True).start()

    async def ready(self) -> None:
        """Wait until the engine is made; raises what making it raised."""
        await self._made.wait()
        if self._failure is not None:
            raise self._failure

    @property
    def health(self) -> Health:
        """How it does now."""
        return self._health

    async def generate(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        deadline: float | None = None,
        salt: bytes = b"",
        session: str | None = None,
    ) -> AsyncIterator[Output]:
        """Run a request and yield its outputs, of all its choices; leaving the loop or being cancelled aborts it.

        Raises what `submit` raises. Close the generator (``contextlib.aclosing``) to abort at a known moment.
        """
        stream = await self.submit(
            request_id, prompt, params, priority=priority, deadline=deadline, salt=salt, session=session
        )
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    async def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        deadline: float | None = None,
        salt: bytes = b"",
        session: str | None = None,
        client: bytes | None = b"",
        apart: bool = False,
    ) -> Stream:
        """Hand a request to the engine; returns when it is queued, and the caller closes the stream.

        With `apart`, outputs are not joined, however late they are read. Raises InputError, RequestTooLarge, QueueFull
        or SessionBusy as the engine's `add` does, and EngineStopped where the engine takes no more requests.
        """

        def add(engine: Engine) -> None:
            more: dict[str, Any] = {"salt": salt, "session": session, "client": client}
            engine.add(request_id, prompt, params, priority=priority, deadline=deadline, **more)

        if self._health.state == "standby":
            raise self._health.refusal
        return await self._begin(Stream(self, request_id, params.n, apart=apart), params.n, add)

    async def resume(self, resumable: Resumable) -> Stream:
        """Have the engine go on with a request that began elsewhere: all of its outputs, not joined.

        Raises what the engine's `resume` raises.
        """
        choices = len(resumable.outputs)
        stream = Stream(self, resumable.accepted.id, choices, apart=True)
        return await self._begin(stream, choices, lambda engine: engine.resume(resumable))

    async def _begin(self, stream: Stream, choices: int, add: Callable[[Engine], None]) -> Stream:
        if self._health.state not in ("loading", "standby", "ready"):
            raise self._health.refusal
        if stream.request_id in self._streams:
            raise InputError(f"request_id: {stream.request_id!r} is in use")
        self._streams[stream.request_id] = stream
        self._empty.clear()

        def begin(engine: Engine) -> None:
            add(engine)
            self._live[stream.request_id] = choices

        try:
            await self._call(begin)
        except BaseException:  # also cancelled, while the engine may have taken it already
            stream.close()
            raise
        return stream

    def resumable(self, request_id: str) -> bool | None:
        """Whether the journal has what it takes to go on with a request elsewhere; None where there is no journal."""
        return None if self._journal is None else self._journal.resumable(request_id)

    async def stats(self) -> EngineStats:
        """The engine's figures between two steps; raises EngineStopped where there is no engine."""
        return await self._call(lambda engine: engine.stats())

    async def look(self) -> Look:
        """The engine's figures and latencies between two steps; raises EngineStopped where there is no engine."""
        return await self._call(lambda engine: Look(engine.stats(), engine.latencies(), engine.pager.config))

    async def forget_session(self, salt: bytes, name: str) -> bool:
        """As the engine's, between two steps; raises EngineStopped where there is no engine."""
        return await self._call(lambda engine: engine.forget_session(salt, name))

    async def erase(self, salt: bytes) -> int:
        """As the engine's; returns how many blocks and sessions there were. Raises EngineStopped without an engine.

        Requests go on while the store erases. A tenant that asks again waits until that is done, so that between two
        of its wishes the store gets to what others have for it.
        """
        async with self._erasing.setdefault(salt, asyncio.Lock()):
            erasing = await self._call(lambda engine: engine.erase(salt))
            while not erasing.ended:
                await asyncio.sleep(LOOK_S)
            return erasing.wait()

    @property
    def store_states(self) -> dict[str, str]:
        """The state of each tier of the store when a request last ended, or just after this was last asked."""
        if not self._calls:  # looking may take a while, and who asks for a server's health is not kept waiting
            self._calls.post(lambda engine: self._store_states.update(engine.store_states))
        return self._store_states

    async def warm(self, keys: Sequence[bytes]) -> None:
        """Have stored blocks read that requests will want soon; raises EngineStopped where there is no engine."""
        await self._call(lambda engine: None if engine.pager.store is None else engine.pager.store.prefetch(keys))

    def activate(self) -> None:
        """Take requests, after a time on standby."""
        if self._health.state == "standby":
            self._health = Health("ready")

    async def abandon(self, flush: Callable[[], None] | None = None) -> None:
        """Take no more requests and let go of all that run, for another engine goes on with them; be on standby.

        Who reads them gets SteppedDown; before that what `flush` (in another thread) has the journal release.
        """
        if self._health.state in ("loading", "ready"):
            self._health = Health("standby")
        if flush is None:
            self._fail(list(self._streams.values()))
            self._releases.close()
        await self._call(self._let_go)
        if flush is not None:
            await asyncio.to_thread(flush)
        self._releases.close()
        self._fail(list(self._streams.values()))

    def drain(self) -> None:
        """Take no more requests; those that run go on."""
        if self._health.alive:
            self._health = Health("draining")

    async def stop(self, grace_s: float = 0.0) -> None:
        """Take no more requests, let those that run finish for `grace_s` seconds, end the rest, close the engine.

        What was ended so raises EngineStopped to who reads it. While the engine is still being made, this returns
        without waiting for that. May be called again with a shorter grace.
        """
        self.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(max(grace_s, 0.0)):
                await self._empty.wait()
        for stream in list(self._streams.values()):
            self._leave(stream)
            if not stream.finished:
                stream.fail(EngineStopped("the server stopped before the answer was complete"))
        self._calls.halt()
        if self._made.is_set():
            await self._ended.wait()

    # ---- between the threads ----

    def _leave(self, stream: Stream) -> None:
        if self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]
        if not self._streams:
            self._empty.set()

    def _fail(self, streams: list[Stream]) -> None:
        for stream in streams:
            self._leave(stream)
            if not stream.finished:
                stream.fail(Health("standby").refusal)

    def _let_go(self, engine: Engine) -> None:
        engine.abandon()
        self._live.clear()

    def _abort(self, request_id: str) -> None:
        def abort(engine: Engine) -> None:
            engine.abort(request_id)
            self._live.pop(request_id, None)

        self._calls.post(abort)

    async def _call(self, function: Callable[[Engine], T]) -> T:
        if self._ended.is_set():
            raise self._health.refusal
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls.post(function, future)
        return await future

    def _tell(self, function: Callable[..., None], *args: Any) -> None:
        """Have the loop call `function`; a loop that is gone hears nothing, and nobody listens to the engine then."""
        assert self._loop is not None, "start() comes first"
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            self._calls.halt()

    # ---- the engine's thread ----

    def _main(self) -> None:
        failure: BaseException | None = None
        try:
            engine = self._make_engine()
        except BaseException as error:
            failure = error
        else:
            self._store_states, self._journal = engine.store_states, engine.journal
            self._tell(self._on_made)
            try:
                self._serve(engine)
            except BaseException as error:
                failure = error
            finally:
                try:
                    engine.close()
                except Exception as error:
                    failure = failure or error
        self._tell(self._on_end, failure)

    def _serve(self, engine: Engine) -> None:
        while True:
            for function, future in self._calls.take(engine):
                self._run(function, future, engine)
            if self._calls.halted:
                return
            if engine.has_work:
                self._step(engine)

    def _step(self, engine: Engine) -> None:
        """A step, whose outputs are given on when the journal has them."""
        release = self._releases.next()
        try:
            outputs = engine.step(release.done)
        except Exception as error:
            release.give(self._recovered(engine, error))
            release.done()
            return
        self._count(outputs)
        release.give(partial(self._deliver, outputs))
        if engine.journal is None:
            release.done()
        if any(output.finish_reason is not None for output in outputs):
            self._store_states = engine.store_states

    def _run(self, function: Callable[[Engine], Any], future: asyncio.Future[Any] | None, engine: Engine) -> None:
        try:
            result = function(engine)
        except Exception as error:
            if future is None:
                raise  # an abort can't fail but by a fault of the engine
            self._tell(settle, future, None, error)
        else:
            if future is not None:
                self._tell(settle, future, result, None)

    def _recovered(self, engine: Engine, error: Exception) -> Callable[[], None]:
        """After a step that failed: its requests end with an error; raises unless the engine is whole without them.

        Returns what tells their streams.
        """
        text = f"{type(error).__name__}: {error}"
        live, self._live = list(self._live), {}
        for request_id in live:
            engine.abort(request_id)
        engine.check()
        return partial(self._tell, self._on_failed_step, live, text)

    def _count(self, outputs: list[Output]) -> None:
        for output in outputs:
            if output.finish_reason is not None and output.request_id in self._live:
                self._live[output.request_id] -= 1
                if not self._live[output.request_id]:
                    del self._live[output.request_id]

    def _deliver(self, outputs: list[Output]) -> None:
        """Give outputs to the loop; from whatever thread."""
        if not outputs:
            return
        with self._outbox_lock:
            told = bool(self._outbox)
            self._outbox.extend(outputs)
        if not told:  # else the loop has been told, and has not come to it yet
            self._tell(self._on_outputs)

    # ---- what the engine's thread has the loop call ----

    def _on_made(self) -> None:
        if self._health.state == "loading":
            self._health = Health("standby" if self._standby else "ready")
        self._made.set()

    def _on_outputs(self) -> None:
        with self._outbox_lock:
            outputs, self._outbox = self._outbox, []
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put(output)
                if stream.finished:
                    self._leave(stream)

    def _on_failed_step(self, request_ids: list[str], text: str) -> None:
        for request_id in request_ids:
            if (stream := self._streams.get(request_id)) is not None:
                stream.put_error(text)
                self._leave(stream)

    def _on_end(self, failure: BaseException | None) -> None:
        self._failure = failure
        text = f"{type(failure).__name__}: {failure}" if failure is not None else None
        self._health = Health("stopped") if text is None else Health("failed", text)
        self._made.set()
        self._ended.set()
        for _, future in self._calls.take():
            if future is not None:
                settle(future, None, self._health.refusal)
        for stream in list(self._streams.values()):
            self._leave(stream)
            if not stream.finished:
                stream.fail(self._health.refusal)
