"""What the routes share: the engine, the model behind it, and what requests may do."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvpager import __version__
from kvpager.config import parse_size
from kvpager.engine.async_engine import AsyncEngine, Look
from kvpager.errors import EngineStopped, InputError
from kvpager.observe import Snapshot
from kvpager.observe.process import memory_limit_bytes, rss_bytes
from kvpager.server.auth import ApiKeys
from kvpager.server.errors import RETRY_AFTER_S, ApiError
from kvpager.server.limits import Limits, Places
from kvpager.server.returning import Returning
from kvpager.server.texts import Texts

if TYPE_CHECKING:
    from kvpager.engine.engine import Engine
    from kvpager.journaled import Resumable

__all__ = ["Served", "Service", "ServiceOptions"]

LOOK_SECONDS = 2.0  # that metrics wait for the end of a step


@dataclass(frozen=True)
class ServiceOptions:
    """How to serve.

    names             the model's names for clients; the first is the one in answers
    api_keys          who may ask; none: everybody
    allowed_origins   web pages that may use the server from a browser, as in "https://example.org"; "*" for all
    hosts             names that the server goes by, beside its addresses and localhost; None for all
    log_prompts       prompts and answers in the logs
    request_seconds   after which a request is cut short; None for no bound
    resume_seconds    that a request with an Idempotency-Key goes on without its client, and is kept after its end
    """

    names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    allowed_origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] | None = None
    log_prompts: bool = False
    request_seconds: float | None = None
    resume_seconds: float = 60.0


@dataclass(frozen=True)
class Served:
    """A model that is ready: its engine, its tokenizer, and the most tokens of prompt and answer together."""

    engine: Engine
    tokenizer: Any
    max_model_len: int


class Service:
    """The engine with what belongs to it. `make` loads model and engine, in the engine's thread."""

    def __init__(
        self,
        make: Callable[[], Served],
        options: ServiceOptions,
        replication: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        """`replication`: what there is to say of a pair, of which this server is one; then it begins on standby."""
        self.options, self.replication = options, replication
        self.keys = ApiKeys(options.api_keys)
        self.places = Places(options.limits.connections)
        self.created = int(time.time())
        self.engine = AsyncEngine(self._make_engine, standby=replication is not None)
        limits = options.limits
        self.returning = Returning(self.engine, options.resume_seconds, limits.replies, limits.reply_bytes)
        self._make = make
        self._texts: Texts | None = None
        self._max_model_len = 0
        self.answered: Counter[int] = Counter()
        self._look: Look | None = None

    def _make_engine(self) -> Engine:
        served = self._make()
        self._max_model_len = served.max_model_len
        self._texts = Texts(served.tokenizer, self.options.names[0])
        return served.engine

    def start(self) -> None:
        """Begin to load; returns at once. `engine.ready()` waits for it."""
        self.engine.start()

    async def stop(self, grace_s: float) -> None:
        """End as :meth:`~kvpager.engine.async_engine.AsyncEngine.stop` does."""
        await self.engine.stop(grace_s)
        if self._texts is not None:
            self._texts.close()

    async def snapshot(self) -> Snapshot:
        """What the metrics are made of. Of an engine that takes long for a step, or has ended: as it was last."""
        health = self.engine.health
        if health.state != "loading":
            with suppress(EngineStopped, TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    self._look = await self.engine.look()
        look, limits = self._look, {}
        if look is not None and look.pager.memory is not None:
            limits["memory"] = parse_size(look.pager.memory, "memory")
        if (most := memory_limit_bytes()) is not None:
            limits["cgroup"] = most
        return Snapshot(
            health.state,
            __version__,
            self.options.names[0],
            policy="" if look is None else look.pager.policy,
            stats=None if look is None else look.stats,
            latencies=None if look is None else look.latencies,
            open_requests=self.places.taken,
            places=self.places.count,
            answered=dict(self.answered),
            limits=limits,
            rss_bytes=rss_bytes(),
            replication={} if self.replication is None else self.replication(),
        )

    @property
    def texts(self) -> Texts:
        """The tokenizer; there once :meth:`require_ready` has passed."""
        assert self._texts is not None, "require_ready() comes first"
        return self._texts

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together."""
        return self._max_model_len

    def require_ready(self) -> None:
        """Raise ApiError (503) unless requests are taken."""
        health = self.engine.health
        if health.state != "ready":
            said = {
                "loading": "the model is still being loaded",
                "standby": "this server is not the primary; ask the other one, or come again",
                "failed": "the engine has failed",
            }
            raise ApiError(
                503,
                f"Not ready: {said.get(health.state, 'the server is stopping')}.",
                code=f"engine_{health.state}",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )

    async def go_on(self, resumables: Sequence[Resumable]) -> set[str]:
        """Be the primary: go on with what another one did, then take requests. Returns the requests that go on."""
        try:
            return await self.returning.reattach(resumables)
        finally:
            self.engine.activate()

    async def step_down(self, flush: Callable[[], None] | None) -> None:
        """Be on standby: see AsyncEngine.abandon. Clients come back to the other server."""
        await self.engine.abandon(flush)
        self.returning.abandon()

    def require_model(self, name: str | None) -> str:
        """The served name that a request means; raises ApiError (404) for another's."""
        if name is None or name in self.options.names:
            return name or self.options.names[0]
        known = ", ".join(self.options.names)
        text = f"There is no model {name[:100]!r}; this server has {known}."
        raise ApiError(404, text, param="model", code="model_not_found")

    def require_fit(self, prompts: Sequence[Sequence[int]], max_tokens: int | None, param: str) -> None:
        """Raise ApiError (400) for a prompt that is empty, or too long with the answer; InputError for too many."""
        limits = self.options.limits
        if not 1 <= len(prompts) <= limits.prompts:
            raise InputError(f"{param}: {len(prompts)} prompts are not 1 to {limits.prompts}")
        for ids in prompts:
            if not ids:
                raise InputError(f"{param}: it has no tokens")
            most = min(limits.prompt_tokens or self.max_model_len, self.max_model_len)
            if len(ids) > most or len(ids) + (max_tokens or 1) > self.max_model_len:
                wanted = f" and an answer of {max_tokens}" if max_tokens is not None else ""
                allowed = f"; a prompt may have {most}" if most < self.max_model_len else ""
                raise ApiError(
                    400,
                    f"{param}: {len(ids)} tokens{wanted} do not fit: the context is {self.max_model_len} tokens, "
                    f"prompt and answer together{allowed}",
                    param=param,
                    code="context_length_exceeded",
                )
