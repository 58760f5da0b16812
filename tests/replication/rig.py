"""Journals, mirrors and leases over a real Redis, requests to tell them, and a model of what must come out."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvpager.journaled import Accepted, Gained, Told
from kvpager.replication.journal import Journal
from kvpager.replication.lease import Lease
from kvpager.replication.limits import Limits
from kvpager.replication.link import Unreachable
from kvpager.replication.mirror import Mirror
from tests.redis_rig import until

PAGE = 4
SLOT = 24  # bytes of a token
SECONDS = 20.0  # after which a test that waits has failed
MADE: list[Any] = []  # clients, closed at a test's end


def connector(port: int, seconds: float = 0.5, **more: Any) -> Callable[[], Any]:
    """Makes clients as they are to be: none tries again by itself."""
    settings = {"socket_timeout": seconds, "socket_connect_timeout": seconds, "retry": Retry(NoBackoff(), 0), **more}

    def connect() -> Any:
        MADE.append(redis.Redis(host="127.0.0.1", port=port, **settings))
        return MADE[-1]

    return connect


@dataclass
class Primary:
    """A journal with a lease that does not expire meanwhile. lost: set when `on_lost` was called."""

    port: int
    limits: Limits = field(default_factory=Limits)
    name: str = "pair"
    owner: str = "first"
    ttl_s: float = 600.0
    scores_every: int = 2

    def __post_init__(self) -> None:
        self.lost = threading.Event()
        self.lease = Lease(connector(self.port), self.name, self.owner, self.ttl_s)
        self.journal = Journal(
            connector(self.port),
            self.lease,
            PAGE,
            on_lost=self.lost.set,
            scores_every=self.scores_every,
            limits=self.limits,
        )

    def __enter__(self) -> Primary:
        assert self.lease.acquire()
        self.journal.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.journal.close(0.1)
        self.lease.close()

    def step(self, *told: Told) -> threading.Event:
        """Tell a step; the event is set when it may be released."""
        done = threading.Event()
        self.journal.step(told, done.set)
        return done

    def told(self, *told: Told) -> None:
        """Tell a step, and wait until it may be released."""
        assert self.step(*told).wait(SECONDS)


def mirror(port: int, limits: Limits | None = None, name: str = "pair") -> Mirror:
    """A mirror without its thread: `poll` it."""
    return Mirror(connector(port), name, limits=limits)


def caught_up(one: Mirror) -> Mirror:
    """Let a mirror read to the end."""
    until(trying(lambda: one.poll(0.0)))
    return one


def trying(action: Callable[[], Any]) -> Callable[[], Any]:
    """The same, with nothing where Redis can't be reached yet."""

    def tried() -> Any:
        with contextlib.suppress(Unreachable):
            return action()

    return tried


def accepted(id: str, prompt: int = 6, **params: Any) -> Accepted:
    """A request with so many tokens of a prompt."""
    return Accepted(id, [*range(1, prompt + 1)], params, 0, 12.5, b"salt", None, 7, id.encode())


def slot(id: str, index: int, position: int) -> bytes:
    """Keys and values of one token: others for every answer and position."""
    return f"{id}/{index}/{position}".encode().ljust(SLOT, b".")[:SLOT]


def key(id: str, index: int, block: int) -> bytes:
    """The key of a full block."""
    return f"{id}/{index}/{block}".encode().ljust(32, b"k")[:32]


def gained(id: str, index: int, old: int, new: int, scores: bytes = b"") -> Gained:
    """What a sequence gained that grew from `old` to `new` tokens."""
    keys = b"".join(key(id, index, block) for block in range(old // PAGE, new // PAGE))
    begin = max(old, new // PAGE * PAGE)
    slots = b"".join(slot(id, index, position) for position in range(begin, new))
    return Gained({"length": new}, old // PAGE, keys, begin, slots, scores)


def grown(id: str, index: int, old: int, new: int, *tokens: int, **more: Any) -> Told:
    """One answer's step: its sequence grew, and tokens were drawn."""
    return Told(id, index, tokens, None, gained(id, index, old, new), **more)


def ended(id: str, index: int = 0, *tokens: int, reason: str = "stop") -> Told:
    """One answer's end."""
    return Told(id, index, tokens, None, None, reason, None, None, {"completion_tokens": len(tokens)})
