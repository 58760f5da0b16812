"""``kvpager bench``: how fast the kernels are beside the memory; its other tasks have files of their own."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from kvpager.cli import bench_engine, bench_serve, bench_step, bench_store
from kvpager.cli.bench_step import warn_of_others
from kvpager.cli.console import aligned, emit, emit_json, progress, say
from kvpager.cli.options import positive, size, whole
from kvpager.config import DType, parse_size
from kvpager.errors import ConfigError

if TYPE_CHECKING:
    from kvpager.bench.kernel import Plan, Result, Row

__all__ = ["add_parser"]

T = TypeVar("T")

KERNEL_EPILOG = """\
examples:
  kvpager bench kernel --quick
  kvpager bench kernel --shapes 32/8x128 --tokens 8192,32768 --batch 1 --plot kernels.png
  kvpager bench kernel --kernels native,sdpa-fp32 --kv-dtype bfloat16 --kv-dtype int8 --json

Keys and values come from memory, never from a cache: short cases are laid out many times and visited in turn, as the
layers of a model are. All kernels of a case and the stream run in every round; times are medians over the rounds.
GB/s counts the bytes of keys and values, each once. Pages lie in random frames.
"""
SHAPES = "9/3x64,32/8x128,32/32x128"
TOKENS, BATCHES, REPEATS = [512, 2048, 8192, 32768], [1, 8], 15
QUICK_SHAPES, QUICK_TOKENS, QUICK_BATCHES, QUICK_REPEATS = "9/3x64", [512, 8192], [1], 5


def several(parse: Callable[[str], T]) -> Callable[[str], list[T]]:
    """An argparse type: values separated by commas."""
    return lambda text: [parse(part) for part in text.split(",")]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``bench`` with its tasks."""
    parser = subparsers.add_parser(
        "bench", help="measure speed", description="Measure speed: of kernels, of a step, of the engine, of a server."
    )
    tasks = parser.add_subparsers(title="tasks", dest="task", metavar="TASK", required=True)
    _add_kernel(tasks)
    bench_step.add_parser(tasks)
    bench_engine.add_parser(tasks)
    bench_serve.add_parser(tasks)
    bench_store.add_parser(tasks)


def _add_kernel(tasks: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    kernel = tasks.add_parser(
        "kernel",
        help="attention kernels beside PyTorch's and beside the memory",
        description="Times of attention kernels, and what share of the memory's speed they reach.",
        epilog=KERNEL_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    numbers = several(positive)
    kernel.add_argument(
        "--shapes",
        metavar="HEADS[,...]",
        help=f"query heads/KV heads x head_dim (default: {SHAPES}; with --quick {QUICK_SHAPES})",
    )
    kernel.add_argument(
        "--tokens",
        type=numbers,
        metavar="N[,...]",
        help=f"lengths (default: {_listed(TOKENS)}; with --quick {_listed(QUICK_TOKENS)})",
    )
    kernel.add_argument(
        "--batch",
        type=numbers,
        metavar="N[,...]",
        help=f"sequences (default: {_listed(BATCHES)}; with --quick {_listed(QUICK_BATCHES)})",
    )
    kernel.add_argument(
        "--tile",
        type=several(whole(1, 1024)),
        default=[1],
        metavar="N[,...]",
        help="queries of each sequence: 1 is a decode step, 64 a tile of a prompt (default: 1)",
    )
    kernel.add_argument(
        "--kernels",
        metavar="NAME[,...]",
        help="among native-layer (all sequences in one call, as the pager's), native (a call for each group of pages), "
        "native-massless (the same without page mass), reference, sdpa-fp32 and sdpa-bf16 (default: all that are "
        "there)",
    )
    kernel.add_argument(
        "--kv-dtype",
        action="append",
        choices=get_args(DType),
        help="how pages are held; may be given several times (default: bfloat16)",
    )
    _add_conditions(kernel)
    kernel.add_argument("--plot", metavar="FILE.png", help="draw the share of the memory's speed against tokens")
    kernel.add_argument("--json", action="store_true", help="print one JSON object with all figures")
    kernel.set_defaults(run=run_kernel)


def _add_conditions(kernel: argparse.ArgumentParser) -> None:
    """How the cases are measured: threads, rounds, memory."""
    kernel.add_argument(
        "--threads", type=whole(1, 256), metavar="N", help="threads for everybody (default: physical cores)"
    )
    kernel.add_argument(
        "--repeats",
        type=whole(1, 1000),
        metavar="N",
        help=f"rounds (default: {REPEATS}; with --quick {QUICK_REPEATS}); what is slow takes part in fewer",
    )
    kernel.add_argument(
        "--group-pages",
        type=whole(1, 65536),
        default=256,
        metavar="N",
        help="pages of one call at most; a pager's default is 256 (default: %(default)s)",
    )
    kernel.add_argument("--isa", metavar="NAME", help="the native kernel's instruction set (default: the best here)")
    kernel.add_argument(
        "--memory",
        type=size,
        metavar="SIZE",
        help="the most to take; what needs more is skipped (default: 70%% of free)",
    )
    kernel.add_argument(
        "--select",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure also the choice of pages by digests, at 8,192 tokens in 30 layers (default: yes)",
    )
    kernel.add_argument("--quick", action="store_true", help="one shape, two lengths, few rounds: half a minute")


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def run_kernel(args: argparse.Namespace) -> int:
    """Measure kernels; returns 0. Raises ConfigError and InputError for what can't be, before anything is measured."""
    from kvpager import build
    from kvpager.bench import kernel, machine, plots
    from kvpager.kernels.choose import native_module
    from kvpager.pictures import check_target

    build.yield_while_waiting()
    target = None if args.plot is None else check_target(args.plot)
    plan = _plan(args)
    native = native_module()
    described, others = machine.describe(), machine.Others()
    with machine.threads(plan.threads), machine.isa(args.isa), progress("Kernels", kernel.steps(plan)) as advance:
        result = kernel.measure(plan, advance)
        used = None if native is None else native.isa()
    busy = others.share
    if target is not None and result.rows:
        rows = [result.row_figures(row) for row in result.rows]
        plots.draw_kernels(rows, f"{described['processor']}, {plan.threads} threads", target)
        say(f"drawn: {target}")
    if args.json:
        isas = [] if native is None else native.isas()
        where = {
            "isa": used,
            "isas": isas,
            "threads": plan.threads,
            "group_pages": plan.group_pages,
            "machine": described,
            "others_share": busy,
        }
        emit_json({**result.figures(), **where, "versions": machine.versions()})
    else:
        emit(kernel_table(result, plan, f"{described['processor']}, {used or 'no extension'}"))
        warn_of_others(busy)
    return 0


def _plan(args: argparse.Namespace) -> Plan:
    from kvpager.bench import kernel
    from kvpager.bench.cases import Heads
    from kvpager.kernels.cores import default_threads

    shapes = args.shapes or (QUICK_SHAPES if args.quick else SHAPES)
    kernels = tuple(args.kernels.split(",")) if args.kernels else kernel.default_kernels()
    plan = kernel.Plan(
        heads=[Heads.parse(text) for text in shapes.split(",")],
        tokens=args.tokens or (QUICK_TOKENS if args.quick else TOKENS),
        batches=args.batch or (QUICK_BATCHES if args.quick else BATCHES),
        tiles=args.tile,
        kernels=kernels,
        dtypes=list(dict.fromkeys(args.kv_dtype or ["bfloat16"])),
        threads=args.threads or default_threads(),
        repeats=args.repeats or (QUICK_REPEATS if args.quick else REPEATS),
        memory=None if args.memory is None else parse_size(args.memory, "memory"),
        group_pages=args.group_pages,
        selection=args.select,
    )
    if not kernel.steps(plan):
        raise ConfigError(f"tile: no length of {_listed(plan.tokens)} holds a tile of {_listed(plan.tiles)} queries")
    return plan


def kernel_table(result: Result, plan: Plan, where: str) -> str:
    """All figures for people."""
    head = ("heads", "tokens", "batch", "queries", "kernel", "pages", "ms", "GB/s", "of stream", "beside")
    names = [
        name for name in ("sdpa-fp32", "sdpa-bf16", "reference", "native", "native-massless") if name in plan.kernels
    ]
    rows = [(*head, *(f"x {name}" for name in names))]
    for row in result.rows:
        figures = result.row_figures(row)
        rows.append((*_case(row), *_speed(figures), *_ratios(figures["times_faster"], names)))
    stream = result.stream
    parts = [
        f"{where}, {plan.threads} threads. Memory read as a stream: {stream.gb_per_s:.1f} GB/s, median of "
        f"{len(stream.rates)} passes ({min(stream.rates):.1f} to {max(stream.rates):.1f}).",
        '"of stream" is against that median, "beside" against the passes in the same rounds; x: times faster than.',
        "",
        aligned(rows),
    ]
    for one in result.selections:
        parts += [
            "",
            f"Choosing pages of {one.tokens} tokens in {one.layers} layers of {one.kv_heads} KV heads ({one.kernel}, "
            f"{one.digest}): {one.select_ms:.2f} ms, {one.share:.1%} of attending to all of them "
            f"({one.attend_ms:.2f} ms, {one.dtype}); digests take {one.digest_share:.1%} of their bytes.",
        ]
    if result.skipped:
        parts += ["", "Skipped:", *(f"  {line}" for line in result.skipped)]
    return "\n".join(parts)


def _case(row: Row) -> tuple[str, ...]:
    case = row.case
    kind = "contiguous" if row.kernel.startswith("sdpa") else row.dtype
    return (str(case.heads), str(case.tokens), str(case.batch), str(case.tile), row.kernel, kind)


def _speed(figures: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{figures['ms']:.3f}",
        f"{figures['gb_per_s']:.1f}",
        f"{figures['stream_fraction']:.0%}",
        f"{figures['stream_beside_fraction']:.0%}",
    )


def _ratios(faster: dict[str, float], names: list[str]) -> tuple[str, ...]:
    return tuple(f"{faster[name]:.2f}" if name in faster else "" for name in names)
