"""The client of OpenAI-compatible servers: what it sends, what it makes of answers, and every failure by its name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from kvpager.errors import InputError, RemoteError
from kvpager.remote import Endpoint, Piece, Remote

Handler = Callable[[httpx.Request], httpx.Response]
URL = "http://server:1"
ENDED = "data: [DONE]\n\n"


def events(*data: Any) -> str:
    return "".join(f"data: {one if isinstance(one, str) else json.dumps(one)}\n\n" for one in data)


def streamed(text: str, endpoint: Endpoint = "completions") -> list[Piece]:
    async def collect() -> list[Piece]:
        transport = httpx.MockTransport(lambda request: httpx.Response(200, text=text))
        async with Remote(URL, transport=transport) as remote:
            return [piece async for piece in remote.stream(endpoint, {})]

    return asyncio.run(collect())


def asked(handler: Handler, do: Callable[[Remote], Any], key: str | None = None, url: str = URL) -> Any:
    async def call() -> Any:
        async with Remote(url, key, transport=httpx.MockTransport(handler)) as remote:
            return await do(remote)

    return asyncio.run(call())


def test_pieces_of_both_endpoints() -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 2}
    ending = {"choices": [], "usage": usage}
    completions = events({"choices": [{"text": "né"}]}, {"choices": [{"text": "", "finish_reason": "stop"}]}, ending)
    assert streamed(completions + ENDED) == [Piece("né"), Piece("", "stop"), Piece(usage=usage)]
    chat = events(
        {"choices": [{"delta": {"role": "assistant", "content": None}}]},
        {"choices": [{"delta": {"content": "a b"}}]},
        {"choices": [{"delta": {}, "finish_reason": "length"}], "usage": usage},
    )
    assert streamed(chat + ENDED, "chat") == [Piece(), Piece("a b"), Piece("", "length", usage)]


def test_comments_other_fields_and_line_ends_of_all_kinds_are_read_over() -> None:
    text = ': ping\r\n\r\nevent: x\r\nid: 3\r\ndata:{"choices":[{"text":"a"}]}\r\n\r\nretry: 5\n\ndata:[DONE]\r\n\r\n'
    assert streamed(text) == [Piece("a")]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("", "cut"),
        (events({"choices": [{"text": "a"}]}), "cut"),
        (events("{no json") + ENDED, "malformed"),
        (events("[1]") + ENDED, "malformed"),
        (events("3") + ENDED, "malformed"),
        (events({"choices": {"0": 1}}) + ENDED, "malformed"),
        (events({"choices": [7]}) + ENDED, "malformed"),
        (events({"error": {"message": "it stopped"}}), "server"),
    ],
)
def test_what_goes_wrong_in_a_stream_has_a_name(text: str, kind: str) -> None:
    with pytest.raises(RemoteError) as failed:
        streamed(text)
    assert failed.value.kind == kind
    assert str(failed.value)


def test_a_refusal_tells_status_message_and_how_long_to_wait() -> None:
    body = {"error": {"message": "the queue\nis full", "code": "x"}}

    def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(429, json=body, headers={"Retry-After": "12"})

    async def first(remote: Remote) -> None:
        async for _ in remote.stream("chat", {}):
            pass

    with pytest.raises(RemoteError, match="429 the queue is full") as failed:
        asked(handler, first)
    assert (failed.value.kind, failed.value.status, failed.value.retry_after) == ("http_429", 429, 12.0)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (httpx.ConnectError("refused"), "connect"),
        (httpx.ReadTimeout(""), "timeout"),
        (httpx.ConnectTimeout(""), "timeout"),
        (httpx.ReadError(""), "cut"),
        (httpx.RemoteProtocolError("closed"), "cut"),
    ],
)
def test_a_network_that_fails_has_a_name(error: Exception, kind: str) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise error

    with pytest.raises(RemoteError, match=URL) as failed:
        asked(handler, Remote.models)
    assert failed.value.kind == kind


@pytest.mark.parametrize("url", [URL, URL + "/", URL + "/v1", URL + "/v1/"])
def test_the_url_may_end_in_v1_and_the_key_goes_along(url: str) -> None:
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={"data": [{"id": "m"}]})

    assert asked(handler, Remote.models, key="k1", url=url) == ["m"]
    assert str(seen[0].url) == URL + "/v1/models"
    assert seen[0].headers["authorization"] == "Bearer k1"


@pytest.mark.parametrize("url", ["server:1", "ftp://server", "http://", ""])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(InputError, match="url: "):
        Remote(url)


@pytest.mark.parametrize("answer", [{"models": []}, [], {"data": [{}]}, {"data": None}])
def test_a_list_of_models_that_is_none_is_malformed(answer: Any) -> None:
    with pytest.raises(RemoteError) as failed:
        asked(lambda request: httpx.Response(200, json=answer), Remote.models)
    assert failed.value.kind == "malformed"


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"prompt": (200, {"tokens": [1, 2], "count": 2})}, [1, 2]),  # vLLM's
        ({"prompt": (200, {"tokens": []}), "content": (200, {"tokens": [3]})}, [3]),  # llama.cpp's
        ({"prompt": (422, {}), "content": (200, {"tokens": [3]})}, [3]),
        ({"prompt": (404, {}), "content": (404, {})}, None),
        ({"prompt": (200, "no object"), "content": (200, {"tokens": ["a"]})}, None),
    ],
)
def test_tokenize_understands_two_forms(answers: dict[str, tuple[int, Any]], expected: list[int] | None) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        status, answer = answers["prompt" if "prompt" in body else "content"]
        return httpx.Response(status, json=answer)

    assert asked(handler, lambda remote: remote.tokenize("m", "text")) == expected


def test_tokenize_of_a_server_that_is_not_there_is_no_missing_endpoint() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(RemoteError) as failed:
        asked(handler, lambda remote: remote.tokenize("m", "text"))
    assert failed.value.kind == "connect"
