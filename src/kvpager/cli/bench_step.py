"""``kvpager bench step``: where the time of a model's decode step goes."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from kvpager.cli.console import aligned, emit, emit_json, progress, say
from kvpager.cli.options import add_model_options, add_pager_options, load_model, pager_options, positive, whole
from kvpager.errors import InputError

if TYPE_CHECKING:
    import torch

    from kvpager.bench.step import Split
    from kvpager.build import PagerOptions
    from kvpager.hf import PagerCache
    from kvpager.models import LoadedModel

__all__ = ["add_parser", "run", "warn_of_others"]

BUSY = 0.1  # share of the cores above which other programs have disturbed ours
EPILOG = """\
examples:
  kvpager bench step
  kvpager bench step --prompt-tokens 7000 --budget 1024 --steps 16 --json

The prompt is the beginning of the bundled book. Steps with clocks take turns with steps without; "least" is what the
bytes of weights, pages and digests take at the speed at which memory was read between the steps.
"""


def add_parser(tasks: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``step`` to the tasks of ``bench``."""
    step = tasks.add_parser(
        "step",
        help="where the time of a decode step goes",
        description="The time of a model's decode step in parts, beside the least that its bytes allow.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    step.add_argument(
        "--prompt-tokens", type=positive, default=512, metavar="N", help="length of the prompt (default: %(default)s)"
    )
    step.add_argument(
        "--steps",
        type=whole(1, 10000),
        default=32,
        metavar="N",
        help="steps with clocks, and as many without (default: %(default)s)",
    )
    step.add_argument("--json", action="store_true", help="print one JSON object with all figures")
    add_model_options(step)
    add_pager_options(step, swap="memory")
    step.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure a decode step; returns 0. Raises InputError and ConfigError for what can't be."""
    from kvpager.bench import machine
    from kvpager.kernels.choose import native_module
    from kvpager.kernels.cores import default_threads

    options = pager_options(args)
    options.settings()  # refused before a model is loaded
    described, others = machine.describe(), machine.Others()
    loaded = load_model(args)
    threads = args.threads or default_threads()
    result, kernel = _measure(args, loaded, options, threads)
    native, busy = native_module(), others.share
    if args.json:
        emit_json(
            {
                **result.figures(),
                "model": loaded.name,
                "dtype": loaded.dtype,
                "prompt_tokens": args.prompt_tokens,
                "kernel": kernel,
                "weights": args.weights,
                "settings": asdict(options),
                "isa": None if native is None else native.isa(),
                "threads": threads,
                "machine": described,
                "others_share": busy,
                "versions": machine.versions(),
            }
        )
    else:
        budget = "all of them" if options.budget is None else f"a budget of {options.budget}"
        emit(
            f"{loaded.name} ({loaded.dtype}) after {args.prompt_tokens} tokens with {budget}, {kernel} kernel, "
            f"{threads} threads, {described['processor']}\n\n{table(result)}"
        )
        warn_of_others(busy)
    return 0


def warn_of_others(share: float | None) -> None:
    """Say when other programs had so much of the cores that the times can't be trusted."""
    if share is not None and share > BUSY:
        say(f"note: other programs used {share:.0%} of the cores meanwhile; the times are not to be trusted")


def _measure(args: argparse.Namespace, loaded: LoadedModel, options: PagerOptions, threads: int) -> tuple[Split, str]:
    from kvpager import build
    from kvpager.bench.step import split, tokens_written
    from kvpager.bench.stream import Stream
    from kvpager.cli.decoding import Sampler
    from kvpager.kernels.choose import open_kernel

    more = tokens_written(args.steps)
    prompt = _prompt(loaded, args.prompt_tokens, more)
    with build.make_cache(loaded, options, len(prompt) + more) as cache:
        logits = _read(loaded, cache, prompt)
        sampler = Sampler(0.0, 1.0, args.seed)
        stream = Stream(threads)
        with progress("Steps", args.steps) as advance:
            result = split(loaded.model, cache, logits, sampler, stream, steps=args.steps, progress=advance)
        return result, open_kernel(cache.pager.shape, cache.pager.config).name


def _prompt(loaded: LoadedModel, tokens: int, more: int) -> list[int]:
    """The first `tokens` tokens of the bundled book; raises InputError when they, and `more`, are too many."""
    from kvpager.evaluation.text import bundled_ids

    context = loaded.context_length
    if context is not None and tokens + more > context:
        raise InputError(
            f"prompt-tokens: {tokens}, and {more} more to write, do not fit the context of {loaded.name}, {context}"
        )
    # no token is longer than a word or two: so many characters are enough, and far quicker than the whole book
    ids = bundled_ids(loaded.tokenizer, 64 + 16 * tokens)
    if len(ids) < tokens:
        raise InputError(f"prompt-tokens: {tokens} is more than the {len(ids)} tokens of the bundled text")
    return ids[:tokens]


def _read(loaded: LoadedModel, cache: PagerCache, prompt: list[int]) -> torch.Tensor:
    """Read the prompt as ``kvpager generate`` does; logits after its last token."""
    import torch

    from kvpager.cli.decoding import prefill

    with torch.inference_mode(), progress("Reading the prompt", len(prompt)) as advance:
        return prefill(loaded.model, cache, prompt, advance)


def table(result: Split) -> str:
    """All figures for people."""
    from kvpager.bench.step import PARTS

    rows: list[tuple[str, ...]] = [("part", "ms", "share", "least ms")]
    for part, ms in result.parts_ms.items():
        least = result.part_floor_ms(part)
        share = f"{ms / result.clocked_ms:.1%}"
        rows.append((f"{part}: {PARTS[part]}", f"{ms:.2f}", share, f"{least:.2f}" if least else ""))
    rows.append(("all, with clocks", f"{result.clocked_ms:.2f}", "100.0%", ""))
    rows.append(
        (
            "of it overhead: paging and model",
            f"{result.overhead_ms:.2f}",
            f"{result.overhead_ms / result.clocked_ms:.1%}",
            "",
        )
    )
    rows.append(("all, without", f"{result.step_ms:.2f}", "", f"{result.floor.ms:.2f}"))
    floor = result.floor
    return "\n".join(
        [
            aligned(rows),
            "",
            f"{1e3 / result.step_ms:.1f} tokens/s. A step reads {floor.weight_bytes / 1e6:.1f} MB of weights, "
            f"{floor.page_bytes / 1e6:.1f} MB of pages and {floor.digest_bytes / 1e6:.1f} MB of digests; memory was "
            f"read at {floor.stream_gb_per_s:.1f} GB/s: the step took {result.step_ms / floor.ms:.1f} times the least.",
        ]
    )
