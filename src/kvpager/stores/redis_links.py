"""Connections to a Redis: the one module that imports redis-py, and what its failures are to a store."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvpager.errors import MissingDependency, StoreError, StoreFull, StoreUnavailable
from kvpager.stores.redis_names import FENCED
from kvpager.stores.redis_url import RedisPlace

__all__ = [
    "Command",
    "Gone",
    "Link",
    "Single",
    "all_replies",
    "client",
    "connect",
    "fenced",
    "redis_py",
    "settings",
    "told",
]

Command = tuple[str | bytes | int, ...]
"""A command and its arguments."""

READ_BYTES = 2**20
"""How much is read from a socket at once: with redis-py's 32 KiB blocks come at 0.4 GB/s, with this at 2."""

_AUTH = ("NOAUTH", "WRONGPASS", "NOPERM", "AUTHENTICATION", "AUTHORIZATION", "AUTH", "ACCESS")
_FULL = ("OOM", "COMMAND NOT ALLOWED WHEN USED MEMORY")


def redis_py() -> Any:
    """The module redis; raises MissingDependency."""
    try:
        return importlib.import_module("redis")
    except ImportError as error:
        raise MissingDependency(
            "a store in Redis needs redis, not installed; run: pip install 'kvpager[redis]'"
        ) from error


class Link(Protocol):
    """One thread's connection."""

    def execute(self, commands: Sequence[Command]) -> list[Any]:
        """Replies in order; one that is an error is handed out as an exception. Raises what redis-py raises."""

    def nodes(self) -> list[str]:
        """Names of the servers that hold keys of their own."""

    def execute_on(self, name: str, commands: Sequence[Command]) -> list[Any]:
        """As `execute`, on one of these servers, whatever the keys."""

    def cut(self) -> None:
        """Give up the connection, also while another thread waits for it: that one gets an error."""


class Gone(StoreUnavailable):
    """The reply to what belongs to a node of a cluster that can't be reached, while others can."""

    def __init__(self, place: RedisPlace) -> None:
        super().__init__("io", f"a node of Redis at {place} can't be reached")


def all_replies(client: Any, commands: Sequence[Command]) -> list[Any]:
    """Send commands together and read their replies; errors of single ones stand among them."""
    with client.pipeline(transaction=False) as pipe:
        for command in commands:
            pipe.execute_command(*command)
        replies: list[Any] = pipe.execute(raise_on_error=False)
    return replies


class Single:
    """A connection to one server: the one that was named, or the primary that sentinels name."""

    def __init__(self, place: RedisPlace, timeout_s: float) -> None:
        """Connects when it is used first."""
        self._client = client(place, timeout_s)
        self._readonly = redis_py().exceptions.ReadOnlyError

    def execute(self, commands: Sequence[Command]) -> list[Any]:
        """See Link."""
        replies = all_replies(self._client, commands)
        if any(isinstance(reply, self._readonly) for reply in replies):
            self.cut()  # it was the primary once: the next call asks again who is
        return replies

    def nodes(self) -> list[str]:
        """See Link."""
        return [""]

    def execute_on(self, name: str, commands: Sequence[Command]) -> list[Any]:
        """See Link."""
        return self.execute(commands)

    def cut(self) -> None:
        """See Link."""
        self._client.connection_pool.disconnect(inuse_connections=True)


def client(place: RedisPlace, timeout_s: float) -> Any:
    """A client of redis-py, which connects when it is used first; a cluster's connects at once."""
    common = settings(place, timeout_s)
    module = redis_py()
    if place.kind == "cluster":
        nodes = [module.cluster.ClusterNode(host, port) for host, port in place.nodes]
        return module.RedisCluster(startup_nodes=nodes, **common)
    if place.kind == "sentinel":
        watch = module.sentinel.Sentinel(list(place.nodes), sentinel_kwargs=_plain(common), **common, db=place.db)
        return watch.master_for(place.service)
    (host, port), *_ = place.nodes
    return module.Redis(host=host, port=port, db=place.db, **common)


def settings(place: RedisPlace, timeout_s: float) -> dict[str, Any]:
    """What every connection is made with. Nothing is tried again here: others decide that."""
    module = redis_py()
    made: dict[str, Any] = {
        "username": place.username,
        "password": place.password,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "socket_read_size": READ_BYTES,
        "socket_keepalive": True,
        "protocol": 2,
        "retry": module.retry.Retry(module.backoff.NoBackoff(), 0),
    }
    if place.tls:
        made |= {"ssl": True, "ssl_cert_reqs": "required", "ssl_check_hostname": True}
        names = {"ssl_ca_certs": place.ca, "ssl_certfile": place.cert, "ssl_keyfile": place.key}
        made |= {name: value for name, value in names.items() if value}
    return made


def _plain(common: dict[str, Any]) -> dict[str, Any]:
    """Sentinels are reached as the servers are, but without a password: theirs is another one, if any."""
    return {name: value for name, value in common.items() if name not in ("username", "password")}


def told(error: Exception, place: RedisPlace) -> StoreError:
    """What a failure of redis-py is to a store. Neither what was sent nor who one is stands in the message."""
    if isinstance(error, StoreError):
        return error
    word = str(error).partition(" ")[0].strip(":.,").upper()
    name = type(error).__name__
    names = {kind.__name__ for kind in type(error).__mro__}
    where = f"Redis at {place}"
    if word == FENCED:
        return fenced(place)
    if "OutOfMemoryError" in names or word in _FULL:
        return StoreFull(f"{where} is full: it takes no more within its maxmemory")
    if "ReadOnlyError" in names or word in ("READONLY", "MISCONF", "NOREPLICAS"):
        return StoreUnavailable("readonly", f"{where} takes no writes: it is a replica, or can not save them")
    if names & {"AuthenticationError", "NoPermissionError", "AuthorizationError"} or word in _AUTH:
        return StoreUnavailable("auth", f"{where} refuses this user or its password, or a right is missing ({name})")
    if "TimeoutError" in names:
        return StoreUnavailable("timeout", f"{where} did not answer in time")
    shown = f"{name}, {word}" if word.isalpha() and len(word) < 20 and "ResponseError" in names else name
    return StoreUnavailable("io", f"{where} can't be used ({shown})")


def fenced(place: RedisPlace) -> StoreUnavailable:
    """The failure of a writer that has been put out."""
    return StoreUnavailable("fenced", f"Redis at {place}: another node writes now, and this one may not any more")


def connect(place: RedisPlace, timeout_s: float) -> Callable[[], Link]:
    """How one thread's connection is made; nothing is connected yet. Raises MissingDependency."""
    redis_py()
    if place.kind == "cluster":
        from kvpager.stores.redis_cluster import Sharded

        return lambda: Sharded(place, timeout_s)
    return lambda: Single(place, timeout_s)
