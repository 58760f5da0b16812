"""``kvpager eval echo``: what paging costs in quality, measured against the full cache on real text."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpager.cli.console import aligned, emit, emit_json, progress, say
from kvpager.cli.options import add_model_options, add_pager_options, load_model, pager_options, positive, whole
from kvpager.config import DIGESTS, MODES, POLICIES
from kvpager.errors import ConfigError

if TYPE_CHECKING:
    from kvpager.build import PagerOptions
    from kvpager.evaluation.echo import EchoFull, EchoRun, EchoTask
    from kvpager.models import LoadedModel

__all__ = ["add_parser", "run"]

EPILOG = """\
examples:
  kvpager eval echo --budget 480 --pool 30%
  kvpager eval echo --budget 240,480,960 --compare discard:streaming,recall:minmax --plot quality.png
  kvpager eval echo --budget 480 --tile 1 --chunk 256 --json

The passage is read, then other text, then the passage again. Loss of the second reading tells whether the past is
still there. KL and top-1 are over all positions after the first passage. Recalls depend on --chunk: within one
forward all tiles pass through a layer before the next layer. Without --pool and --memory, and for every discard:POLICY
of --compare, the pool is as large as the budget needs.
"""
MIB = 2**20
DEFAULT_COMPARISONS = "discard:attention,discard:h2o,discard:streaming"


@dataclass(frozen=True)
class Series:
    """One way to hold the past, over all budgets."""

    name: str
    options: PagerOptions


def budgets(text: str) -> list[int]:
    """An argparse type: budgets in tokens, separated by commas."""
    return [positive(part) for part in text.split(",")]


def places(text: str) -> tuple[int, int]:
    """An argparse type: two positions in the text."""
    parts = text.split(",")
    if len(parts) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not two positions, as in 0,2000")
    first, second = (whole(0)(part) for part in parts)
    return first, second


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``eval`` with its task ``echo``."""
    parser = subparsers.add_parser(
        "eval", help="measure what paging costs in quality", description="Measure what paging costs in quality."
    )
    tasks = parser.add_subparsers(title="tasks", dest="task", metavar="TASK", required=True)
    echo = tasks.add_parser(
        "echo",
        help="a passage, other text, and the passage again",
        description="Loss and divergence from the full cache on a passage that is read twice.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        conflict_handler="resolve",  # --budget takes several here
    )
    add_model_options(echo)
    add_pager_options(echo, swap="memory")
    group = echo.add_argument_group("echo")
    group.add_argument("--text", metavar="FILE", help="UTF-8 text to take both from (default: the bundled book)")
    group.add_argument(
        "--passage", type=positive, default=384, metavar="TOKENS", help="read twice (default: %(default)s)"
    )
    group.add_argument(
        "--between", type=positive, default=1152, metavar="TOKENS", help="other text (default: %(default)s)"
    )
    group.add_argument(
        "--budget",
        type=budgets,
        default=[480],
        metavar="TOKENS[,TOKENS...]",
        help="past tokens that a KV head attends to (default: 480)",
    )
    group.add_argument(
        "--at",
        type=places,
        metavar="PASSAGE,BETWEEN",
        help="the token of the text at which each begins (default: --seed chooses)",
    )
    group.add_argument(
        "--chunk",
        type=positive,
        default=256,
        metavar="TOKENS",
        help="tokens a forward, a multiple of --tile (default: 256)",
    )
    group.add_argument(
        "--compare",
        metavar="MODE:NAME[,...]",
        help="more runs with the same budgets: recall:DIGEST or discard:POLICY "
        f"(default: none, and with --plot {DEFAULT_COMPARISONS})",
    )
    group.add_argument("--belady", action="store_true", help="report the fewest recalls any policy could have had")
    group.add_argument("--plot", metavar="FILE.png", help="draw loss against budget and resident bytes")
    group.add_argument("--json", action="store_true", help="print one JSON object with all figures")
    echo.set_defaults(run=run, dtype="float32")


def run(args: argparse.Namespace) -> int:
    """Measure; returns 0. Raises InputError and ConfigError for what can't be run, before a model is loaded."""
    from kvpager.evaluation.text import bundled_text, read_text
    from kvpager.pictures import check_target

    text = bundled_text() if args.text is None else read_text(args.text)
    target = None if args.plot is None else check_target(args.plot)
    chosen = series(args)
    if args.chunk % args.tile:
        raise ConfigError(f"chunk: {args.chunk} is not a multiple of tile, {args.tile}")
    loaded = load_model(args)
    from kvpager.evaluation.echo import EchoTask, echo_full  # after loading, which sets PyTorch up first

    ids = loaded.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    task = EchoTask.take(ids, args.passage, args.between, args.seed, args.at)
    with progress("Full cache", len(task.token_ids)) as advance:
        full = echo_full(loaded.model, task, chunk=args.chunk, progress=advance)
    runs: list[tuple[str, int, EchoRun]] = []
    for one in chosen:
        runs += [(one.name, budget, measure(args, loaded, task, full, one, budget)) for budget in args.budget]
    if target is not None:
        draw(target, loaded, task, full, runs)
    if args.json:
        emit_json(figures(args, loaded, task, full, runs))
    else:
        emit(table(task, full, runs))
    return 0


def series(args: argparse.Namespace) -> list[Series]:
    """The ways to run: the one that the options describe, then those of --compare."""
    main = pager_options(args)
    asked = args.compare if args.compare is not None else DEFAULT_COMPARISONS if args.plot else ""
    found = {_name(main): main}
    for part in filter(None, (piece.strip() for piece in asked.split(","))):
        mode, _, name = part.partition(":")
        allowed = DIGESTS if mode == "recall" else POLICIES
        if mode not in MODES or name not in allowed:
            raise ConfigError(
                f"compare: {part!r} is not recall:({'|'.join(DIGESTS)}) or discard:({'|'.join(POLICIES)})"
            )
        change: Any = {"mode": mode, "digest" if mode == "recall" else "policy": name}
        if mode == "discard":
            change |= {"pool": None, "memory": None}  # as large as the budget needs
        one = replace(main, **change)
        found.setdefault(_name(one), one)
    return [Series(name, options) for name, options in found.items()]


def _name(options: PagerOptions) -> str:
    if options.mode == "discard":
        return f"discard, {options.policy}"
    return f"recall, {options.digest}"


def measure(
    args: argparse.Namespace, loaded: LoadedModel, task: EchoTask, full: EchoFull, one: Series, budget: int
) -> EchoRun:
    """One run of the task."""
    from kvpager import build
    from kvpager.evaluation.echo import echo_run, frames_for
    from kvpager.hf import kv_shape
    from kvpager.pools import full_frames

    options = replace(one.options, budget=budget)
    tokens = len(task.token_ids)
    if options.pool is None and options.memory is None:
        shape = kv_shape(loaded.model.config, loaded.dtype)
        frames = frames_for(budget, options.tile, options.page_size, args.chunk, shape)
        options = replace(options, pool=str(min(frames, full_frames(tokens, shape, options.page_size))))
    with (
        build.make_cache(loaded, options, tokens=tokens) as cache,
        progress(f"{one.name}, budget {budget}", tokens) as advance,
    ):
        return echo_run(loaded.model, cache, task, full, chunk=args.chunk, belady=args.belady, progress=advance)


def draw(
    target: Path, loaded: LoadedModel, task: EchoTask, full: EchoFull, runs: list[tuple[str, int, EchoRun]]
) -> None:
    """Write the picture."""
    from kvpager.evaluation.plots import EchoPoint, draw_echo

    points = [
        EchoPoint(name, budget, result.stats.resident_bytes, result.second_loss, result.kl_mean)
        for name, budget, result in runs
    ]
    title = f"{loaded.name} ({loaded.dtype}): a passage of {task.passage} tokens again after {task.between} others"
    draw_echo(points, full.second_loss, full.kv_bytes, title, target)
    say(f"drawn: {target}")


def figures(
    args: argparse.Namespace,
    loaded: LoadedModel,
    task: EchoTask,
    full: EchoFull,
    runs: list[tuple[str, int, EchoRun]],
) -> dict[str, Any]:
    """What ``--json`` prints: `run` is the first of `runs`."""
    results = [{"name": name, "budget": budget, **result.as_dict()} for name, budget, result in runs]
    where = {name: value for name, value in asdict(task).items() if name != "token_ids"}
    return {
        "task": {**where, "tokens": len(task.token_ids), "text": args.text or "bundled", "seed": args.seed},
        "model": loaded.name,
        "dtype": loaded.dtype,
        "chunk": args.chunk,
        "full": full.as_dict(),
        "run": results[0],
        "runs": results,
    }


def table(task: EchoTask, full: EchoFull, runs: list[tuple[str, int, EchoRun]]) -> str:
    """All figures for people."""
    head = ("", "budget", "second", "between", "KL mean", "p99", "top-1", "recalls", "evictions", "coverage")
    rows = [head, ("full cache", "", f"{full.second_loss:.3f}", f"{full.between_loss:.3f}", *("",) * 6)]
    for name, budget, result in runs:
        rows.append(
            (
                name,
                str(budget),
                f"{result.second_loss:.3f}",
                f"{result.between_loss:.3f}",
                f"{result.kl_mean:.4f}",
                f"{result.kl_p99:.3f}",
                f"{result.top1:.1%}",
                *_traffic(result, len(task.token_ids)),
            )
        )
    parts = [
        f"A passage of {task.passage} tokens (from token {task.passage_at} of the text), {task.between} tokens of "
        f"other text (from {task.between_at}), and the passage again.",
        "Losses in nats a token; KL and top-1 against the full cache, over all positions after the first passage;",
        "recalls and evictions in pages a token.",
        "",
        aligned(rows),
        "",
        _memory(full, runs),
    ]
    best = [
        f"fewest recalls possible ({name}, budget {budget}, {result.stats.frames} frames): {result.optimal_recalls}; "
        f"{result.config.policy} had {result.stats.recalls}"
        for name, budget, result in runs
        if result.optimal_recalls is not None and result.config.mode == "recall"
    ]
    return "\n".join(parts + best)


def _traffic(result: EchoRun, tokens: int) -> tuple[str, str, str]:
    """Recalls, evictions and coverage; what discard mode drops is evicted for good, and nothing is selected there."""
    if result.config.mode == "discard":
        return "", f"{(result.stats.evictions + result.stats.discards) / tokens:.1f}", ""
    return (
        f"{result.recalls_a_token:.1f}",
        f"{result.evictions_a_token:.1f}",
        f"{result.stats.mass_coverage:.1%}",
    )


def _memory(full: EchoFull, runs: list[tuple[str, int, EchoRun]]) -> str:
    rows: list[tuple[str, ...]] = [
        ("MiB", "budget", "frames", "digests", "tables", "resident", "of full", "swap", "peak RSS")
    ]
    rows.append(("full cache", "", "", "", "", f"{full.kv_bytes / MIB:.1f}", "100.0%", "", ""))
    for name, budget, result in runs:
        stats = result.stats
        sizes = (stats.pool_bytes, stats.digest_bytes, stats.table_bytes, stats.resident_bytes)
        share = f"{stats.resident_bytes / full.kv_bytes:.1%}"
        swap, peak = (f"{size / MIB:.1f}" for size in (stats.swap_bytes, stats.peak_rss_bytes))
        rows.append((name, str(budget), *(f"{size / MIB:.1f}" for size in sizes), share, swap, peak))
    return aligned(rows)
