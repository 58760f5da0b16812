"""Two `kvpager serve` processes of one pair on loopback, and clients that come back to whoever serves."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx

from tests.redis_rig import free_port

SECONDS = 90.0  # after which a test that waits has failed
SILENCE_S = 1.5  # a client that has heard nothing for so long tries the other node
KVPAGER = (sys.executable, "-c", "import sys; from kvpager.cli.main import main; sys.exit(main())")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def until(condition: Callable[[], Any], what: str, seconds: float = SECONDS) -> Any:
    """What `condition` gives when it is true; failures to connect count as not yet."""
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if got := condition():
                return got
        assert time.monotonic() < end, what
        time.sleep(0.01)


class Served:
    """One `kvpager serve`, from entering to leaving; its output goes to a file."""

    def __init__(self, model: str, log: Path, *options: str) -> None:
        self.model, self.log, self.options = model, log, options
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None
        self.client = httpx.Client(base_url=self.url, timeout=5.0)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        if self.process is not None:
            self.send(signal.SIGCONT)
            self.process.kill()
            self.process.wait()

    def start(self) -> None:
        """Start it, again after it was killed; returns at once."""
        command = [*KVPAGER, "serve", self.model, "--port", str(self.port), *self.options]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, "PYTHONUNBUFFERED": "1"}
            )

    def send(self, number: int) -> None:
        """Send it a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def health(self) -> dict[str, Any]:
        """What /health says."""
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        return dict(self.client.get("/health").json())

    @property
    def role(self) -> str:
        """Its role as /health says it; "" where it has none yet."""
        health = self.health()
        return "" if health.get("state") == "loading" else str(health.get("replication", {}).get("role", ""))

    @property
    def ready(self) -> bool:
        """Whether it takes requests."""
        return self.client.get("/ready").status_code == 200


class Pair:
    """A primary and a standby over a Redis, both up when it is entered."""

    def __init__(self, model: str, folder: Path, redis_url: str, *options: str) -> None:
        more = ("--peer", redis_url, *options)
        self.nodes = [Served(model, folder / f"{role}.log", "--role", role, *more) for role in ("primary", "standby")]
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            for node in self.nodes:
                stack.enter_context(node)
            self.settled()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def urls(self) -> list[str]:
        """Of both nodes."""
        return [node.url for node in self.nodes]

    def settled(self) -> tuple[Served, Served]:
        """Primary and standby, once there is one of each."""

        def roles() -> tuple[Served, Served] | None:
            by_role = {node.role: node for node in self.nodes}
            if set(by_role) != {"primary", "standby"} or not by_role["primary"].ready:
                return None
            return by_role["primary"], by_role["standby"]

        found: tuple[Served, Served] = until(roles, "there is no primary with a standby")
        return found


@dataclass(frozen=True)
class Event:
    """An event of a stream: when and from where it came, its id, text, and the tokens that it tells of."""

    at: float
    url: str
    id: str
    text: str
    tokens: tuple[str, ...]
    finish: str | None


@dataclass
class Reader:
    """A client that reads one stream to its end, wherever it goes on; `start` it, then `join`."""

    path: str
    body: dict[str, Any]
    key: str
    urls: Sequence[str]
    events: list[Event] = field(default_factory=list)
    connections: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)
    resumable: list[str] = field(default_factory=list)
    done: bool = False

    def start(self) -> Self:
        """Begin to read, in a thread."""
        self._end = time.monotonic() + SECONDS
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def join(self) -> Self:
        """Wait for the end of the answer."""
        self._thread.join(SECONDS + 5)
        assert self.done, f"{self.key}: {len(self.events)} events, {self.refusals[-3:]}"
        return self

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(event.text for event in self.events)

    @property
    def tokens(self) -> list[str]:
        """All tokens, where they were asked for (log-probabilities)."""
        return [token for event in self.events for token in event.tokens]

    @property
    def count(self) -> int:
        """Tokens that were had."""
        return int(self.events[-1].id.rstrip(".")) if self.events else 0

    def _run(self) -> None:
        place = 0
        while not self.done and time.monotonic() < self._end:
            try:
                self._read(self.urls[place % len(self.urls)])
            except httpx.HTTPError as error:
                self.refusals.append(type(error).__name__)
            if not self.done:
                place += 1
                time.sleep(0.02)

    def _read(self, url: str) -> None:
        headers = {"Content-Type": "application/json", "Idempotency-Key": self.key}
        if self.events:
            headers["Last-Event-ID"] = self.events[-1].id
        timeout = httpx.Timeout(SILENCE_S, connect=0.5)
        content = json.dumps({**self.body, "stream": True})
        with httpx.stream("POST", url + self.path, content=content, headers=headers, timeout=timeout) as answer:
            if answer.status_code != 200:
                self.refusals.append(json.loads(answer.read())["error"]["code"])
                return
            self.connections.append(url)
            self.resumable.append(answer.headers["x-kvpager-resumable"])
            for id, data in _events(answer.iter_lines(), self.comments):
                if data == "[DONE]":
                    self.done = True
                    return
                told = json.loads(data)
                if "error" in told:
                    self.refusals.append(told["error"]["code"])
                    return
                self._take(url, id, told["choices"][0])

    def _take(self, url: str, id: str, choice: dict[str, Any]) -> None:
        text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        told = choice.get("logprobs") or {}
        tokens = told.get("tokens") or [one["token"] for one in told.get("content") or []]
        event = Event(time.monotonic(), url, id, text, tuple(tokens), choice["finish_reason"])
        self.events.append(event)


def _events(lines: Iterator[str], comments: list[str]) -> Iterator[tuple[str, str]]:
    """Id and data of each event."""
    id = ""
    for line in lines:
        if line.startswith("id: "):
            id = line.removeprefix("id: ")
        elif line.startswith(":"):
            comments.append(line)
        elif line.startswith("data: "):
            yield id, line.removeprefix("data: ")


def asked(tokens: int, chat: str = "tell me a tale, number") -> list[tuple[str, dict[str, Any]]]:
    """Eight requests: chats and completions, greedy and drawn with a seed, each of so many tokens."""
    requests: list[tuple[str, dict[str, Any]]] = []
    for number in range(8):
        drawn = {"temperature": 1.0, "seed": number} if number % 2 else {"temperature": 0}
        body: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True, **drawn}
        if number % 4 < 2:
            requests.append((TEXT, {"prompt": f"{chat} {number}", "logprobs": 1, **body}))
        else:
            messages = [{"role": "user", "content": f"{chat} {number}"}]
            requests.append((CHAT, {"messages": messages, "logprobs": True, "top_logprobs": 1, **body}))
    return requests


def readers(urls: Sequence[str], requests: Sequence[tuple[str, dict[str, Any]]], name: str) -> list[Reader]:
    """A client for each request, reading."""
    return [Reader(path, body, f"{name}-{i}", urls).start() for i, (path, body) in enumerate(requests)]
