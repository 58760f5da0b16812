"""Bounds on bodies and on how many are served at once; pages of other origins."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from kvpager.server.limits import Limits
from tests.server.harness import LiveServer, error_of, fake_server

HEAD = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def answer_to(server: LiveServer, *parts: bytes) -> bytes:
    """What the server says to raw bytes, until it closes or has said it all."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        for part in parts:
            try:
                connection.sendall(part)
            except OSError:  # it has answered and closed before all was sent
                break
        data = b""
        while b"}}" not in data:
            more = connection.recv(65536)
            if not more:
                break
            data += more
        return data


def test_a_body_is_bounded_whether_it_says_its_length_or_not() -> None:
    with fake_server(limits=Limits(body_bytes=1000)) as server:
        answer = server.post("/v1/completions", {"prompt": "a" * 1000})
        assert answer.status_code == 413
        assert error_of(answer)["code"] == "request_too_large"
        chunk = b"fa\r\n" + b"a" * 250 + b"\r\n"
        said = answer_to(server, HEAD.encode() + b"Transfer-Encoding: chunked\r\n\r\n", *[chunk] * 5)
        assert b" 413 " in said
        assert b"request_too_large" in said
        assert server.complete("a" * 900, max_tokens=1)


def test_a_body_that_does_not_come_is_given_up() -> None:
    with fake_server(limits=Limits(body_seconds=0.05)) as server:
        said = answer_to(server, HEAD.encode() + b'Content-Length: 100\r\n\r\n{"prompt"')
        assert b" 408 " in said
        assert b"request_timeout" in said
        server.until(lambda: server.service.places.taken == 0)
        assert server.complete("a", max_tokens=1)


def test_only_so_many_requests_are_served_at_once() -> None:
    with fake_server(limits=Limits(connections=2)) as server:
        server.engine.gate.clear()
        held = [server.raw("/v1/completions", {"prompt": "a", "max_tokens": 2}) for _ in range(2)]
        server.until(lambda: server.service.places.taken == 2)
        answer = server.post("/v1/completions", {"prompt": "a"})
        assert answer.status_code == 503
        assert error_of(answer)["code"] == "too_many_connections"
        assert answer.headers["retry-after"]
        assert server.client.get("/health").status_code == 200  # watchers need no place
        server.engine.gate.set()
        for connection in held:
            assert b" 200 " in connection.recv(65536)
            connection.close()
        server.until(lambda: server.service.places.taken == 0)
        assert server.complete("a", max_tokens=1)


def test_a_full_queue_asks_to_come_again() -> None:
    with fake_server(max_queue=1) as server:
        server.engine.gate.clear()
        waiting = server.raw("/v1/completions", {"prompt": "a", "max_tokens": 2})
        server.until(lambda: bool(server.engine.requests))
        server.engine.gate.set()
        several = server.post("/v1/completions", {"prompt": ["a", "b", "c"], "max_tokens": 60_000})
        assert several.status_code == 429
        assert error_of(several) == {
            "message": "as many requests wait as may",
            "type": "rate_limit_error",
            "param": None,
            "code": "queue_full",
        }
        assert several.headers["retry-after"] == "1"
        waiting.close()
        server.until(lambda: not server.engine.requests)  # none of the three was left behind


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "aaaa"}, "prompt"),
        ({"prompt": "a", "max_tokens": 6}, "max_tokens"),
        ({"prompt": "a", "n": 3}, "n"),
        ({"prompt": ["a", "b", "c"]}, "prompt"),
        ({"prompt": "a", "stop": ["x", "y"]}, "stop"),
        ({"prompt": "a", "stop": ["xyz"]}, "stop"),
        ({"prompt": "a", "logprobs": 3}, "logprobs"),
    ],
)
def test_each_limit_can_be_set(body: dict[str, Any], param: str) -> None:
    limits = Limits(prompt_tokens=3, max_tokens=5, n=2, prompts=2, stop=1, stop_characters=2, logprobs=2)
    with fake_server(limits=limits) as server:
        answer = server.post("/v1/completions", body)
        assert answer.status_code == 400
        assert error_of(answer)["param"] == param
        assert server.complete("aaa", max_tokens=5, n=2, stop="xy", logprobs=2)
        assert server.complete("aaa")["usage"]["completion_tokens"] == 5  # the default is within the limit, too


def test_pages_of_other_origins_are_let_in_only_when_they_were_named() -> None:
    ask = {"Origin": "https://good.example", "Access-Control-Request-Method": "POST"}
    ask |= {"Access-Control-Request-Headers": "authorization,content-type"}
    with fake_server() as server:
        assert "access-control-allow-origin" not in server.client.options("/v1/models", headers=ask).headers
    with fake_server(allowed_origins=("https://good.example",), api_keys=("k",)) as server:
        allowed = server.client.options("/v1/chat/completions", headers=ask)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://good.example"
        other = server.client.options("/v1/models", headers={**ask, "Origin": "https://bad.example"})
        assert "access-control-allow-origin" not in other.headers
        refused = server.client.get("/v1/models", headers={"Origin": "https://good.example"})
        assert refused.status_code == 401  # and the page may read why
        assert refused.headers["access-control-allow-origin"] == "https://good.example"


def test_a_request_is_cut_when_its_time_is_over(folder: str) -> None:
    from tests.server.harness import real_server

    with real_server(folder, request_seconds=0.001) as server:
        (choice,) = server.complete("a", max_tokens=400, ignore_eos=True)["choices"]
        assert choice["finish_reason"] == "length"
        assert choice["stop_reason"] == "deadline"
