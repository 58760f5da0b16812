"""A stand-in for Engine that writes what it is told to: for histories and faults that a model can't be made to show."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

from kvpager.config import PagerConfig
from kvpager.engine.latencies import EngineLatencies, Latencies
from kvpager.engine.outputs import EngineStats, Output, TokenLogprob, Usage
from kvpager.engine.params import SamplingParams
from kvpager.engine.text import TextState, decoder
from kvpager.errors import InputError, QueueFull
from kvpager.stats import Latencies as PagerLatenciesMade
from kvpager.stats import PagerStats

VOCABULARY = 260


class Gate:
    """Lets steps through: all of them, none, or so many."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._left = math.inf

    def set(self) -> None:
        self._allow(math.inf)

    def clear(self) -> None:
        self._allow(0)

    def let(self, steps: int) -> None:
        self._allow(steps)

    def _allow(self, left: float) -> None:
        with self._changed:
            self._left = left
            self._changed.notify_all()

    def wait(self) -> None:
        with self._changed:
            while self._left <= 0:
                self._changed.wait()
            self._left -= 1


NOTHING = PagerStats(**{one.name: 0 for one in fields(PagerStats)})


class FakeEngine:
    """Each step reads `chunk` tokens of each prompt, or writes a token of each answer that has its prompt read.

    write      the answer's tokens, from the prompt's
    gate       a step waits for it, so that a test can hold the engine
    fail       an exception that the next steps raise, each taken once
    broken     whether `check` finds the books out of balance
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        write: Callable[[Sequence[int]], Sequence[int]] = lambda prompt: prompt,
        chunk: int = 64,
        max_queue: int = 1024,
        journal: Any = None,
    ) -> None:
        self._decode = {skip: decoder(tokenizer, skip) for skip in (True, False)}
        self.write, self.chunk, self.max_queue = write, chunk, max_queue
        self.gate = Gate()
        self.fail: list[Exception] = []
        self.broken = self.closed = False
        self.steps = self.aborts = 0
        self.owner = threading.get_ident()
        self.salts: dict[str, bytes] = {}
        self.priorities: dict[str, int] = {}
        self.requests: dict[str, SimpleNamespace] = {}
        self.store_states: dict[str, str] = {}
        self.pager = SimpleNamespace(config=PagerConfig())
        self.journal = journal

    def add(
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
    ) -> None:
        assert threading.get_ident() == self.owner, "another thread than the owner's"
        if not prompt or max(prompt) >= VOCABULARY:
            raise InputError("prompt: it is empty, or has a token id that is not in the vocabulary")
        if len(self.requests) >= self.max_queue:
            raise QueueFull("as many requests wait as may")
        if session is not None:
            self.forget_session(salt, session)
        self.salts[request_id], self.priorities[request_id] = salt, priority
        texts = [TextState(self._decode[params.skip_special_tokens], params) for _ in range(params.n)]
        self.requests[request_id] = SimpleNamespace(prompt=list(prompt), params=params, read=0, texts=texts, written=0)

    def abort(self, request_id: str) -> bool:
        assert threading.get_ident() == self.owner, "another thread than the owner's"
        gone = self.requests.pop(request_id, None)
        self.aborts += gone is not None
        return gone is not None

    def abandon(self) -> None:
        assert threading.get_ident() == self.owner, "another thread than the owner's"
        self.requests.clear()

    def forget_session(self, salt: bytes, name: str) -> bool:
        assert threading.get_ident() == self.owner, "another thread than the owner's"
        raise InputError("session: there is no store")

    def erase(self, salt: bytes) -> Any:
        assert threading.get_ident() == self.owner, "another thread than the owner's"
        raise InputError("session: there is no store")

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def step(self, done: Callable[[], None] = lambda: None) -> list[Output]:
        assert threading.get_ident() == self.owner, "another thread than the owner's"
        self.gate.wait()
        self.steps += 1
        if self.fail:
            raise self.fail.pop(0)
        outputs: list[Output] = []
        for name, request in list(self.requests.items()):
            if request.read < len(request.prompt):
                request.read += self.chunk
            else:
                outputs += self._written(name, request)
        if self.journal is not None:
            self.journal.step(outputs, done)
        return outputs

    def _written(self, name: str, request: SimpleNamespace) -> list[Output]:
        answer, params, place = self.write(request.prompt), request.params, request.written
        token = answer[place % len(answer)]
        request.written += 1
        length = request.written == (params.max_tokens or 64)
        outputs = []
        for index, text in enumerate(request.texts):
            if text is None:
                continue
            shown = text.push(token)
            over = text.stopped or length
            logprobs = None if params.logprobs is None else (TokenLogprob(token, -0.5, ((token, -0.5),)),)
            output = Output(name, index, shown, (token,), logprobs)
            if over:
                shown += text.finish()
                stopped = text.stopped
                output = replace(
                    output,
                    text=shown,
                    finish_reason="stop" if stopped else "length",
                    stop_reason=text.stop_reason if stopped else None,
                    usage=usage(len(request.prompt), request.written),
                )
                request.texts[index] = None
            outputs.append(output)
        if not any(request.texts):
            del self.requests[name]
        return outputs

    def stats(self) -> EngineStats:
        return EngineStats(len(self.requests), 0, 0, 0, 0, self.steps, 0, 0, 0, pager=NOTHING)

    def latencies(self) -> EngineLatencies:
        return Latencies().look(PagerLatenciesMade().look())

    def check(self) -> None:
        assert not self.broken, "the books don't balance"

    def close(self) -> None:
        self.closed = True


def usage(prompt: int, completion: int) -> Usage:
    return Usage(prompt, completion, 0, 10, 2, 3, 0.75, 0, 0.0, 0.1, 0.2)
