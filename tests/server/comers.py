"""Clients of streams that lose their connection and come back."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tests.server.harness import LiveServer


@dataclass
class Comer:
    """A client of one stream: what it has had of it over all of its connections.

    chunks   the choices of chunks, in order; last: the id of the last event; comments: other lines
    """

    path: str
    body: dict[str, Any]
    key: str = "mine"
    headers: dict[str, str] = field(default_factory=dict)
    chunks: list[dict[str, Any]] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    last: str | None = None
    done: bool = False
    usage: Any = None
    resumable: list[str] = field(default_factory=list)

    def read(self, server: LiveServer, events: int = 10**9) -> Comer:
        """Connect, and read so many events at most before the connection breaks."""
        sent = {"Content-Type": "application/json", "Idempotency-Key": self.key, **self.headers}
        if self.last is not None:
            sent["Last-Event-ID"] = self.last
        content = json.dumps({**self.body, "stream": True})
        with server.client.stream("POST", self.path, content=content, headers=sent) as answer:
            assert answer.status_code == 200, answer.read()
            self.resumable.append(answer.headers["x-kvpager-resumable"])
            for line in answer.iter_lines():
                if not events:
                    return self
                events -= self._take(line)
        return self

    def _take(self, line: str) -> bool:
        """Take a line; whether an event ended with it."""
        if line.startswith("id: "):
            self.last = line.removeprefix("id: ")
        elif line.startswith(":"):
            self.comments.append(line)
        elif line == "data: [DONE]":
            self.done = True
        elif line.startswith("data: "):
            told = json.loads(line.removeprefix("data: "))
            if "error" in told:
                self.comments.append(told["error"]["code"])
                return True
            self.names.add(told["id"])
            self.chunks += told["choices"]
            self.usage = told.get("usage") or self.usage
            return True
        return False

    def text(self, index: int = 0) -> str:
        own = [one for one in self.chunks if one["index"] == index]
        return "".join(one["text"] if "text" in one else one["delta"].get("content", "") for one in own)
