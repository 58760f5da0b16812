"""A connection to Redis, as the journal, the mirror and the lease use it: every failure is one kind of exception.

Who makes clients (`connect`) decides on address, password, TLS and time-outs. They must not try again by themselves:
each of ours knows what may be sent twice.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from kvpager.errors import MissingDependency
from kvpager.replication.scripts import Script

__all__ = ["Connect", "Link", "Refused", "Unreachable", "read_replicas"]

Connect = Callable[[], Any]  # gives a client of redis-py: Redis, or a RedisCluster


def redis() -> Any:
    """The package redis, imported when it is needed."""
    try:
        return importlib.import_module("redis")
    except ImportError as error:
        raise MissingDependency("replication needs redis, not installed; run: pip install 'kvpager[redis]'") from error


class Unreachable(Exception):
    """Redis can't be reached, does not answer in time, or its answer makes no sense. Texts hold no address."""


class Refused(Exception):
    """A script said no: `word` is one of FENCED, DAMAGED and BEHIND, `rest` what follows it."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.word, _, self.rest = text.partition(" ")


class Link:
    """Sends commands, several at once where they belong together; connects anew after a failure. For one thread."""

    def __init__(self, connect: Connect, key: str) -> None:
        """`key`: one of those that are used, by which the node of a Cluster is found."""
        self._connect, self._key = connect, key
        self._redis = redis()
        self._owner: Any = None
        self._client: Any = None

    def send(self, *commands: Sequence[object]) -> list[Any]:
        """Answers to commands that are sent together over one connection.

        Raises Unreachable, and Refused where a script refused the first of them.
        """
        try:
            client = self._open()
            with client.pipeline(transaction=False) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                answers: list[Any] = pipeline.execute(raise_on_error=False)
        except (self._redis.RedisError, OSError, ValueError, AttributeError, TypeError) as error:
            self.close()
            raise Unreachable(type(error).__name__) from error
        for answer in answers:
            if isinstance(answer, Exception):
                self._raise(answer)
        return answers

    def call(
        self, script: Script, keys: Sequence[str], arguments: Sequence[object], *more: Sequence[object]
    ) -> list[Any]:
        """Answers of a script and of commands that follow it at once; see `send`."""
        command = script.command(keys, arguments)
        try:
            return self.send(command, *more)
        except Unreachable as error:
            if not isinstance(error.__cause__, self._redis.exceptions.NoScriptError):
                raise
        self.send(script.load())
        return self.send(command, *more)

    def close(self) -> None:
        """Close the connection; the next command opens another."""
        owner, self._owner, self._client = self._owner, None, None
        if owner is not None:
            with contextlib.suppress(self._redis.RedisError, OSError, ValueError, AttributeError):  # gone already
                owner.close()

    def _open(self) -> Any:
        if self._client is None:
            self._owner = self._connect()
            self._client = self._owner
            if hasattr(self._owner, "get_node_from_key"):  # a Cluster: all keys are in one slot, so at one node
                node = self._owner.get_node_from_key(self._key)
                self._client = self._owner.get_redis_connection(node)
        return self._client

    def _raise(self, error: Exception) -> None:
        text = str(error)
        if text.split(" ", 1)[0] in ("FENCED", "DAMAGED", "BEHIND"):
            raise Refused(text)
        if not isinstance(error, self._redis.exceptions.NoScriptError):
            self.close()  # moved, read-only, out of memory, not allowed, or nonsense: begin again with another one
        raise Unreachable(type(error).__name__) from error


def read_replicas(link: Link) -> int:
    """How many replicas follow and have acknowledged something, as they do a second after they came.

    Raises Unreachable.
    """
    told = link.send(("INFO", "replication"))[0]
    if not isinstance(told, dict):
        raise Unreachable("answer")
    replicas = [value for name, value in told.items() if str(name).startswith("slave") and isinstance(value, dict)]
    return sum(value.get("state") == "online" and value.get("offset") != 0 for value in replicas)
