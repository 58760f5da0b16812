"""The keys of one pair in Redis. They share a hash tag, so that a Cluster has them all in one slot."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvpager.errors import ConfigError

__all__ = ["Keys"]

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True)
class Keys:
    """Keys by the pair's name. Raises ConfigError for a name that is not 1 to 64 of A-Z, a-z, 0-9, ".", "_" and "-"."""

    name: str

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"name: {self.name[:80]!r} is not 1 to 64 letters, digits, '.', '_' or '-'")

    def _key(self, what: str) -> str:
        return f"kvpager:{{{self.name}}}:{what}"

    @property
    def lease(self) -> str:
        """A string: the epoch of who holds the lease; it expires with it. What a fence looks at."""
        return self._key("lease")

    @property
    def epoch(self) -> str:
        """A string: the latest epoch that was given."""
        return self._key("epoch")

    @property
    def owner(self) -> str:
        """A string: who was given the latest epoch."""
        return self._key("owner")

    @property
    def handover(self) -> str:
        """A string: the epoch whose holder is asked to give the lease up; it expires."""
        return self._key("handover")

    @property
    def stream(self) -> str:
        """A stream: the journal's entries, with ids `epoch-number`."""
        return self._key("journal")

    @property
    def tail(self) -> str:
        """A string: the id of the latest entry."""
        return self._key("tail")

    @property
    def requests(self) -> str:
        """A hash: requests by id as they were at some entry, in full."""
        return self._key("requests")
