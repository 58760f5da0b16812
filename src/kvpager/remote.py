"""A client of OpenAI-compatible servers, kvpager's own and others: what is asked for, streamed back in pieces.

The only module that imports httpx, and only when a server is spoken to.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from kvpager.errors import InputError, MissingDependency, RemoteError

__all__ = ["Endpoint", "Piece", "Remote"]

Endpoint = Literal["completions", "chat"]
PATHS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
CONNECT_SECONDS = 10.0
DONE = "[DONE]"


@dataclass(frozen=True)
class Piece:
    """One event of a stream: text (may be empty), why the answer ended, and the token counts where they came."""

    text: str = ""
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None


class Remote:
    """A server by its URL, with or without ``/v1`` at the end. `transport` stands in for the network in tests.

    Every failure is a RemoteError whose `kind` says which: "connect", "timeout", "http_429" and the like, "cut" (the
    stream ended before its end mark), "malformed" (what came is not what the protocol says) or "server" (the
    stream brought an error). Raises InputError for what is no URL, MissingDependency without httpx.
    """

    def __init__(self, url: str, api_key: str | None = None, *, timeout: float = 600.0, transport: Any = None) -> None:
        try:
            import httpx
        except ImportError as error:
            raise MissingDependency("talking to a server needs httpx: pip install 'kvpager[serve]'") from error
        self._httpx = httpx
        self.url = url.rstrip("/").removesuffix("/v1")
        try:
            parsed = httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise InputError(f"url: {url!r} is not a URL ({error})") from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise InputError(f"url: {url!r} is not like http://127.0.0.1:8000")
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(timeout, connect=min(CONNECT_SECONDS, timeout)),
            # no limit of its own: how many requests run at once is the caller's to say
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            transport=transport,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def models(self) -> list[str]:
        """The names that the server lists; raises RemoteError."""
        answer = await self._json("GET", "/v1/models")
        try:
            return [str(model["id"]) for model in answer["data"]]
        except (KeyError, TypeError):
            raise RemoteError("malformed", f"{self.url}/v1/models has no list of models") from None

    async def tokenize(self, model: str, text: str) -> list[int] | None:
        """The token ids of `text` without marks around it; None where the server does not tell.

        Understands the form that vLLM and kvpager share, and llama.cpp's. Raises RemoteError where nobody answers.
        """
        forms: list[dict[str, Any]] = [
            {"model": model, "prompt": text, "add_special_tokens": False},
            {"content": text, "add_special": False},
        ]
        for body in forms:
            try:
                answer = await self._json("POST", "/tokenize", body)
            except RemoteError as error:
                if error.status is None and error.kind != "malformed":
                    raise
                continue
            tokens = answer.get("tokens") if isinstance(answer, dict) else None
            if isinstance(tokens, list) and tokens and all(isinstance(token, int) for token in tokens):
                return tokens
        return None

    async def stream(self, endpoint: Endpoint, body: Mapping[str, Any]) -> AsyncGenerator[Piece]:
        """Ask with `body` and give what comes, a piece for each event; raises RemoteError."""
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        ended = False
        try:
            async with self._client.stream("POST", PATHS[endpoint], json=asked) as response:
                await self._require_success(response)
                async for line in response.aiter_lines():
                    if not line.startswith("data:"):
                        continue
                    data = line.removeprefix("data:").strip()
                    if data == DONE:
                        ended = True
                        break
                    yield _piece(data)
        except self._httpx.HTTPError as error:
            raise self._failure(error) from error
        if not ended:
            raise RemoteError("cut", "the stream ended before its end mark")

    async def _json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        try:
            response = await self._client.request(method, path, json=body)
            await self._require_success(response)
            return response.json()
        except self._httpx.HTTPError as error:
            raise self._failure(error) from error
        except ValueError:
            raise RemoteError("malformed", f"{self.url}{path} did not answer with JSON") from None

    async def _require_success(self, response: Any) -> None:
        if response.is_success:
            return
        text = (await response.aread()).decode("utf-8", "replace")
        retry_after = response.headers.get("retry-after", "")
        raise RemoteError(
            f"http_{response.status_code}",
            f"{response.status_code} {_message(text) or response.reason_phrase}",
            status=response.status_code,
            retry_after=float(retry_after) if retry_after.isdigit() else None,
        )

    def _failure(self, error: Exception) -> RemoteError:
        httpx = self._httpx
        # the message may be empty, and then the type says more
        said = str(error) or type(error).__name__
        if isinstance(error, httpx.TimeoutException):
            return RemoteError("timeout", f"{self.url}: {said}")
        if isinstance(error, (httpx.ReadError, httpx.RemoteProtocolError)):
            return RemoteError("cut", f"{self.url}: {said}")
        return RemoteError("connect", f"{self.url}: {said}")


def _piece(data: str) -> Piece:
    """An event's JSON as a piece; raises RemoteError for an error in the stream and for what is no such event."""
    try:
        event = json.loads(data)
        if event.get("error") is not None:
            raise RemoteError("server", _message(data) or "the stream brought an error")
        choices = event.get("choices") or [{}]
        choice = choices[0]
        delta = choice.get("delta") or {}
        return Piece(
            text=str(choice.get("text") or delta.get("content") or ""),
            finish_reason=choice.get("finish_reason"),
            usage=event.get("usage"),
        )
    except (ValueError, AttributeError, KeyError, TypeError, IndexError):
        raise RemoteError("malformed", f"no event of the protocol: {data[:80]!r}") from None


def _message(text: str) -> str:
    """The message of an error's body, as servers shape it; else the body's beginning."""
    try:
        error = json.loads(text).get("error")
        message = error.get("message") if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        message = None
    return " ".join(str(message or text).split())[:200]
