"""Commands to a Redis, many at once and in bounded time, with failures as StoreErrors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvpager.stores.deadline import Calls
from kvpager.stores.redis_links import Command, Gone, connect, told
from kvpager.stores.redis_url import RedisPlace
from kvpager.stores.redis_values import as_number

__all__ = ["RedisClient"]

PATIENCE = 10
"""What nobody waits for (writing, looking through) may take so many times as long as a read."""
_SCANNED = 512


class RedisClient:
    """A Redis at a place. `timeout_s` bounds what somebody waits for, connecting included; safe for several threads."""

    def __init__(self, place: RedisPlace, timeout_s: float, connections: int) -> None:
        """Connects when it is used. Raises MissingDependency."""
        self.place, self.timeout_s = place, timeout_s
        single = place.kind != "cluster"  # there a node that hangs is to be told from the others
        self._calls = Calls(connect(place, timeout_s * (PATIENCE if single else 1)), connections)

    def run(self, commands: Sequence[Command], *, patient: bool = False) -> list[Any]:
        """Replies, in order; `Gone` for what lies on a cluster's node that can't be reached. Raises StoreError.

        patient  whether it may take PATIENCE times as long
        """
        return self._checked(lambda link: link.execute(commands), patient)

    def keys(self, pattern: str) -> Iterator[list[bytes]]:
        """All keys of this form, some at a time; one may come twice. Raises StoreError."""
        for node in self._call(lambda link: link.nodes(), True):
            cursor = b"0"
            while True:
                command = ("SCAN", cursor, "MATCH", pattern, "COUNT", _SCANNED)
                reply = self._checked(lambda link, on=node, one=command: link.execute_on(on, [one]), True)[0]
                if isinstance(reply, Gone):
                    break
                cursor, found = reply
                if found:
                    yield found
                if not as_number(cursor):
                    break

    def close(self) -> None:
        """End all connections."""
        self._calls.close()

    def _checked(self, work: Any, patient: bool) -> list[Any]:
        replies: list[Any] = self._call(work, patient)
        for reply in replies:
            if isinstance(reply, Exception) and not isinstance(reply, Gone):
                raise told(reply, self.place)
        return replies

    def _call(self, work: Any, patient: bool) -> Any:
        try:
            return self._calls.call(work, self.timeout_s * (PATIENCE if patient else 1))
        except Exception as error:
            raise told(error, self.place) from None
