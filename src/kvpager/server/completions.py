"""From a request for a completion to its answer: prompts to tokens, into the engine, back as one whole or a stream."""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvpager.engine.outputs import FinishReason, Output
from kvpager.engine.params import SamplingParams
from kvpager.engine.stream import Stream
from kvpager.errors import EngineStopped
from kvpager.server.answers import (
    Choice,
    Echo,
    Logprobs,
    Totals,
    chat_chunk,
    chat_whole,
    completion_chunk,
    completion_whole,
)
from kvpager.server.auth import Caller
from kvpager.server.errors import ApiError, as_api_error
from kvpager.server.protocol import ChatRequest, CompletionRequest, refuse_unsupported, sampling_params
from kvpager.server.returning import Client, Position, Reply, idempotency_key
from kvpager.server.service import Service
from kvpager.server.streaming import DONE, ClientGone, EventStream, all_or_none, comment, event, merged, unless_gone

__all__ = ["chat", "complete"]

KEYLESS = "Last-Event-ID: the request that it goes on with is named by its Idempotency-Key, which is missing"
BEYOND = "Last-Event-ID: the answer has fewer tokens than that"


async def chat(service: Service, request: Request, body: ChatRequest) -> Response:
    """Answer /v1/chat/completions."""
    job = Job(service, request, body)
    job.prompts = [await service.texts.run(service.texts.chat, body.messages, body.add_generation_prompt is not False)]
    return await job.answer("messages")


async def complete(service: Service, request: Request, body: CompletionRequest) -> Response:
    """Answer /v1/completions."""
    job = Job(service, request, body)
    limit = service.options.limits.prompts
    prompts = _prompts(body.prompt)
    if len(prompts) > limit:
        raise ApiError(
            400, f"prompt: {len(prompts)} prompts are more than {limit}", param="prompt", code="invalid_value"
        )
    special = body.add_special_tokens is not False
    job.prompts = [
        await service.texts.run(service.texts.encode, prompt, special) if isinstance(prompt, str) else prompt
        for prompt in prompts
    ]
    if body.echo:
        for prompt, ids in zip(prompts, job.prompts, strict=True):
            text = prompt if isinstance(prompt, str) else await service.texts.run(service.texts.decode, ids)
            job.echoes.append(Echo(text, ids))
        job.written = body.max_tokens != 0
    return await job.answer("prompt")


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """One or several prompts, each text or token ids, as a list of them."""
    if isinstance(prompt, str):
        return [prompt]
    if all(isinstance(part, int) for part in prompt):
        return [[part for part in prompt if isinstance(part, int)]]
    return [part for part in prompt if not isinstance(part, int)]


@dataclass
class Job:
    """One HTTP request for completions: some prompts, n answers to each. Answer i of prompt p is choice p * n + i."""

    service: Service
    request: Request
    body: ChatRequest | CompletionRequest
    prompts: list[list[int]] = field(default_factory=list)
    echoes: list[Echo] = field(default_factory=list)  # the prompts, where they are to be shown
    written: bool = True  # whether what is written is shown: not where the prompt alone is wanted

    def __post_init__(self) -> None:
        self.service.require_ready()
        refuse_unsupported(self.body)
        self.model = self.service.require_model(self.body.model)
        self.params: SamplingParams = sampling_params(self.body, self.service.options.limits)
        self.id = ("chatcmpl-" if self.is_chat else "cmpl-") + uuid.uuid4().hex
        self.created = int(time.time())
        self.totals = Totals()
        self.reply: Reply | None = None  # where the client may come back
        self.client: Client | None = None
        self.had: Position | None = None  # what the client has had of it

    @property
    def is_chat(self) -> bool:
        """Whether it is a chat's."""
        return isinstance(self.body, ChatRequest)

    async def answer(self, param: str) -> Response:
        """Run it; `param` is the field that the prompts came in. Raises ApiError, or what the engine's `add` raises."""
        self.service.require_fit(self.prompts, self.params.max_tokens, param)
        if self.body.session is not None and len(self.prompts) > 1:
            text = f"session: it goes on with one prompt, and these are {len(self.prompts)}"
            raise ApiError(400, text, param="session", code="invalid_value")
        log = self.request.scope["state"]["log"]
        if self.service.options.log_prompts:
            texts = self.service.texts
            log["prompts"] = [await texts.run(texts.decode, ids) for ids in self.prompts]
        self.totals.shown = self.written
        try:
            key = idempotency_key(self.request.headers.get("idempotency-key"))
            if key is None and "last-event-id" in self.request.headers:
                raise ApiError(400, KEYLESS, param="Last-Event-ID", code="invalid_value")
            if key is not None:
                self.reply = await unless_gone(self.request.receive, self._joined(key))
            return (
                await unless_gone(self.request.receive, self._whole()) if not self.body.stream else await self._stream()
            )
        except ClientGone:
            log["gone"] = True
            return Response(status_code=499)  # nobody reads it; the log shows it

    # ---- coming back ----

    async def _joined(self, key: str) -> Reply | None:
        """The answer that the client's Idempotency-Key stands for, begun or found; None where no more can be kept."""
        had = self.request.headers.get("last-event-id")
        self.had = None if had is None else Position.parse(had, len(self.prompts) * self.params.n)
        asked = [self.is_chat, self.body.model_dump(mode="json", exclude_unset=True)]
        digest = hashlib.sha256(json.dumps(asked).encode()).hexdigest()
        self.client = Client(key, digest, self.id, self.created, 0, len(self.prompts))
        caller: Caller = self.request.scope["state"]["caller"]
        returning = self.service.returning
        reply = await returning.join(caller.salt, self.client, self._submit, anew=had is None)
        if reply is None:
            self.client = None
        else:
            self.id, self.created = reply.id, reply.created
        return reply

    async def _source(self) -> tuple[AsyncGenerator[tuple[int, Output]], list[Stream]]:
        """Where the outputs come from, and the streams that end with the client."""
        if self.reply is not None:
            return self.service.returning.read(self.reply), []
        streams = await self._submit()
        return merged(streams), streams

    def _resumable(self) -> bool:
        return self.reply is not None and self.service.returning.resumable(self.reply)

    def _headers(self) -> dict[str, str]:
        asked = "idempotency-key" in self.request.headers
        return {"X-KVPager-Resumable": str(self._resumable()).lower()} if asked else {}

    # ---- running ----

    async def _submit(self) -> list[Stream]:
        """All prompts into the engine, or none of them; together, since the engine takes requests between its steps."""
        caller: Caller = self.request.scope["state"]["caller"]
        seconds = self.service.options.request_seconds
        return await all_or_none(
            self.service.engine.submit(
                f"{self.id}-{number}",
                ids,
                self.params,
                priority=self.body.priority or 0,
                deadline=None if seconds is None else time.monotonic() + seconds,
                salt=caller.salt,
                session=self.body.session,
                client=None if self.client is None else replace(self.client, number=number).pack(),
                apart=self.client is not None,
            )
            for number, ids in enumerate(self.prompts)
        )

    async def _outputs(
        self, source: AsyncGenerator[tuple[int, Output]], position: Position
    ) -> AsyncGenerator[tuple[int, Output]]:
        """(number of the choice, output) as they come, and `position` with them; raises ApiError where one ends with an
        error.
        """
        async with aclosing(source) as news:
            async for prompt, output in news:
                if output.finish_reason == "error":
                    self.request.scope["state"]["log"]["error"] = output.error
                    raise ApiError(
                        500, "The answer could not be finished; the server's log says why.", code="internal_error"
                    )
                position.add(prompt * self.params.n + output.index, output)
                if output.usage is not None:
                    self.totals.add(prompt, output.usage)
                    self._log_usage()
                if output.prompt_logprobs is not None and self.echoes:
                    self.echoes[prompt].logprobs = output.prompt_logprobs
                if not self.written:
                    finish: FinishReason | None = None if output.finish_reason is None else "length"
                    output = replace(output, text="", token_ids=(), logprobs=(), finish_reason=finish)
                yield prompt * self.params.n + output.index, output

    def _log_usage(self) -> None:
        usage = self.totals.as_dict()
        log = self.request.scope["state"]["log"]
        log["prompt_tokens"] = usage["prompt_tokens"]
        log["completion_tokens"] = usage["completion_tokens"]
        log["cached_tokens"] = usage["prompt_tokens_details"]["cached_tokens"]

    # ---- answering ----

    def _logprobs(self) -> list[Logprobs | None]:
        count = len(self.prompts) * self.params.n
        top = self.params.logprobs
        return [None if top is None else Logprobs(self.service.texts, top) for _ in range(count)]

    def _echo(self, choice: int) -> Echo | None:
        return self.echoes[choice // self.params.n] if self.echoes else None

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    async def _whole(self) -> Response:
        source, streams = await self._source()
        choices = [Choice() for _ in range(len(self.prompts) * self.params.n)]
        try:
            async with aclosing(self._outputs(source, Position(len(choices)))) as outputs:
                async for choice, output in outputs:
                    choices[choice].add(output)
        finally:
            for stream in streams:
                stream.close()
        self._log_texts(["".join(choice.texts) for choice in choices])
        if self.is_chat:
            told = chat_whole(choices, self._logprobs())
        else:
            told = completion_whole(choices, self._logprobs(), [self._echo(place) for place in range(len(choices))])
        return JSONResponse(
            {
                **self._head("chat.completion" if self.is_chat else "text_completion"),
                "choices": told,
                "usage": self.totals.as_dict(),
                "kvpager": self.totals.paging(),
            },
            headers=self._headers(),
        )

    async def _stream(self) -> Response:
        source, streams = await unless_gone(self.request.receive, self._source())
        return EventStream(self._events(source), streams, self._headers())

    async def _events(self, source: AsyncGenerator[tuple[int, Output]]) -> AsyncGenerator[bytes]:
        position, resumable = Position(len(self.prompts) * self.params.n), self._resumable()
        head = self._head("chat.completion.chunk" if self.is_chat else "text_completion")
        no_usage: dict[str, Any] = {"usage": None} if self.body.usage_in_stream else {}
        logprobs = self._logprobs()
        begun: set[int] = set()
        texts: dict[int, list[str]] = {}
        try:
            async with aclosing(self._outputs(source, position)) as outputs:
                async for choice, output in outputs:
                    first = choice not in begun
                    begun.add(choice)
                    if self.service.options.log_prompts:
                        texts.setdefault(choice, []).append(output.text)
                    if self.is_chat:
                        told = chat_chunk(choice, output, logprobs[choice], first=first)
                    else:
                        told = completion_chunk(choice, output, logprobs[choice], self._echo(choice) if first else None)
                    if self.had is not None and self.had.passes(position, choice):
                        raise ApiError(400, BEYOND, param="Last-Event-ID", code="invalid_value")
                    if self.had is not None and self.had.covers(position, choice):
                        continue  # the client had it before it came back
                    if first or output.text or output.finish_reason is not None or told["logprobs"]:
                        yield event({**head, "choices": [told], **no_usage}, self._at(position))
                    if resumable and not self._resumable():
                        resumable = False
                        yield comment("resumable false")
        except (ApiError, EngineStopped) as error:  # the headers are out: it is told as OpenAI's streams do
            yield event(as_api_error(error).body())
            return
        self._log_texts(["".join(parts) for _, parts in sorted(texts.items())])
        if self.body.usage_in_stream:
            yield event({**head, "choices": [], "usage": self.totals.as_dict(), "kvpager": self.totals.paging()})
        yield DONE

    def _at(self, position: Position) -> str | None:
        """The id of an event: where a client that can come back was."""
        return None if self.reply is None else str(position)

    def _log_texts(self, texts: list[str]) -> None:
        if self.service.options.log_prompts:
            self.request.scope["state"]["log"]["answers"] = texts
