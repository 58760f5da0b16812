"""A server on a free port of this machine, in a thread of its own, over a tiny real engine or a fake one."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx

from kvpager import build
from kvpager.engine.engine import EngineConfig
from kvpager.server.run import RunOptions, listen, serve
from kvpager.server.service import Served, Service, ServiceOptions
from tests.engine.fake import FakeEngine
from tests.small_llm import CONTEXT, tokenizer

T = TypeVar("T")
NAME = "tiny"
SECONDS = 60.0  # after which a test that waits has failed


class LiveServer:
    """Starts on entering, ends on leaving; `engine` is the engine, which belongs to another thread."""

    def __init__(
        self, make: Callable[[], Served], grace_s: float = 0.0, *, replication: Any = None, **options: Any
    ) -> None:
        self._make = make
        self.service = Service(self._keep, ServiceOptions(**{"names": (NAME,), **options}), replication)
        self._options = RunOptions(grace_s)
        self._listener = listen("127.0.0.1", 0)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.engine: Any = None
        self._thread = threading.Thread(target=self._run)
        self.client = httpx.Client(base_url=self.url, timeout=SECONDS)

    def _keep(self) -> Served:
        served = self._make()
        self.engine = served.engine
        return served

    def _run(self) -> None:
        async def main() -> None:
            self._loop = asyncio.get_running_loop()
            self._stopping = asyncio.Event()
            self._begun.set()
            await serve(self.service, self._listener, self._options, stopping=self._stopping)

        asyncio.run(main())

    def __enter__(self) -> LiveServer:
        self._begun = threading.Event()
        self._thread.start()
        self._begun.wait(SECONDS)
        self.until(lambda: self.service.engine.health.state != "loading")
        return self

    def stop(self) -> None:
        """Begin to end, as after SIGTERM."""
        self._loop.call_soon_threadsafe(self._stopping.set)

    def __exit__(self, *_: object) -> None:
        self.client.close()
        if isinstance(self.engine, FakeEngine):
            self.engine.gate.set()
        if self._thread.is_alive():
            self.stop()
        self._thread.join(SECONDS)
        assert not self._thread.is_alive(), "the server did not end"

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that another thread does."""
        end = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < end, "it did not happen"
            time.sleep(0.002)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What the server's event loop makes of it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(SECONDS)

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        # as ASCII, so that halves of characters can be sent, too
        headers = {"Content-Type": "application/json", **more.pop("headers", {})}
        return self.client.post(path, content=json.dumps(body), headers=headers, **more)

    def complete(self, prompt: Any = "hello", **more: Any) -> dict[str, Any]:
        """The answer of /v1/completions, which must be 200."""
        answer = self.post("/v1/completions", {"prompt": prompt, **more})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def chat(self, content: Any = "hello", **more: Any) -> dict[str, Any]:
        """The answer of /v1/chat/completions, which must be 200."""
        answer = self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **more})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The chunks of a stream, which must end with its mark."""
        answer = self.post(path, {**body, "stream": True})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.content.decode("utf-8").split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def raw(self, path: str, body: dict[str, Any]) -> socket.socket:
        """A connection on which a request was sent, for clients that behave badly."""
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS)
        connection.sendall(head.encode() + data)
        return connection


def fake_server(
    *,
    write: Callable[[Sequence[int]], Sequence[int]] = lambda prompt: prompt,
    chat_template: str | None = None,
    grace_s: float = 0.0,
    chunk: int = 64,
    max_queue: int = 1024,
    max_model_len: int = 10**6,
    journal: Any = None,
    **options: Any,
) -> LiveServer:
    """A server over a fake engine, which writes what `write` makes of the prompt."""
    from tests.small_llm import TEMPLATE

    texts = tokenizer(chat_template or TEMPLATE)

    def make() -> Served:
        engine: Any = FakeEngine(texts, write=write, chunk=chunk, max_queue=max_queue, journal=journal)
        return Served(engine, texts, max_model_len)

    return LiveServer(make, grace_s, **options)


def real_server(
    folder: str,
    *,
    pool: str | None = None,
    budget: int | None = None,
    store: Path | build.StoreOptions | None = None,
    journal: Any = None,
    **options: Any,
) -> LiveServer:
    """A server over the tiny model, with a store: in the file `store`, or as its options say."""
    engine = {name: options.pop(name) for name in ("max_num_seqs", "max_num_batched_tokens") if name in options}

    def make() -> Served:
        loaded = build.load_model(folder, weights="unpacked", identify=store is not None)
        paging = build.PagerOptions(pool=pool, budget=budget, swap="memory")
        kept = build.StoreOptions(str(store)) if isinstance(store, Path) else store
        made = build.make_engine(loaded, paging, EngineConfig(**engine), store=kept, journal=journal)
        return Served(made, loaded.tokenizer, CONTEXT)

    return LiveServer(make, **options)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error object of an answer, whose shape is checked."""
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    assert body["error"]["message"]
    assert isinstance(body["error"]["type"], str)
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    return dict(body["error"])
