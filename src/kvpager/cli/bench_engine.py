"""``kvpager bench engine``: a workload through the engine in this process, without HTTP."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from kvpager.cli.bench_step import warn_of_others
from kvpager.cli.console import aligned, emit, emit_json, progress, say
from kvpager.cli.options import (
    add_load_options,
    add_model_options,
    add_pager_options,
    load_model,
    number,
    pager_options,
    positive,
    workload,
)
from kvpager.cli.store_options import add_store_options, store_options
from kvpager.errors import ConfigError

if TYPE_CHECKING:
    from kvpager.bench.engine import EngineRun
    from kvpager.bench.workload import Item, Prompts, Workload
    from kvpager.build import PagerOptions, StoreOptions
    from kvpager.engine.engine import EngineConfig
    from kvpager.models import LoadedModel

__all__ = ["add_parser", "run"]

FAILED, INTERRUPTED = 1, 130
UNLIMITED = "unlimited"
WARM_UP = (64, 4)  # tokens in and out of the request that comes before the others
EPILOG = """\
examples:
  kvpager bench engine --num-prompts 8 --input-len 2000 --output-len 128 --budget 1024 --ignore-eos
  kvpager bench engine --num-prompts 16 --input-len 500 --output-len 500 --compare-pools 24MiB,64MiB,unlimited --json
  kvpager bench engine --mix short=100/64:0.8,long=2000/128:0.2 --request-rate 4 --plot engine.png

Requests arrive on a virtual clock, which jumps over the time in which nothing is to be done. "overhead" is all of a
step but the model and attention. With --compare-pools the same workload runs with each pool, and ids are compared with
those of the last: the pool's size must never change them.
"""


def add_parser(tasks: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``engine`` to the tasks of ``bench``."""
    engine = tasks.add_parser(
        "engine",
        help="a workload through the engine, without HTTP",
        description="Run many requests in this process: tokens a second, where a step's time goes, memory told whole.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_load_options(engine)
    group = engine.add_argument_group("engine")
    group.add_argument(
        "--max-num-seqs", type=positive, default=16, metavar="N", help="answers at once (default: %(default)s)"
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=positive,
        default=512,
        metavar="N",
        help="tokens of one step at most (default: %(default)s)",
    )
    group.add_argument(
        "--max-model-len",
        type=positive,
        metavar="N",
        help="tokens of one request at most (default: as many as the longest has)",
    )
    group.add_argument(
        "--no-enable-prefix-caching",
        dest="prefix_caching",
        action="store_false",
        help="compute what prompts share anew for each",
    )
    group.add_argument(
        "--temperature", type=number(0, 100), default=0.0, metavar="T", help="0 takes the likeliest (default: 0)"
    )
    group.add_argument(
        "--compare-pools",
        metavar="SIZE[,...]",
        help=f"run with each of these pools in turn, {UNLIMITED} among them, and compare the ids",
    )
    engine.add_argument("--plot", metavar="FILE.png", help="draw the run over time, or speed against the pool's size")
    engine.add_argument("--json", action="store_true", help="print one JSON object with all figures")
    add_model_options(engine)
    add_pager_options(engine)
    add_store_options(engine)
    engine.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure the engine; returns 0, 1 when a request failed or a pool changed an answer, 130 when interrupted.

    Raises InputError and ConfigError for what can't be, and what loading a model raises.
    """
    from kvpager.bench import machine
    from kvpager.bench.engine import require_room
    from kvpager.pictures import check_target

    target = None if args.plot is None else check_target(args.plot)
    work, options = workload(args), pager_options(args)
    options.settings()  # refused before a model is loaded
    pools, store = _pools(args), store_options(args, options)
    if store is not None and args.compare_pools is not None:
        raise ConfigError("store: with --compare-pools the second pool would find what the first one has stored")
    described, others = machine.describe(), machine.Others()
    loaded = load_model(args, identify=store is not None)
    require_room(work.items(), min(args.max_model_len or 2**40, loaded.context_length or 2**40))
    bench = Bench(args, loaded, work, options, store)
    bench.warm_up()
    runs: dict[str, EngineRun] = {}
    for pool in pools:
        runs[pool or ""] = done = bench.measure(pool)
        if done.interrupted:
            break
    about = {
        "model": loaded.name,
        "dtype": loaded.dtype,
        "workload": work.figures(),
        "settings": asdict(options),
        "storing": None if store is None else store.told,
        "engine": asdict(bench.config),
        "machine": described,
        "others_share": others.share,
        "versions": machine.versions(),
    }
    return _report(args, about, runs, target)


def _pools(args: argparse.Namespace) -> list[str | None]:
    """The pools to run with; [None] for the one of the other options."""
    if args.compare_pools is None:
        return [None]
    if args.pool is not None or args.memory is not None:
        raise ConfigError("compare-pools: it excludes --pool and --memory")
    from kvpager.cli.options import pool

    names = [part.strip() for part in args.compare_pools.split(",")]
    for name in names:
        if name != UNLIMITED:
            try:
                pool(name)
            except argparse.ArgumentTypeError as error:
                raise ConfigError(f"compare-pools: {error}") from None
    if len(set(names)) < len(names):
        raise ConfigError(f"compare-pools: {args.compare_pools} names one pool twice")
    return list(names)


class Bench:
    """A loaded model and a workload, to be run with several pools."""

    def __init__(
        self,
        args: argparse.Namespace,
        loaded: LoadedModel,
        work: Workload,
        options: PagerOptions,
        store: StoreOptions | None = None,
    ) -> None:
        from kvpager.engine.engine import EngineConfig

        self._args, self._loaded, self._work, self._options, self._store = args, loaded, work, options, store
        self.config: EngineConfig = EngineConfig(
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_model_len=args.max_model_len or self._longest(),
            max_queue=work.requests,
            enable_prefix_caching=args.prefix_caching,
            seed=args.seed,
        )
        self._prompts = self._texts()

    def _texts(self) -> Prompts:
        from kvpager.bench.workload import Prompts
        from kvpager.evaluation.text import bundled_ids

        return Prompts(bundled_ids(self._loaded.tokenizer), self._work)

    def _longest(self) -> int:
        """The tokens of the longest request, in whole pages as far as the model goes: what pools are sized for."""
        most = max(sum(WARM_UP), *(item.prompt_tokens + item.output_tokens for item in self._work.items()))
        size = self._options.page_size
        return min(-(-most // size) * size, self._loaded.context_length or 2**40)

    def warm_up(self) -> None:
        """Run one short request, so that threads and weights are there."""
        from kvpager.bench.workload import Item

        read, write = WARM_UP
        self._drive([Item(0, "warm-up", 0, 0.0, read, write)], replace(self._options, pool=None, memory=None), None, "")

    def measure(self, pool: str | None) -> EngineRun:
        """Run the workload with one pool, or with the one of the options for None."""
        options = self._options
        if pool is not None:
            options = replace(options, pool=self._unlimited() if pool == UNLIMITED else pool)
        title = "Requests" if pool is None else f"Pool {pool}"
        return self._drive(self._work.items(), options, self._store, title)

    def _unlimited(self) -> str:
        """Frames, as text, of which there are always enough: for all that is held at once, and one group on top."""
        from kvpager.hf import kv_shape
        from kvpager.pools import full_frames

        shape = kv_shape(self._loaded.model.config, self._options.kv_dtype or self._loaded.dtype)
        size = self._options.page_size
        blocks = sum(-(-(item.prompt_tokens + item.output_tokens) // size) + 1 for item in self._work.items())
        return str(full_frames(blocks * size, shape, size) + 256)

    def _drive(self, items: list[Item], options: PagerOptions, store: StoreOptions | None, title: str) -> EngineRun:
        from kvpager import build
        from kvpager.bench.engine import VirtualClock, drive
        from kvpager.engine.params import SamplingParams

        def params(item: Item) -> SamplingParams:
            return SamplingParams(
                max_tokens=item.output_tokens,
                temperature=self._args.temperature,
                ignore_eos=self._args.ignore_eos,
                seed=self._args.seed + item.index,
            )

        clock = VirtualClock()
        engine = build.make_engine(self._loaded, options, self.config, store=store, clock=clock)
        try:
            with progress(title, len(items) if title else 0) as advance:
                return drive(engine, self._loaded.model, items, self._prompts, params, clock, progress=advance)
        finally:
            engine.close()


def _report(args: argparse.Namespace, about: dict[str, Any], runs: dict[str, EngineRun], target: Any) -> int:
    from kvpager.bench import engine_figures, engine_plots

    every = {name: engine_figures.figures(run) for name, run in runs.items()}
    comparison = engine_figures.compared(runs) if args.compare_pools is not None else None
    title = f"{about['model']} ({about['dtype']}), {about['workload']['requests']} requests"
    if target is not None:
        if comparison is not None:
            engine_plots.draw_pools(comparison, title, target)
        else:
            engine_plots.draw_run(next(iter(runs.values())), title, target)
        say(f"drawn: {target}")
    if args.json:
        figures = {"pools": comparison, "runs": every} if comparison is not None else next(iter(every.values()))
        emit_json({**about, **figures})
    else:
        emit(title)
        for name, figures in every.items():
            emit(f"\n{f'pool {name}: ' if name else ''}{table(figures)}")
        if comparison is not None:
            emit(f"\n{pool_table(comparison)}")
        warn_of_others(about["others_share"])
    if any(run.interrupted for run in runs.values()):
        return INTERRUPTED
    broken = [row["pool"] for row in comparison or () if row["broken"]]
    if broken:
        say(f"kvpager: pools {', '.join(broken)} changed answers under the same schedule, which must never be")
    return FAILED if broken or any(figures["failed"] for figures in every.values()) else 0


def table(figures: dict[str, Any]) -> str:
    """A run's figures for people."""
    from kvpager.bench.engine import PARTS

    mib, memory, steps = 2**20, figures["memory"], figures["steps"]
    requests = figures["completed"] + figures["failed"]
    head = (
        f"{figures['completed']} of {requests} requests in {figures['duration_s']:.2f} s"
        f"{' (interrupted)' if figures['interrupted'] else ''}: {figures['output_tokens_per_s']:.1f} output tokens/s, "
        f"{figures['total_tokens_per_s']:.1f} in all; {figures['prompt_tokens_computed']} prompt tokens computed, "
        f"{figures['cached_tokens']} cached"
    )
    latencies: list[tuple[str, ...]] = [("ms", "n", "mean", "p50", "p90", "p99", "most")]
    names = {"queue_ms": "waiting", "ttft_ms": "to the first token", "tpot_ms": "a token after it", "e2e_ms": "in all"}
    for name, meaning in names.items():
        spread = figures[name]
        values = (spread[key] for key in ("mean", "p50", "p90", "p99", "max"))
        row = ("-" if value is None else f"{value:.1f}" for value in values)
        latencies.append((meaning, str(spread["n"]), *row))
    kinds: list[tuple[str, ...]] = [("steps", "n", "share", "median ms", "sequences", "tokens")]
    for kind, one in steps.items():
        if one["n"]:
            sizes = f"{one['mean_sequences']:.1f}", f"{one['mean_tokens']:.1f}"
            kinds.append((kind, str(one["n"]), f"{one['share']:.1%}", f"{one['median_ms']:.2f}", *sizes))
    split: list[tuple[str, ...]] = [("part of a step", "ms", "share")]
    for part, one in figures["parts"].items():
        if one["share"] is not None:
            split.append((f"{part}: {PARTS[part]}", f"{one['ms_per_step']:.2f}", f"{one['share']:.1%}"))
    if figures["overhead_share"] is not None:
        split.append(("overhead: all but model and attention", "", f"{figures['overhead_share']:.1%}"))
    pool = figures["pool"]
    ending = (
        f"{pool['most_used']} of {pool['frames']} frames used at most; KV in memory "
        f"{memory['resident_bytes'] / mib:.1f} MiB (frames {memory['pool_bytes'] / mib:.1f}, digests "
        f"{memory['digest_bytes'] / mib:.1f}, tables {memory['table_bytes'] / mib:.1f}), swap "
        f"{memory['swap_bytes'] / mib:.1f} MiB, a full cache {memory['full_kv_bytes'] / mib:.1f} MiB; "
        f"{memory['evictions']} pages evicted, {memory['recalls']} recalled, {figures['preemptions']} preemptions; "
        f"peak of the process {memory['peak_rss_bytes'] / mib:.0f} MiB"
    )
    below = [ending, *_stored(figures["store"]), *(f"failed: {error}" for error in figures["errors"])]
    return "\n\n".join([head, aligned(latencies), aligned(kinds), aligned(split), "\n".join(below)])


def _stored(store: dict[str, Any] | None) -> list[str]:
    """What the store did, for people."""
    if store is None:
        return []
    return [
        f"{name} ({tier['state']}): {tier['stored']} blocks stored, {tier['stored_bytes'] / 1e6:.1f} MB, "
        f"{tier['waiting']} wait, {tier['skipped']} skipped; {tier['hits']} found, "
        f"{tier['read_bytes'] / 1e6:.1f} MB of pages read; {tier['bytes'] / 2**20:.1f} MiB held"
        for name, tier in store["tiers"].items()
    ]


def pool_table(rows: list[dict[str, Any]]) -> str:
    """What pools did with the same workload, for people."""
    mib = 2**20
    found: list[tuple[str, ...]] = [("pool", "MiB", "resident", "swap", "tokens/s", "recalled", "schedule", "ids")]
    found += [
        (
            row["pool"],
            *(f"{row[name] / mib:.1f}" for name in ("pool_bytes", "resident_bytes", "swap_bytes")),
            f"{row['output_tokens_per_s']:.1f}",
            str(row["recalls"]),
            "same" if row["same_schedule"] else "other",
            "equal" if row["ids_equal"] else f"{row['differing']} differ",
        )
        for row in rows
    ]
    return aligned(found)
