"""Options of the commands that keep what they compute, ``--store`` and what goes with it."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from kvpager.build import PagerOptions, StoreOptions, require_storable, require_store
from kvpager.cli.options import number, size, whole
from kvpager.errors import ConfigError
from kvpager.stores import COMPRESSIONS, LEAST_LIMIT_BYTES, PASSWORD, PUBLISHING, SYNCHRONOUS

__all__ = ["add_store_options", "refuse_store_options", "store_options"]

FIELDS = {
    "limit": "limit",
    "tenant_limit": "tenant_limit",
    "synchronous": "sync",
    "compression": "compression",
    "publish": "publish",
    "publish_hits": "publish_hits",
    "shared_limit": "shared_limit",
    "ttl_s": "ttl",
    "timeout_s": "timeout",
}
"""Fields of StoreOptions, and the options that say them: ``--store-`` and this."""
OF_FILE = ("limit", "tenant_limit", "synchronous")
OF_REDIS = ("publish", "publish_hits", "shared_limit", "ttl_s", "timeout_s")


def add_store_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that :func:`store_options` reads."""
    group = parser.add_argument_group("storing")
    group.add_argument(
        "--store",
        metavar="none|PATH|URL",
        action="append",
        help="a file that keeps what was computed, so that it is there again after a restart, or a Redis that nodes "
        "share (redis://, rediss://, redis+sentinel://, redis+cluster://), or both, given twice; the pages of prompts "
        "and answers are written there (default: none). Others can see a program's options: a password rather stands "
        f"in {PASSWORD}",
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
        "--store-publish",
        choices=PUBLISHING,
        help=f"which blocks go to Redis: those that were found again, all, none (default: {StoreOptions.publish})",
    )
    group.add_argument(
        "--store-publish-hits",
        type=whole(1),
        metavar="N",
        help=f"selective: after so many hits (default: {StoreOptions.publish_hits})",
    )
    group.add_argument(
        "--store-shared-limit",
        type=size,
        metavar="SIZE",
        help=f"bytes that all nodes together store in Redis (default: {StoreOptions.shared_limit})",
    )
    group.add_argument(
        "--store-ttl",
        type=whole(1),
        metavar="SECONDS",
        help="how long after its last use a block or session stays in Redis (default: a week)",
    )
    group.add_argument(
        "--store-timeout",
        type=number(0.001, 60),
        metavar="SECONDS",
        help=f"how long a request waits for Redis at most (default: {StoreOptions.timeout_s})",
    )
    group.add_argument(
        "--store-compression",
        choices=COMPRESSIONS,
        help=f"of pages, lossless (default: {StoreOptions.compression})",
    )


def _places(args: argparse.Namespace) -> list[str]:
    return [place for place in args.store or [] if place.lower() != "none"]


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """What was said about the store but its path, by the fields of StoreOptions."""
    values = {field: getattr(args, f"store_{name}") for field, name in FIELDS.items()}
    return {field: value for field, value in values.items() if value is not None}


def refuse_store_options(args: argparse.Namespace, why: str) -> None:
    """Raise ConfigError, which says why, where anything was said about a store; "none" says nothing."""
    _refuse(["--store"] * bool(_places(args)) + _names(_given(args)), why)


def _names(fields: Iterable[str]) -> list[str]:
    return [f"--store-{FIELDS[field].replace('_', '-')}" for field in fields]


def _refuse(names: list[str], why: str) -> None:
    if names:
        raise ConfigError(f"store: {', '.join(names)} {'is' if len(names) == 1 else 'are'} {why}")


def store_options(args: argparse.Namespace, paging: PagerOptions) -> StoreOptions | None:
    """What :func:`add_store_options` parsed; None where nothing is stored.

    Raises ConfigError for what can't be (with `paging` too) and MissingDependency, before anything is loaded.
    """
    given, places = _given(args), _places(args)
    if not places:
        refuse_store_options(args, "of no use without --store PATH or URL: nothing is stored")
        return None
    options = StoreOptions.at(places, **given)
    if options.path is None:
        _refuse(_names(field for field in given if field in OF_FILE), "of no use without a file: --store PATH")
    if options.url is None:
        _refuse(_names(field for field in given if field in OF_REDIS), "of no use without a Redis: --store URL")
    require_storable(paging)
    require_store(options)
    return options
