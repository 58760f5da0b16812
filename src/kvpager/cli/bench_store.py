"""``kvpager bench store``: faults from swap and from the store, and how fast the store writes and checks."""

from __future__ import annotations

import argparse
import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpager.cli.bench_step import warn_of_others
from kvpager.cli.console import aligned, emit, emit_json, progress, say
from kvpager.cli.options import DEFAULT_MODEL, positive, whole
from kvpager.errors import InputError

if TYPE_CHECKING:
    from kvpager.bench.store import Result
    from kvpager.stored import StoredBlock

__all__ = ["add_parser", "run"]

EPILOG = f"""\
examples:
  kvpager bench store
  kvpager bench store --folder /mnt/disk --blocks 1000 --json
  kvpager bench store --model {DEFAULT_MODEL} --plot store.png

Blocks are of random numbers, in the shape of {DEFAULT_MODEL} in bfloat16, or of --model reading the bundled book: then
compression has something to go by, and heads have real scores. All of it is written to --folder and removed again.
"""


def add_parser(tasks: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``store`` to the tasks of ``bench``."""
    store = tasks.add_parser(
        "store",
        help="faults from swap and from the store, writing, checking",
        description="What a page back costs from swap and from the store; how fast the store writes and checks.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    store.add_argument(
        "--folder", default=".", metavar="PATH", help="where to write, on the disk to be measured (default: here)"
    )
    store.add_argument(
        "--blocks",
        type=whole(16, 10**6),
        default=437,
        metavar="N",
        help="of 16 tokens (default: %(default)s, 7,000 tokens)",
    )
    store.add_argument(
        "--batches",
        type=_several,
        default=(64, 256, 1024),
        metavar="N[,...]",
        help="pages wanted at once (default: 64,256,1024)",
    )
    store.add_argument(
        "--repeats", type=whole(1, 1000), default=5, metavar="N", help="of each case (default: %(default)s)"
    )
    store.add_argument("--model", metavar="NAME", help="a model whose pages to take (default: random numbers)")
    store.add_argument("--seed", type=whole(0, 2**31), default=0, metavar="N", help="of all orders (default: 0)")
    store.add_argument("--plot", metavar="FILE.png", help="draw microseconds a page and MB/s")
    store.add_argument("--json", action="store_true", help="print one JSON object with all figures")
    store.set_defaults(run=run)


def _several(text: str) -> tuple[int, ...]:
    return tuple(positive(part) for part in text.split(","))


def run(args: argparse.Namespace) -> int:
    """Measure it; returns 0. Raises InputError for what can't be, StoreError when the disk fails."""
    from kvpager import build
    from kvpager.bench import machine, store_plots
    from kvpager.bench.store import Plan, measure, steps
    from kvpager.pictures import check_target

    target = None if args.plot is None else check_target(args.plot)
    folder = Path(args.folder)
    if not folder.is_dir():
        raise InputError(f"folder: {folder} is none")
    build.require_store(build.StoreOptions(str(folder / "store.db"), compression="zstd"))
    described, others = machine.describe(), machine.Others()
    blocks, heads, of = _blocks(args, folder)
    plan = Plan(blocks, heads, args.batches, args.repeats, seed=args.seed)
    if max(plan.batches) > min(len(blocks) * heads, len(blocks) * plan.pages):
        raise InputError(
            f"batches: {max(plan.batches)} pages of one layer are more than {len(blocks)} blocks have: give --blocks"
        )
    with progress("Store", steps(plan)) as advance:
        result = measure(plan, folder, advance)
    title = f"pages of {of}, {described['processor']}"
    if target is not None:
        store_plots.draw(result.figures(), title, target)
        say(f"drawn: {target}")
    busy = others.share
    if args.json:
        about = {"of": of, "machine": described, "others_share": busy, "versions": machine.versions()}
        emit_json({**result.figures(), **about})
    else:
        emit(f"{title}\n\n{table(result)}")
        warn_of_others(busy)
    return 0


def _blocks(args: argparse.Namespace, folder: Path) -> tuple[list[StoredBlock], int, str]:
    """What is stored, a layer's pages of a block, and what it is of."""
    from kvpager.bench.store import random_blocks

    if args.model is None:
        return random_blocks(args.blocks, 90, 4096, args.seed), 3, "random numbers"
    with tempfile.TemporaryDirectory(prefix="kvpager-bench-", dir=folder) as name:
        return _model_blocks(args.model, args.blocks, Path(name) / "store.db")


def _model_blocks(model: str, count: int, path: Path) -> tuple[list[StoredBlock], int, str]:
    """The blocks that an engine stores when it reads the bundled book, in windows that fit the model."""
    from kvpager import build
    from kvpager.engine.engine import EngineConfig
    from kvpager.engine.params import SamplingParams
    from kvpager.evaluation.text import bundled_ids
    from kvpager.stores import SqliteStore
    from kvpager.stores.archive import import_blocks
    from kvpager.stores.codec import decode

    loaded = build.load_model(model, identify=True, progress=say)
    store, size = build.StoreOptions(str(path), limit="1024GiB"), build.PagerOptions().page_size
    ids = bundled_ids(loaded.tokenizer)[: count * size]
    engine = build.make_engine(loaded, build.PagerOptions(swap="memory"), EngineConfig(max_num_seqs=1), store=store)
    with progress("Reading the book", len(ids)) as advance:
        window = (loaded.context_length or 2048) // 64 * 64 - 64
        for start in range(0, len(ids), window):
            # a prompt's last token and the answer's are not stored as blocks: one token more each
            engine.add(str(start), ids[start : start + window] + ids[:1], SamplingParams(max_tokens=1))
            while engine.has_work:
                engine.step()
            advance(min(start + window, len(ids)))
    heads = engine.pager.shape.kv_heads
    engine.close()
    archive = path.with_suffix(".kvpa")
    with closing(SqliteStore(path, limit_bytes=2**40)) as opened:
        opened.export(archive)
    blocks = [decode(entry.data, entry.key) for entry in import_blocks(archive) if entry.kind == "block"]
    return blocks, heads, f"{loaded.name} ({loaded.dtype})"


def table(result: Result) -> str:
    """All figures for people."""
    from kvpager.bench.store import READERS

    figures = result.figures()
    batches = list(dict.fromkeys(fault.batch for fault in result.faults))
    faults: list[tuple[str, ...]] = [("microseconds a page, wanted at once", *map(str, batches))]
    for reader, meaning in READERS.items():
        row = [fault for fault in figures["faults"] if fault["reader"] == reader]
        faults.append((meaning, *(f"{fault['us_per_page']:.2f}" for fault in row)))
    writes: list[tuple[str, ...]] = [("written", "MB/s", "batch ms", "most", "of payload", "read, us a page")]
    writes += [_write_row(one) for one in figures["writes"]]
    return "\n".join(
        [
            f"{result.blocks} blocks, {result.payload_bytes / 1e6:.1f} MB in pages of {result.page_bytes} bytes",
            "",
            aligned(faults),
            "",
            aligned(writes),
            "",
            f"a plain file is written at {figures['plain_file_mb_per_s']:.0f} MB/s; a store is verified at "
            f"{figures['verify_mb_per_s']:.0f} MB/s",
        ]
    )


def _write_row(one: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"synchronous {one['synchronous']}, compression {one['compression']}",
        f"{one['mb_per_s']:.0f}",
        f"{one['batch_ms']:.1f}",
        f"{one['batch_ms_most']:.1f}",
        f"{1 + one['overhead']:.1%}",
        f"{one['read_us_per_page']:.2f}",
    )
