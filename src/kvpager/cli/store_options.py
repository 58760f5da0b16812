"""Options of the commands that keep what they compute, ``--store`` and what goes with it."""

from __future__ import annotations

import argparse
from typing import Any

from kvpager.build import PagerOptions, StoreOptions, require_storable, require_store
from kvpager.cli.options import size
from kvpager.errors import ConfigError
from kvpager.stores import COMPRESSIONS, LEAST_LIMIT_BYTES, SYNCHRONOUS

__all__ = ["add_store_options", "refuse_store_options", "store_options"]

FIELDS = {"limit": "limit", "tenant_limit": "tenant_limit", "synchronous": "sync", "compression": "compression"}
"""Fields of StoreOptions, and the options that say them: ``--store-`` and this."""


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
        "--store-limit",
        type=size,
        metavar="SIZE",
        help=f"bytes on disk at most, {LEAST_LIMIT_BYTES // 2**20}MiB at least (default: {StoreOptions.limit})",
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
        help="normal: what was stored survives a kill; full: and a loss of power "
        f"(default: {StoreOptions.synchronous})",
    )
    group.add_argument(
        "--store-compression",
        choices=COMPRESSIONS,
        help=f"of pages, lossless (default: {StoreOptions.compression})",
    )


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """What was said about the store but its path, by the fields of StoreOptions."""
    values = {field: getattr(args, f"store_{name}") for field, name in FIELDS.items()}
    return {field: value for field, value in values.items() if value is not None}


def refuse_store_options(args: argparse.Namespace, why: str) -> None:
    """Raise ConfigError, which says why, where anything was said about a store; "none" says nothing."""
    names = [f"--store-{FIELDS[field].replace('_', '-')}" for field in _given(args)]
    if args.store.lower() != "none":
        names.insert(0, "--store")
    if names:
        raise ConfigError(f"store: {', '.join(names)} {'is' if len(names) == 1 else 'are'} {why}")


def store_options(args: argparse.Namespace, paging: PagerOptions) -> StoreOptions | None:
    """What :func:`add_store_options` parsed; None where nothing is stored.

    Raises ConfigError for what can't be (with `paging` too) and MissingDependency, before anything is loaded.
    """
    given = _given(args)
    if args.store.lower() == "none":
        refuse_store_options(args, "of no use without --store PATH: nothing is stored")
        return None
    options = StoreOptions(path=args.store, **given)
    require_storable(paging)
    require_store(options)
    return options
