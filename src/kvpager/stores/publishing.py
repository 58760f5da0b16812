"""Which blocks go to the tier that nodes share: those that proved to be wanted."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from kvpager.errors import ConfigError
from kvpager.stored import Scores

__all__ = ["PUBLISHING", "Publisher", "Publishing", "PublishingPolicy"]

PublishingPolicy = Literal["selective", "all", "none"]
PUBLISHING: tuple[PublishingPolicy, ...] = get_args(PublishingPolicy)
_MOST = 1 << 16  # keys that are counted, or were asked for: about 10 MB


@dataclass(frozen=True)
class Publishing:
    """What is published. Raises ConfigError.

    policy  "selective": a block that was found `hits` times here, or that has `rank`; "all"; "none"
    rank    the share of this node's blocks whose score must be lower
    """

    policy: PublishingPolicy = "selective"
    hits: int = 1
    rank: float = 0.95

    def __post_init__(self) -> None:
        if self.policy not in PUBLISHING:
            raise ConfigError(f"store_publish: {self.policy!r} is not one of {', '.join(PUBLISHING)}")
        if self.hits < 1:
            raise ConfigError(f"store_publish_hits: {self.hits} is not 1 or more")
        if not 0 < self.rank <= 1:
            raise ConfigError(f"rank: {self.rank} is not above 0 and at most 1")


class Publisher:
    """Counts hits of blocks, and says which are to be published. Safe for several threads."""

    def __init__(self, publishing: Publishing) -> None:
        self._publishing = publishing
        self._lock = threading.Lock()
        self._hits: OrderedDict[bytes, int] = OrderedDict()
        self._chosen: OrderedDict[bytes, None] = OrderedDict()

    def wants(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of these blocks are to be published."""
        if self._publishing.policy == "all":
            return [True] * len(keys)
        with self._lock:
            return [key in self._chosen for key in keys]

    def choose(self, keys: Sequence[bytes]) -> None:
        """These are to be published, whatever the policy."""
        with self._lock:
            for key in keys:
                self._choose(key)

    def count(self, news: Sequence[Scores]) -> list[bytes]:
        """Take in hits and scores; returns the blocks that are to be published since."""
        publishing = self._publishing
        if publishing.policy != "selective":
            return []
        chosen: list[bytes] = []
        with self._lock:
            for one in news:
                hits = self._hits.pop(one.key, 0) + one.hits
                if hits:
                    self._hits[one.key] = hits
                if (hits >= publishing.hits or one.rank >= publishing.rank) and one.key not in self._chosen:
                    self._choose(one.key)
                    chosen.append(one.key)
            while len(self._hits) > _MOST:
                self._hits.popitem(last=False)
        return chosen

    def _choose(self, key: bytes) -> None:
        self._chosen[key] = None
        self._chosen.move_to_end(key)
        if len(self._chosen) > _MOST:
            self._chosen.popitem(last=False)
