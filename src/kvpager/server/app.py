"""The HTTP application: one gate that every request passes, and the routes behind it."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvpager import __version__
from kvpager.errors import KVPagerError
from kvpager.observe import CONTENT_TYPE, render
from kvpager.server import completions
from kvpager.server.auth import Caller
from kvpager.server.errors import ApiError, ErrorResponse, as_api_error, not_valid
from kvpager.server.hosts import require_host
from kvpager.server.limits import bounded
from kvpager.server.logs import LOGGER, request_id_of
from kvpager.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from kvpager.server.service import Service

__all__ = ["create_app"]

OPEN_PATHS = ("/health", "/ready", "/version")  # need no key and no place, so that watchers always get an answer
METRICS_PATH = "/metrics"  # needs a key where there are keys, and no place
_log = logging.getLogger(LOGGER)


def create_app(service: Service) -> FastAPI:
    """The application over a service; who runs it starts and stops the service."""
    app = FastAPI(
        title="kvpager",
        version=__version__,
        summary="An OpenAI-compatible server whose KV memory is bounded",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # where to is made from a header of the client's
    )
    _add_routes(app, service)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(KVPagerError, _on_own_error)
    app.add_middleware(Gate, service=service)
    if service.options.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=service.options.allowed_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("Authorization", "Content-Type", "Idempotency-Key", "Last-Event-ID", "X-Request-Id"),
            expose_headers=("X-KVPager-Resumable", "X-Request-Id"),
        )
    return app


class Gate:
    """What every request passes: its id, its caller, a place, bounds on its body, its line in the log.

    An exception that comes through is a fault of ours: it is logged whole, and the client hears that there was one.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app = app
        self.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = request_id_of(headers.get("x-request-id"))
        log: dict[str, Any] = {"id": request_id, "method": scope["method"], "path": scope["path"]}
        scope.setdefault("state", {}).update(log=log, request_id=request_id)
        started = time.monotonic()
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._admit(scope, headers, receive, send_with_id)
        except Exception:
            _log.exception("failed", extra={"fields": {"id": request_id}})
            if status is None:
                await ErrorResponse(as_api_error(RuntimeError()))(scope, receive, send_with_id)
        finally:
            self.service.answered[status or 500] += 1
            log["status"] = status
            log["seconds"] = round(time.monotonic() - started, 4)
            _log.log(logging.DEBUG if scope["path"] in OPEN_PATHS else logging.INFO, "request", extra={"fields": log})

    async def _admit(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        if scope["path"] in OPEN_PATHS:
            await self.app(scope, receive, send)
            return
        try:
            require_host(headers.get("host"), self.service.options.hosts)
            caller = self.service.keys.caller(headers.get("authorization"))
            scope["state"]["caller"] = caller
            scope["state"]["log"]["key"] = caller.key
            if scope["path"] == METRICS_PATH:
                await self.app(scope, receive, send)
                return
            with self.service.places:
                if scope["method"] == "POST":
                    _require_json(headers)
                    receive = bounded(scope, receive, self.service.options.limits)
                await self.app(scope, receive, send)
        except ApiError as error:
            await ErrorResponse(error)(scope, receive, send)


def _require_json(headers: Headers) -> None:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "The body must be JSON, sent with 'Content-Type: application/json'.")


def _on_http_error(request: Request, error: Exception) -> Response:
    if isinstance(error, ApiError):
        return ErrorResponse(error)
    assert isinstance(error, HTTPException)
    said = {404: f"There is no {request.url.path}.", 405: f"{request.method} is not for {request.url.path}."}
    if error.status_code == 400:  # FastAPI's word for a body in which its JSON parser broke off
        return ErrorResponse(ApiError(400, "The body is not JSON: no UTF-8, or nested too deep.", code="invalid_json"))
    message = said.get(error.status_code, str(error.detail))
    return ErrorResponse(ApiError(error.status_code, message, headers=error.headers))


def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return ErrorResponse(not_valid(error.errors()))


def _on_own_error(request: Request, error: Exception) -> Response:
    told = as_api_error(error)
    if told.status_code == 500:
        raise error
    return ErrorResponse(told)


def _add_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await completions.chat(service, request, body)

    @app.post("/v1/completions")
    async def text_completions(body: CompletionRequest, request: Request) -> Response:
        """Write on after a prompt."""
        return await completions.complete(service, request, body)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The names that the model is served under."""
        return {"object": "list", "data": [_card(service, name) for name in service.options.names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """One of them."""
        return _card(service, service.require_model(name))

    _add_text_routes(app, service)
    _add_store_routes(app, service)
    _add_state_routes(app, service)


def _add_text_routes(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        """Token ids of a prompt, or of a chat inside the model's template."""
        service.require_ready()
        service.require_model(body.model)
        texts = service.texts
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "prompt: give either prompt or messages", param="prompt", code="invalid_value")
        if body.messages is not None:
            ids = await texts.run(texts.chat, body.messages, body.add_generation_prompt is not False)
        else:
            ids = await texts.run(texts.encode, body.prompt, body.add_special_tokens is not False)
        strings = await texts.run(texts.strings, ids) if body.return_token_strs else None
        return {"count": len(ids), "max_model_len": service.max_model_len, "tokens": ids, "token_strs": strings}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        """The text of token ids."""
        service.require_ready()
        service.require_model(body.model)
        return {"prompt": await service.texts.run(service.texts.known, body.tokens)}


def _add_store_routes(app: FastAPI, service: Service) -> None:
    @app.delete("/v1/sessions/{name:path}", status_code=204)
    async def forget_session(name: str, request: Request) -> Response:
        """Forget one of the caller's sessions: 204, or 404 where there is none."""
        service.require_ready()
        caller: Caller = request.scope["state"]["caller"]
        if not await service.engine.forget_session(caller.salt, name):
            raise ApiError(404, "There is no such session.", param="session", code="session_not_found")
        return Response(status_code=204)

    @app.delete("/v1/store")
    async def erase(request: Request) -> dict[str, int]:
        """Forget all that the caller's requests have left here; tells how many stored blocks and sessions it was."""
        service.require_ready()
        caller: Caller = request.scope["state"]["caller"]
        service.returning.forget(caller.salt)
        return {"erased": await service.engine.erase(caller.salt)}


def _add_state_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> Response:
        """200 while the process can serve or is about to, 503 once its engine has failed."""
        state = service.engine.health
        if not state.alive:
            raise ApiError(503, f"The engine has {state.state}.", code=f"engine_{state.state}")
        return JSONResponse({"status": "ok", "state": state.state, **_store_state(service), **_pair(service)})

    @app.get("/ready")
    async def ready() -> Response:
        """200 while requests are taken, 503 before and after."""
        service.require_ready()
        return JSONResponse({"status": "ready", **_store_state(service), **_pair(service)})

    @app.get("/version")
    async def version() -> dict[str, str]:
        """The version of kvpager."""
        return {"version": __version__}

    @app.get("/stats")
    async def stats() -> dict[str, Any]:
        """Requests, tokens and memory of the engine, between two of its steps."""
        if service.engine.health.state != "standby":
            service.require_ready()
        figures = await service.engine.stats()
        return {**asdict(figures), "requests": service.places.taken, **_pair(service)}

    @app.get(METRICS_PATH)
    async def metrics() -> Response:
        """All figures for Prometheus."""
        return Response(render(await service.snapshot()), media_type=CONTENT_TYPE)


def _store_state(service: Service) -> dict[str, Any]:
    """How the store does, where there is one: whatever that is, requests are answered."""
    states = service.engine.store_states
    if not states:
        return {}
    worst = next((state for state in states.values() if state != "ok"), "ok")
    return {"store": worst, "stores": states} if len(states) > 1 else {"store": worst}


def _pair(service: Service) -> dict[str, Any]:
    """How the pair does that this server is one of, if it is."""
    return {} if service.replication is None else {"replication": service.replication()}


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "kvpager",
        "root": service.options.names[0],
        "parent": None,
        "max_model_len": service.max_model_len or None,
    }
