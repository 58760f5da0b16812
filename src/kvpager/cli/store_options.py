"""Options of the commands that keep what they compute, ``--store`` and what goes with it."""

from __future__ import annotations

import argparse

from kvpager.build import PagerOptions, StoreOptions, require_storable, require_store
from kvpager.cli.options import number, size, whole
from kvpager.stores import COMPRESSIONS, PUBLISHING, SYNCHRONOUS

__all__ = ["add_store_options", "store_options"]


def add_store_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that :func:`store_options` reads."""
    group = parser.add_argument_group("storing")
    group.add_argument(
        "--store",
        metavar="none|PATH|URL",
        action="append",
        help="a file that keeps what was computed, so that it is there again after a restart, or a Redis that nodes "
        "share (redis://, rediss://, redis+sentinel://, redis+cluster://), or both, given twice; the pages of prompts "
        "and answers are written there (default: none)",
    )
    group.add_argument(
        "--store-limit", type=size, default="10GiB", metavar="SIZE", help="bytes on disk at most (default: %(default)s)"
    )
    group.add_argument(
        "--store-tenant-limit",
        type=size,
        metavar="SIZE",
        help="bytes of them that one API key's blocks and sessions take at most (default: no such limit)",
    )
    group.add_argument(
        "--store-sync",
        choices=SYNCHRONOUS,
        default="normal",
        help="normal: what was stored survives a kill; full: and a loss of power (default: normal)",
    )
    group.add_argument(
        "--store-publish",
        choices=PUBLISHING,
        default="selective",
        help="which blocks go to Redis: those that were found again, all, none (default: selective)",
    )
    group.add_argument(
        "--store-publish-hits",
        type=whole(1),
        default=1,
        metavar="N",
        help="selective: after so many hits (default: %(default)s)",
    )
    group.add_argument(
        "--store-shared-limit",
        type=size,
        default="10GiB",
        metavar="SIZE",
        help="bytes that all nodes together store in Redis (default: %(default)s)",
    )
    group.add_argument(
        "--store-ttl",
        type=whole(1),
        default=7 * 86400,
        metavar="SECONDS",
        help="how long after its last use a block or session stays in Redis (default: a week)",
    )
    group.add_argument(
        "--store-timeout",
        type=number(0.001, 60),
        default=0.1,
        metavar="SECONDS",
        help="how long a request waits for Redis at most (default: %(default)s)",
    )
    group.add_argument(
        "--store-compression", choices=COMPRESSIONS, default="none", help="of pages, lossless (default: none)"
    )


def store_options(args: argparse.Namespace, paging: PagerOptions) -> StoreOptions | None:
    """What :func:`add_store_options` parsed; None where nothing is stored.

    Raises ConfigError for what can't be (with `paging` too) and MissingDependency, before anything is loaded.
    """
    places = [place for place in args.store or [] if place.lower() != "none"]
    if not places:
        return None
    options = StoreOptions.at(
        places,
        limit=args.store_limit,
        tenant_limit=args.store_tenant_limit,
        synchronous=args.store_sync,
        compression=args.store_compression,
        publish=args.store_publish,
        publish_hits=args.store_publish_hits,
        shared_limit=args.store_shared_limit,
        ttl_s=args.store_ttl,
        timeout_s=args.store_timeout,
    )
    require_storable(paging)
    require_store(options)
    return options
