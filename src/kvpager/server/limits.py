"""What a request may ask for at most, and what a client may make the server hold."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.types import Message, Receive, Scope

from kvpager.server.errors import RETRY_AFTER_S, ApiError

__all__ = ["Limits", "Places", "bounded"]


@dataclass(frozen=True)
class Limits:
    """The most that one request, or all clients together, may take.

    body_bytes      of a request's body
    body_seconds    until a body has arrived whole
    prompt_tokens   of one prompt; None: what the model's context leaves
    max_tokens      that a request may ask for; None: what the context leaves
    n               answers to one prompt
    prompts         prompts in one request
    stop            texts to stop at
    stop_characters of one such text
    logprobs        alternatives told beside a token
    connections     requests that are served at once, waiting ones among them
    replies         answers that clients may come back to, running ones among them
    reply_bytes     about what is kept of these in memory
    """

    body_bytes: int = 4 * 2**20
    body_seconds: float = 30.0
    prompt_tokens: int | None = None
    max_tokens: int | None = None
    n: int = 16
    prompts: int = 128
    stop: int = 16
    stop_characters: int = 256
    logprobs: int = 20
    connections: int = 256
    replies: int = 256
    reply_bytes: int = 64 * 2**20


class Places:
    """A number of places for requests; who finds none is told to come again."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.taken = 0

    def __enter__(self) -> Places:
        if self.taken >= self.count:
            raise ApiError(
                503,
                f"The server answers {self.count} requests at once, and that many are there.",
                code="too_many_connections",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )
        self.taken += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.taken -= 1


def bounded(scope: Scope, receive: Receive, limits: Limits) -> Receive:
    """`receive` that gives up on a body that is too large, counted as it comes, or that takes too long.

    Raises ApiError: 413 at once where the headers say so already, 413 or 408 from the new `receive`.
    """
    too_large = ApiError(413, f"The body is larger than {limits.body_bytes} bytes.")
    declared = dict(scope["headers"]).get(b"content-length", b"")
    if declared.isdigit() and int(declared) > limits.body_bytes:
        raise too_large
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limits.body_seconds
    received = 0
    complete = False

    async def bounded_receive() -> Message:
        nonlocal received, complete
        if complete:  # from here on it waits for the client to go away, however long that takes
            return await receive()
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            raise ApiError(408, f"The body did not arrive within {limits.body_seconds:g} seconds.") from None
        received += len(message.get("body", b""))
        if received > limits.body_bytes:
            raise too_large
        complete = not message.get("more_body", False)
        return message

    return bounded_receive
