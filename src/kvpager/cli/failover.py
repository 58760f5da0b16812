"""``kvpager failover``: has a pair's primary hand over to its standby, or tells who is the primary."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from kvpager.cli.console import emit, emit_json
from kvpager.cli.options import number
from kvpager.cli.pair_options import add_peer_options
from kvpager.pairs import PairOptions

if TYPE_CHECKING:
    from kvpager.replication.lease import Holder, Lease

__all__ = ["add_parser", "run"]

FAILED = 1
LOOK_S = 0.05
EPILOG = """\
examples:
  kvpager failover --peer redis://127.0.0.1:6379
  kvpager failover --peer redis+sentinel://one:26379,two:26379/kvpager --cluster-name chat --status

Exit codes: 0 another node is the primary now (with --status: there is one); 1 there is none, or nobody took over in
time: then the node that was asked becomes the primary again; 2 bad usage.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``failover`` and its options."""
    parser = subparsers.add_parser(
        "failover",
        help="hand over from a pair's primary to its standby",
        description="Ask the primary of a pair to hand over to its standby in good order, and tell who is it then.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_peer_options(parser, required=True)
    parser.add_argument("--status", action="store_true", help="only tell who is the primary")
    parser.add_argument(
        "--wait",
        type=number(0.1, 3600),
        default=10.0,
        metavar="SECONDS",
        help="for the other node, at most (default: %(default)g)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Hand over; returns 0 where another node took over, else 1.

    Raises ConfigError, and OSError where Redis can't be reached.
    """
    from kvpager.replication.lease import Lease
    from kvpager.replication.link import Unreachable

    pair = PairOptions(args.peer, args.cluster_name)
    lease = Lease(pair.connect(), pair.name, "failover")
    try:
        before = lease.watch()
        now = before if args.status or before is None else handed_over(lease, before, args.wait)
    except Unreachable as error:
        raise OSError(f"Redis at {pair.place} can't be asked ({error})") from None
    finally:
        lease.close()
    changed = now is not None and before is not None and now.epoch != before.epoch and now.owner != before.owner
    if args.json:
        told = {} if now is None else {"primary": now.owner, "epoch": now.epoch, "lease_seconds": now.left_s}
        emit_json({"cluster": pair.name, "primary": None, "epoch": None, **told, "changed": changed})
    else:
        emit(said(pair.name, before, now, changed, args.status))
    return 0 if changed or (args.status and now is not None) else FAILED


def handed_over(lease: Lease, before: Holder, wait_s: float) -> Holder | None:
    """Who has the lease after its holder was asked for it, and somebody took it or the time is over."""
    end = time.monotonic() + wait_s
    lease.ask(wait_s)
    while True:
        now = lease.watch()
        if (now is not None and now.owner != before.owner) or time.monotonic() >= end:
            return now
        time.sleep(LOOK_S)


def said(name: str, before: Holder | None, now: Holder | None, changed: bool, status: bool) -> str:
    """For people."""
    if now is None:
        return f"{name}: no node is the primary" + ("" if before is None else "; none has taken over yet")
    told = f"{name}: {now.owner} is the primary, epoch {now.epoch}"
    if status or before is None:
        return told
    return f"{told}; it was {before.owner}" if changed else f"{told}, as before: no other node took over"
