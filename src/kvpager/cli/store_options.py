"""Options of the commands that keep what they compute, ``--store`` and what goes with it."""

from __future__ import annotations

import argparse

from kvpager.build import PagerOptions, StoreOptions, require_storable, require_store
from kvpager.cli.options import size
from kvpager.stores import COMPRESSIONS, SYNCHRONOUS

__all__ = ["add_store_options", "store_options"]


def add_store_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that :func:`store_options` reads."""
    group = parser.add_argument_group("storing")
    group.add_argument(
        "--store",
        metavar="none|PATH",
        default="none",
        help="a file that keeps what was computed, so that it is there again after a restart; the pages of prompts and "
        "answers are written to it (default: none)",
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
        "--store-compression", choices=COMPRESSIONS, default="none", help="of pages, lossless (default: none)"
    )


def store_options(args: argparse.Namespace, paging: PagerOptions) -> StoreOptions | None:
    """What :func:`add_store_options` parsed; None where nothing is stored.

    Raises ConfigError for what can't be (with `paging` too) and MissingDependency, before anything is loaded.
    """
    if args.store.lower() == "none":
        return None
    options = StoreOptions(
        path=args.store,
        limit=args.store_limit,
        tenant_limit=args.store_tenant_limit,
        synchronous=args.store_sync,
        compression=args.store_compression,
    )
    require_storable(paging)
    require_store(options)
    return options
