"""A small OpenAI-like server on the loopback that does what it is told: answers, faults, and a word-wise tokenizer.

Tests read `asked`, the bodies of all requests for text, in the order in which they came.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

MODEL = "fake-1b"
KEY = "secret-key"


@dataclass
class FakeServer:
    """What the server does.

    faults      by the number of the request: "500", "429", "cut" (the connection), "end" (no end mark), "slow" (never
                goes on), "malformed", "error" (in the stream), "empty", "404"
    usage       whether usage is told; `miscount` is added to its completion tokens
    tokenizer   None: no /tokenize; "vllm" or "llama.cpp": whose form it takes
    together    tokens in one piece
    """

    faults: dict[int, str] = field(default_factory=dict)
    usage: bool = True
    miscount: int = 0
    tokenizer: str | None = "vllm"
    together: int = 1
    cached: int | None = None
    key: str | None = None
    asked: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    url: str = ""

    def app(self) -> Starlette:
        routes = [
            Route("/v1/models", self.models),
            Route("/v1/completions", self.write, methods=["POST"]),
            Route("/v1/chat/completions", self.write, methods=["POST"]),
        ]
        if self.tokenizer is not None:
            routes.append(Route("/tokenize", self.tokenize, methods=["POST"]))
        return Starlette(routes=routes)

    async def models(self, request: Request) -> Response:
        return self._refused(request) or JSONResponse({"data": [{"id": MODEL}, {"id": "another"}]})

    async def tokenize(self, request: Request) -> Response:
        body = await request.json()
        text = body.get("prompt" if self.tokenizer == "vllm" else "content")
        if text is None and self.tokenizer == "vllm":
            return JSONResponse({"error": {"message": "prompt: it is missing"}}, 422)
        return JSONResponse({"tokens": word_ids(text or "")})

    async def write(self, request: Request) -> Response:
        body = await request.json()
        refused = self._refused(request)
        if refused is not None:
            return refused
        number = len(self.asked)
        self.asked.append(body)
        self.paths.append(request.url.path)
        fault = self.faults.get(number)
        if fault is not None and fault.isdigit():
            error = {"error": {"message": f"scripted fault {fault}", "type": "x", "param": None, "code": None}}
            return JSONResponse(error, int(fault), {"Retry-After": "7"} if fault == "429" else {})
        return StreamingResponse(self._events(body, number, fault), media_type="text/event-stream")

    def _refused(self, request: Request) -> Response | None:
        if self.key is None or request.headers.get("authorization") == f"Bearer {self.key}":
            return None
        return JSONResponse({"error": {"message": "no such key"}}, 401)

    async def _events(self, body: dict[str, Any], number: int, fault: str | None) -> AsyncIterator[str]:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            async for event in self._answer(body, number, fault):
                yield event
        finally:
            self.running -= 1

    async def _answer(self, body: dict[str, Any], number: int, fault: str | None) -> AsyncIterator[str]:
        chat = "messages" in body
        written = 0
        words = self.answers[number].split(" ") if number < len(self.answers) else ["word"] * body["max_tokens"]
        if chat:
            yield _event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        while written < len(words) and fault != "empty":
            some = words[written : written + self.together]
            text = " ".join(some) if written == 0 else " " + " ".join(some)
            choice = {"delta": {"content": text}} if chat else {"text": text}
            yield _event({"choices": [{"index": 0, "finish_reason": None, **choice}]})
            written += len(some)
            await asyncio.sleep(0)
            if fault is not None and written == min(2, len(words)):
                async for event in self._fault(fault):
                    yield event
                if fault == "end":
                    return
        ending: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
        yield _event({"choices": [{"index": 0, "finish_reason": "length", **ending}]})
        if self.usage:
            yield _event({"choices": [], "usage": self._usage(body, written)})
        yield "data: [DONE]\n\n"

    async def _fault(self, fault: str) -> AsyncIterator[str]:
        if fault == "cut":
            raise ConnectionError("scripted: the connection breaks")
        if fault == "slow":
            await asyncio.Event().wait()
        if fault == "malformed":
            yield "data: {this is no JSON\n\n"
        if fault == "error":
            yield _event({"error": {"message": "scripted: the engine stopped"}})

    def _usage(self, body: dict[str, Any], written: int) -> dict[str, Any]:
        if "messages" in body:
            read = sum(len(word_ids(one["content"])) for one in body["messages"])
        else:
            read = len(body["prompt"])
        usage: dict[str, Any] = {"prompt_tokens": read, "completion_tokens": written + self.miscount}
        if self.cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached}
        return usage


def word_ids(text: str) -> list[int]:
    """A token for each word, and two for a long one; equal words have equal ids."""
    ids = []
    for word in text.split():
        number = 100 + sum(map(ord, word)) % 5000
        ids += [number] if len(word) < 9 else [number, number + 1]
    return ids


def _event(event: dict[str, Any]) -> str:
    return f"data: {json.dumps(event)}\n\n"


@contextmanager
def serving(fake: FakeServer) -> Iterator[FakeServer]:
    """Run it in a thread of its own on a free port; `url` says where."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(fake.app(), log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    fake.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        yield fake
    finally:
        server.should_exit = server.force_exit = True
        thread.join()
        listener.close()
