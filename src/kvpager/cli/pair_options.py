"""Options of the commands that know of a pair of nodes, ``--peer`` and what goes with it, and one node of it."""

from __future__ import annotations

import argparse
import socket
from typing import TYPE_CHECKING, Any

from kvpager.build import StoreOptions, warm_up
from kvpager.cli.console import say
from kvpager.cli.options import number
from kvpager.errors import ConfigError
from kvpager.pairs import PairOptions
from kvpager.stores import is_redis_url

if TYPE_CHECKING:
    from kvpager.engine.engine import Engine
    from kvpager.server.service import Service

__all__ = ["Member", "add_pair_options", "add_peer_options", "node_name", "pair_options", "share_pages"]


def add_peer_options(parser: argparse._ActionsContainer, *, required: bool) -> None:
    """Add the options that say where a pair meets, and what it is called."""
    parser.add_argument(
        "--peer",
        metavar="URL",
        required=required,
        help="the Redis through which the two nodes meet: redis://, rediss:// or redis+sentinel://; rather put its "
        "password into KVPAGER_REDIS_PASSWORD",
    )
    parser.add_argument(
        "--cluster-name", default="kvpager", metavar="NAME", help="the pair's name (default: %(default)s)"
    )


def add_pair_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that :func:`pair_options` reads."""
    group = parser.add_argument_group("a second node that takes over (docs/failover.md)")
    group.add_argument(
        "--role",
        choices=("primary", "standby"),
        help="what this node begins as; where another one is the primary already, it is on standby (default: no pair)",
    )
    add_peer_options(group, required=False)
    group.add_argument(
        "--lease-seconds",
        type=number(0.1, 3600),
        default=1.0,
        metavar="SECONDS",
        help="the standby takes over when it has heard nothing of the primary for so long (default: %(default)g)",
    )
    group.add_argument("--node-name", metavar="NAME", help="this node's, for people (default: host and port)")


def pair_options(args: argparse.Namespace) -> PairOptions | None:
    """What :func:`add_pair_options` parsed; None where there is no pair. Raises ConfigError."""
    if args.role is None and args.peer is None:
        return None
    if args.role is None or args.peer is None:
        raise ConfigError("role: a pair needs both --role and --peer")
    return PairOptions(args.peer, args.cluster_name, args.lease_seconds, eager=args.role == "primary")


def share_pages(args: argparse.Namespace, pair: PairOptions) -> None:
    """Without another Redis for pages, both nodes' are in the one through which they meet."""
    if not any(is_redis_url(place) for place in args.store or []):
        args.store = [*(args.store or []), pair.peer]


def node_name(listener: socket.socket) -> str:
    """A node's name where none was given: its machine's, and the port."""
    return f"{socket.gethostname()}:{listener.getsockname()[1]}"[:256]


class Member:
    """This process as one of a pair; `node` is its part in it."""

    def __init__(self, pair: PairOptions, name: str) -> None:
        """Raises ConfigError and MissingDependency."""
        self._pair = pair
        self.node = pair.node(name)
        self._page_size = 0

    def parts(self, store: StoreOptions | None) -> dict[str, Any]:
        """What its engine is made with."""
        fenced = {"fence": self.node.fence} if store is not None and self._pair.meets_at(store.url) else {}
        return {"journal": self.node.relay, **fenced}

    def meet(self, engine: Engine) -> None:
        """Its engine was made; in the engine's thread."""
        self._page_size = engine.pager.config.page_size
        warm_up(engine)

    def start(self, service: Service) -> None:
        """Begin; in the event loop, when the engine is there."""
        from kvpager.server.hosting import ServiceHost

        begins = "becomes the primary if there is none" if self._pair.eager else "is on standby"
        say(f"pair {self._pair.name}, meeting at {self._pair.place}: this node {begins}; /health says its role")
        self.node.start(ServiceHost(service, self._page_size))
