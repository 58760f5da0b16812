"""What a user says about a pair of nodes, and what is made of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpager import stores
from kvpager.errors import ConfigError
from kvpager.replication.link import Connect
from kvpager.replication.node import Node

__all__ = ["PairOptions"]

TIMEOUT_S = 0.5  # for an answer of the Redis: as long as a journal waits for it


@dataclass(frozen=True)
class PairOptions:
    """Two nodes of which one goes on when the other dies (docs/failover.md). Raises ConfigError that names the field.

    peer     the URL of the Redis through which they meet; it may have a password in it
    name     the pair's, the same for both; others in the same Redis have other names
    lease_s  after so many seconds without a word of the primary the standby takes over
    eager    whether it becomes the primary where there is none, rather than wait for one
    """

    peer: str = field(repr=False)
    name: str = "kvpager"
    lease_s: float = 1.0
    eager: bool = False

    def __post_init__(self) -> None:
        try:
            stores.redis_place(self.peer)
        except ConfigError as error:
            raise ConfigError(f"peer: {str(error).removeprefix('store: ')}") from None

    @property
    def place(self) -> str:
        """Where they meet, for people: without what is secret."""
        return str(stores.redis_place(self.peer))

    def connect(self) -> Connect:
        """What makes clients of it. Raises MissingDependency."""
        return stores.redis_clients(self.peer, TIMEOUT_S)

    def node(self, owner: str) -> Node:
        """One of them, named `owner`, not started yet. Raises ConfigError and MissingDependency."""
        return Node(self.connect(), self.name, owner, eager=self.eager, ttl_s=self.lease_s)

    def meets_at(self, url: str | None) -> bool:
        """Whether a store's Redis is this one, so that it can look at the lease when something is written."""
        if url is None:
            return False
        one, other = stores.redis_place(self.peer), stores.redis_place(url)
        return (one.kind, one.nodes, one.db, one.service) == (other.kind, other.nodes, other.db, other.service)
