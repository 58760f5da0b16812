"""``kvpager store``: looking at a store, checking it, making room in it, carrying it elsewhere."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpager.cli.console import aligned, emit, emit_json, progress
from kvpager.cli.options import number, size
from kvpager.config import parse_size
from kvpager.errors import ConfigError, InputError
from kvpager.stored import TENANT_BYTES
from kvpager.stores import LEAST_LIMIT_BYTES

if TYPE_CHECKING:
    from kvpager.stores import RedisDesk, SqliteStore
    from kvpager.stores.verify import Damage, Report

__all__ = ["add_parser"]

MIB = 2**20
LEAST = f"{LEAST_LIMIT_BYTES // MIB}MiB"
DAY_S = 86400
DAMAGED = 1  # the exit code of `verify` where something is
MOST_LINES = 20  # of what is damaged, for people
UNBOUNDED = 2**62
NOBODY = "none"
EPILOG = """\
examples:
  kvpager store stats ~/kv/store.db
  kvpager store verify ~/kv/store.db --drop
  kvpager store prune ~/kv/store.db --limit 5GiB --unused 30
  kvpager store export ~/kv/store.db blocks.kvpa
  kvpager store import ~/other/store.db blocks.kvpa
  kvpager store stats redis://127.0.0.1:6379

All of them may run beside a server that uses the store. The password of a Redis rather stands in
KVPAGER_REDIS_PASSWORD than in its URL: others can see a program's options.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``store`` with its tasks."""
    parser = subparsers.add_parser(
        "store",
        help="look at, check, prune and carry what `serve --store` keeps",
        description="Look at a store, check it, make room in it, carry it to another machine.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tasks = parser.add_subparsers(title="tasks", dest="task", metavar="TASK", required=True)
    _add_task(tasks, "stats", "what it holds, and what that takes on disk", stats)
    verify = _add_task(tasks, "verify", f"read and check everything; exit code {DAMAGED} where it is damaged", check)
    verify.add_argument("--drop", action="store_true", help="forget what is damaged, so that it is computed anew")
    prune_ = _add_task(tasks, "prune", "forget what is worth least, or old, or a tenant's", prune, "--limit 5GiB")
    prune_.add_argument(
        "--limit", type=size, metavar="SIZE", help=f"until it takes no more than so much on disk, at least {LEAST}"
    )
    prune_.add_argument(
        "--unused", type=number(0, 1e6), metavar="DAYS", help="what was not used for so long, of --tenant or of all"
    )
    prune_.add_argument(
        "--tenant", type=_tenant, metavar="HEX|none", help="of this tenant, as `stats` names it; all of it by itself"
    )
    export_ = _add_task(tasks, "export", "write blocks and sessions to an archive", export, "blocks.kvpa")
    export_.add_argument("archive", metavar="ARCHIVE", help="the file to write; an older one makes way at the end")
    export_.add_argument("--tenant", type=_tenant, metavar="HEX|none", help="of this tenant only, as `stats` names it")
    import_ = _add_task(tasks, "import", "store what an archive has", take, "blocks.kvpa")
    import_.add_argument("archive", metavar="ARCHIVE", help="what `export` has written")
    import_.add_argument(
        "--limit",
        type=size,
        default="10GiB",
        metavar="SIZE",
        help=f"bytes on disk at most, at least {LEAST} (default: %(default)s)",
    )


def _add_task(
    tasks: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    tells: str,
    run: Callable[[argparse.Namespace], int],
    more: str = "",
) -> argparse.ArgumentParser:
    task = tasks.add_parser(
        name,
        help=tells,
        description=f"{tells[0].upper()}{tells[1:]}.",
        epilog=f"example: kvpager store {name} ~/kv/store.db {more}".rstrip(),
    )
    task.add_argument("path", metavar="PATH", help="the store's file, or a Redis's URL")
    task.add_argument("--json", action="store_true", help="print one JSON object with all figures")
    task.set_defaults(run=run)
    return task


def _tenant(text: str) -> bytes:
    """An argparse type: a tenant in hexadecimal digits, or "none" for nobody's in particular."""
    if text == NOBODY:
        return bytes(TENANT_BYTES)
    try:
        tenant = bytes.fromhex(text)
    except ValueError:
        tenant = b""
    if len(tenant) != TENANT_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is neither {2 * TENANT_BYTES} hexadecimal digits nor {NOBODY}")
    return tenant


def _named(tenant: bytes) -> str:
    return tenant.hex() if any(tenant) else NOBODY


@contextmanager
def opened(path: str, limit: int = UNBOUNDED, *, new: bool = False) -> Iterator[SqliteStore | RedisDesk]:
    """The store in a file, which is left as it is where it is damaged, or in a Redis. Raises InputError for none."""
    from kvpager.stores import RedisDesk, SqliteStore, is_redis_url, require_path

    if is_redis_url(path):
        with closing(RedisDesk(path, limit_bytes=limit)) as desk:
            desk.open()
            yield desk
        return
    require_path(path)
    place = Path(path).expanduser()
    if not new and not place.is_file():
        raise InputError(f"store: there is none at {place}")
    with closing(SqliteStore(place, limit_bytes=limit, mend=False, guest=not new)) as store:
        store.open()
        yield store


@contextmanager
def _bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar whose length is told with the first step."""
    with ExitStack() as stack:
        advance: Callable[[int], None] | None = None

        def tell(done: int, total: int) -> None:
            nonlocal advance
            if advance is None:
                advance = stack.enter_context(progress(title, total))
            advance(done)

        yield tell


def stats(args: argparse.Namespace) -> int:
    """Tell what is held; returns 0. Raises InputError and StoreError."""
    with opened(args.path) as store:
        sizes, tenants = store.sizes(), store.tenants()
        files = {} if isinstance(store.path, str) else _files(store.path)
        reserve = 0 if isinstance(store.path, str) else files.get(f"{store.path.name}.reserve", 0)
    held = sizes.bytes - reserve
    figures: dict[str, Any] = {
        "path": str(store.path),
        "blocks": sizes.blocks,
        "sessions": sizes.records,
        "payload_bytes": sizes.payload_bytes,
        "bytes": sizes.bytes,
        "reserve_bytes": reserve,
        "overhead": held / sizes.payload_bytes - 1 if sizes.payload_bytes else None,
        "files": files,
        "tenants": [{**asdict(one), "tenant": _named(one.tenant)} for one in tenants],
    }
    if args.json:
        emit_json(figures)
        return 0
    rows: list[tuple[str, ...]] = [("tenant", "blocks", "sessions", "MiB", "pages, MiB")]
    rows += [
        (_named(one.tenant), str(one.blocks), str(one.records), _mib(one.bytes), _mib(one.payload_bytes))
        for one in tenants
    ]
    more = "" if figures["overhead"] is None else f", without the reserve {figures['overhead']:.1%} more than its pages"
    emit(
        f"{store.path}: {sizes.blocks} blocks and {sizes.records} sessions, {_mib(sizes.payload_bytes)} MiB of pages; "
        f"{_mib(sizes.bytes)} MiB {_held(store)}"
        + (f", {_mib(reserve)} MiB of them kept free for a full disk (the reserve)" if reserve else "")
        + f"{more}\n"
        + "".join(f"  {name}  {_mib(nbytes)} MiB\n" for name, nbytes in files.items())
        + (f"\n{aligned(rows)}" if tenants else "")
    )
    return 0


def _held(store: SqliteStore | RedisDesk) -> str:
    """How it holds what it holds: a Redis's path is a text, its URL."""
    return "held" if isinstance(store.path, str) else "on disk"


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.1f}"


def _files(path: Path) -> dict[str, int]:
    """The store's files and their bytes."""
    beside = (file for file in path.parent.glob(f"{path.name}*") if file.name[len(path.name) :][:1] in ("", "-", "."))
    return {file.name: file.stat().st_size for file in sorted(beside)}


def check(args: argparse.Namespace) -> int:
    """Check everything; returns 0, or 1 where something is damaged. Raises InputError and StoreError."""
    with opened(args.path) as store, _bar("Checking") as tell:
        began = time.perf_counter()
        report = store.verify(tell)
        seconds = time.perf_counter() - began
        if args.drop:
            store.drop_damaged(report)
    if args.json:
        damaged = [{**asdict(one), "key": one.key.hex()} for one in report.damaged]
        counts = {"blocks": report.blocks, "pages": report.pages, "sessions": report.records, "bytes": report.nbytes}
        rate = report.nbytes / 1e6 / seconds
        emit_json({**counts, "seconds": seconds, "mb_per_s": rate, "damaged": damaged, "dropped": args.drop})
    else:
        emit(_checked(report, seconds, args.drop))
    return DAMAGED if report.damaged else 0


def _checked(report: Report, seconds: float, dropped: bool) -> str:
    head = (
        f"{report.blocks} blocks with {report.pages} pages and {report.records} sessions, {report.nbytes / 1e6:.1f} "
        f"MB, checked in {seconds:.2f} s ({report.nbytes / 1e6 / seconds:.0f} MB/s)"
    )
    if not report.damaged:
        return f"{head}: nothing is damaged"
    lines = [f"{head}: {len(report.damaged)} damaged", *map(_damage, report.damaged[:MOST_LINES])]
    if len(report.damaged) > MOST_LINES:
        lines.append(f"  and {len(report.damaged) - MOST_LINES} more; --json has all of them")
    lost = f"{len(report.rows_damaged('blocks'))} blocks and {len(report.rows_damaged('records'))} sessions"
    lines.append(f"forgotten: {lost}" if dropped else f"{lost} are missed when they are asked for; --drop forgets them")
    return "\n".join(lines)


def _damage(one: Damage) -> str:
    what = {"page": f"page {one.page} of block", "head": "head of block", "record": "session", "file": "file"}
    name = f"{what.get(one.kind, one.kind)} {one.key[:6].hex()}".rstrip()
    return f"  {name}: {one.message}"


def prune(args: argparse.Namespace) -> int:
    """Forget some; returns 0. Raises ConfigError, InputError and StoreError."""
    if args.limit is None and args.unused is None and args.tenant is None:
        raise ConfigError("prune: what is to be forgotten is said by --limit, --unused or --tenant")
    limit = None if args.limit is None else parse_size(args.limit, "limit")
    # with the limit that it will have, its log and its reserve have their shares of that
    with opened(args.path, limit or UNBOUNDED) as store:
        before, count = store.sizes().bytes, 0
        if args.unused is not None or args.tenant is not None:
            older = None if args.unused is None else args.unused * DAY_S
            count += store.prune(older_seconds=older, tenant=args.tenant)
        if limit is not None:
            count += store.prune(to_bytes=limit)
        after = store.sizes()
    if args.json:
        emit_json({"forgotten": count, "blocks": after.blocks, "bytes_before": before, "bytes": after.bytes})
    else:
        emit(
            f"{count} blocks and sessions forgotten; {after.blocks} blocks and {after.records} sessions are left, "
            f"{_mib(after.bytes)} MiB {_held(store)} ({_mib(before)} before)"
        )
    return 0


def export(args: argparse.Namespace) -> int:
    """Write an archive; returns 0. Raises InputError and StoreError."""
    archive = Path(args.archive).expanduser()
    with opened(args.path) as store, _bar("Exporting") as tell:
        moved = store.export(archive, args.tenant, tell)
    nbytes = archive.stat().st_size
    if args.json:
        emit_json({"blocks": moved.blocks, "sessions": moved.records, "damaged": moved.left_out, "bytes": nbytes})
    else:
        damaged = f"; {moved.left_out} were left out, damaged or gone meanwhile" if moved.left_out else ""
        emit(f"{moved.blocks} blocks and {moved.records} sessions: {archive}, {_mib(nbytes)} MiB{damaged}")
    return 0


def take(args: argparse.Namespace) -> int:
    """Store what an archive has; returns 0. Raises InputError and StoreError."""
    archive = Path(args.archive).expanduser()
    if not archive.is_file():
        raise InputError(f"archive: there is none at {archive}")
    with opened(args.path, parse_size(args.limit, "limit"), new=True) as store, _bar("Importing") as tell:
        moved = store.import_(archive, tell)
        sizes = store.sizes()
    if args.json:
        figures = {"blocks": moved.blocks, "sessions": moved.records, "left_out": moved.left_out}
        emit_json({**figures, "blocks_held": sizes.blocks, "bytes": sizes.bytes})
    else:
        emit(
            f"{moved.blocks} blocks and {moved.records} sessions stored, {moved.left_out} left out (there already, or "
            f"no room); {sizes.blocks} blocks are there, {_mib(sizes.bytes)} MiB {_held(store)}"
        )
    return 0
