"""A connection to a Redis Cluster: each command goes to the node that has its key; one that is gone is left alone."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from kvpager.stores.redis_links import Command, Gone, all_replies, client, redis_py
from kvpager.stores.redis_url import RedisPlace

__all__ = ["Sharded"]

_log = logging.getLogger("kvpager.stores")
_OF_TIMEOUT = 0.7  # a node that hangs is found out before the whole call is given up
_KEY_AT: dict[Any, int] = {"EVAL": 3, "OBJECT": 2}
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


class Sharded:
    """See redis_links.Link. redis-py keeps the map of slots; it follows keys that have moved.

    What belongs to a node that can't be reached is `Gone`, at once, until its pause ends; the other nodes are used on.
    Each failure doubles the pause. Before a node is tried again the map is asked for anew: its replica may serve now.
    """

    def __init__(self, place: RedisPlace, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Connects, and reads the map of slots. Raises what redis-py raises."""
        module = redis_py()
        self._gone_errors = (module.exceptions.ConnectionError, module.exceptions.TimeoutError, OSError)
        self._down_errors = (module.exceptions.ClusterDownError, module.exceptions.MasterDownError)
        self._moved_errors = (module.exceptions.MovedError, module.exceptions.AskError, module.exceptions.TryAgainError)
        self._errors = (*self._gone_errors, module.exceptions.RedisClusterException, module.exceptions.RedisError)
        self._client = client(place, timeout_s * _OF_TIMEOUT)
        self._clock = clock
        self._rests: dict[str, tuple[float, float]] = {}  # node: until when, and for how long it was
        self._place = place

    def execute(self, commands: Sequence[Command]) -> list[Any]:
        """See Link."""
        self._renew()
        replies: list[Any] = [Gone(self._place)] * len(commands)
        groups: dict[Any, list[int]] = defaultdict(list)
        for number, command in enumerate(commands):
            node = self._node(command)
            if node is not None and node.name not in self._rests:
                groups[node].append(number)
        for node, numbers in groups.items():
            for number, reply in zip(numbers, self._ask(node, [commands[i] for i in numbers]), strict=True):
                replies[number] = self._follow(commands[number]) if isinstance(reply, self._moved_errors) else reply
        if commands and not groups and not self._usable:
            raise Gone(self._place)
        return replies

    def nodes(self) -> list[str]:
        """See Link."""
        return [node.name for node in self._client.get_primaries()]

    def execute_on(self, name: str, commands: Sequence[Command]) -> list[Any]:
        """See Link."""
        node = next((node for node in self._client.get_primaries() if node.name == name), None)
        return [Gone(self._place)] * len(commands) if node is None else self._ask(node, commands)

    def cut(self) -> None:
        """See Link."""
        for node in self._client.get_nodes():
            if node.redis_connection is not None:
                node.redis_connection.connection_pool.disconnect(inuse_connections=True)

    @property
    def _usable(self) -> bool:
        """Whether any node is in use."""
        return any(node.name not in self._rests for node in self._client.get_primaries())

    def _node(self, command: Command) -> Any:
        """The node that has a command's key; None where none has."""
        key = command[_KEY_AT.get(str(command[0]), 1)]
        try:
            return self._client.get_node_from_key(key)
        except self._errors:
            return None

    def _ask(self, node: Any, commands: Sequence[Command]) -> list[Any]:
        try:
            replies = all_replies(self._client.get_redis_connection(node), commands)
        except self._gone_errors as error:
            self._rest(node.name, type(error).__name__)
            return [Gone(self._place)] * len(commands)
        self._rests.pop(node.name, None)
        return [Gone(self._place) if isinstance(reply, self._down_errors) else reply for reply in replies]

    def _follow(self, command: Command) -> Any:
        """The reply to a command whose key has moved, or is moving."""
        try:
            return self._client.execute_command(*command)
        except (*self._gone_errors, *self._down_errors):
            return Gone(self._place)
        except self._errors as error:
            return error

    def _rest(self, name: str, why: str) -> None:
        pause = min(2 * self._rests[name][1], _LONGEST_PAUSE_S) if name in self._rests else _PAUSE_S
        if name not in self._rests:
            _log.warning("store redis: node %s of the cluster can't be reached (%s): what it has is missed", name, why)
        self._rests[name] = (self._clock() + pause, pause)

    def _renew(self) -> None:
        """Before nodes are tried again: who has which slots now."""
        due = [name for name, (until, _) in self._rests.items() if self._clock() >= until]
        if not due:
            return
        with contextlib.suppress(*self._errors):
            self._client.nodes_manager.initialize()
        there = {node.name for node in self._client.get_primaries()}
        for name in list(self._rests):
            if name not in there:
                del self._rests[name]
        for name in due:
            if name in self._rests:
                self.execute_on(name, [("PING",)])  # which ends its rest, or makes it longer
