"""A lease: who of a pair is the primary, and with which epoch.

It is a key in Redis that expires. Every time that somebody acquires it the epoch is a higher one, and what is written
is written only where the key still has the writer's epoch: Redis decides, whatever the writer believes. The holder's
own clock only lets it know early: it counts from before it asked and leaves a margin, so it knows first.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from kvpager.errors import ConfigError
from kvpager.replication.keys import Keys
from kvpager.replication.link import Connect, Link, Unreachable
from kvpager.replication.scripts import ACQUIRE, ASK, RELEASE, RENEW, WATCH, Script

__all__ = ["Holder", "Lease", "Renewal"]

MARGIN = 0.1  # of the time to live: what clocks may differ by, and an answer may be late

Renewal = Literal["held", "asked", "vacant", "lost"]


@dataclass(frozen=True)
class Holder:
    """Who holds a lease, with which epoch, and for how many seconds if it is not renewed."""

    owner: str
    epoch: int
    left_s: float


class Lease:
    """One owner's view of a lease. Its calls to Redis are for one thread; what it knows may be read from any.

    Calls raise Unreachable where Redis can't be asked; then nothing is known of what it did.

    epoch  that was acquired last; 0 before
    """

    def __init__(
        self,
        connect: Connect,
        name: str,
        owner: str,
        ttl_s: float = 1.0,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock`: seconds that never go back. Raises ConfigError."""
        if not 0.05 <= ttl_s <= 3600:
            raise ConfigError(f"ttl_s: {ttl_s} is not in 0.05..3600")
        if not 1 <= len(owner) <= 256:
            raise ConfigError(f"owner: a name of {len(owner)} characters is not of 1..256")
        self.keys, self.owner, self.ttl_s = Keys(name), owner, ttl_s
        self.epoch = 0
        self._clock = clock
        self._link = Link(connect, self.keys.lease)
        self._until = float("-inf")

    @property
    def held(self) -> bool:
        """Whether it is surely ours now: acquired or renewed, and Redis can't have given it away since."""
        return self._clock() < self._until

    @property
    def left_s(self) -> float:
        """For how many seconds it is `held` if it is not renewed."""
        return max(0.0, self._until - self._clock())

    def acquire(self) -> bool:
        """Take it where nobody has it, with a new epoch; False where somebody has.

        Who was asked to hand it over does not get it back until another had it, or the asking has expired.
        """
        began = self._clock()
        keys = (self.keys.lease, self.keys.epoch, self.keys.owner, self.keys.handover)
        took, epoch = self._pair(ACQUIRE, keys, (self.owner, self._ttl_ms))
        if not took:
            return False
        self.epoch = _whole(epoch)
        self._until = began + self.ttl_s * (1 - MARGIN)
        return True

    def renew(self) -> Renewal:
        """Hold it for longer.

        "held"; "asked": held, and somebody asks to have it; "vacant": it has expired and nobody took it, so it may be
        acquired; "lost": another has it.
        """
        began = self._clock()
        took, told = self._pair(RENEW, (self.keys.lease, self.keys.handover), (self.epoch, self._ttl_ms))
        if took:
            self._until = began + self.ttl_s * (1 - MARGIN)
            return "asked" if _whole(told) else "held"
        self.forget()
        return "vacant" if told == b"-" else "lost"

    def release(self) -> bool:
        """Let others have it at once; False where it was not held any more."""
        self.forget()
        return bool(self._link.call(RELEASE, (self.keys.lease,), (self.epoch,))[0] == 1)

    def forget(self) -> None:
        """Count it as lost, as one does who was told that it is another's."""
        self._until = float("-inf")

    def watch(self) -> Holder | None:
        """Who holds it; None where it is vacant."""
        told = self._link.call(WATCH, (self.keys.lease, self.keys.owner), ())[0]
        if told == []:
            return None
        if not isinstance(told, list) or len(told) != 3 or not isinstance(told[1], bytes):
            raise Unreachable("answer")
        return Holder(told[1].decode(errors="replace"), _whole(told[0]), max(0, _whole(told[2])) / 1e3)

    def ask(self, within_s: float) -> int | None:
        """Ask its holder to give it up; gives the epoch that was asked, None where it is vacant.

        The holder hears of it when it renews. After `within_s` the asking is void.
        """
        if not 0 < within_s <= 3600:
            raise ConfigError(f"within_s: {within_s} is not above 0 and at most 3600")
        keys = (self.keys.lease, self.keys.handover)
        told = self._link.call(ASK, keys, (max(1, round(within_s * 1e3)),))[0]
        return None if told == b"-" else _whole(told)

    def close(self) -> None:
        """Close the connection; the lease stays as it is."""
        self._link.close()

    @property
    def _ttl_ms(self) -> int:
        return round(self.ttl_s * 1e3)

    def _pair(self, script: Script, keys: tuple[str, ...], arguments: tuple[object, ...]) -> tuple[bool, Any]:
        told = self._link.call(script, keys, arguments)[0]
        if not isinstance(told, list) or len(told) != 2 or told[0] not in (0, 1):
            raise Unreachable("answer")
        return told[0] == 1, told[1]


def _whole(value: object) -> int:
    """A number of an answer."""
    try:
        return int(value)  # type: ignore[call-overload, no-any-return]
    except (TypeError, ValueError) as error:
        raise Unreachable("answer") from error
