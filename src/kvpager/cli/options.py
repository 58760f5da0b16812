"""Options that several commands share, and the checks of their values.

A value that is out of its range is refused by argparse (exit code 2) before anything is loaded.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvpager import build
from kvpager.build import WEIGHTS, PagerOptions
from kvpager.cli.console import say
from kvpager.config import DIGESTS, DTYPES, KERNELS, MODES, POLICIES, parse_size
from kvpager.errors import ConfigError

if TYPE_CHECKING:
    from kvpager.bench.workload import Workload
    from kvpager.models import LoadedModel

__all__ = [
    "add_load_options",
    "add_model_options",
    "add_pager_options",
    "add_sampling_options",
    "load_model",
    "number",
    "pager_options",
    "positive",
    "size",
    "whole",
    "workload",
]

MODEL_DTYPES = ("auto", "float32", "bfloat16")
DEFAULT_MODEL = "smollm2-135m"

_POOL_SHARE = re.compile(r"\d+(?:\.\d+)?\s*%")


def whole(low: int, high: int = 2**40) -> Callable[[str], int]:
    """An argparse type: a whole number in `low`..`high`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{value} is not in {low}..{high}")
        return value

    return parse


positive = whole(1)


def number(low: float, high: float) -> Callable[[str], float]:
    """An argparse type: a number in `low`..`high` (NaN is none)."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not in {low:g}..{high:g}")
        return value

    return parse


def size(text: str) -> str:
    """An argparse type: a size such as 64MiB; kept as text, since who reads it says it in messages."""
    try:
        parse_size(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("size: ")) from None
    return text


def pool(text: str) -> str:
    """An argparse type: frames, a size, or a share of the full KV in per cent."""
    if text.isdigit() and int(text) > 0:
        return text
    if _POOL_SHARE.fullmatch(text):
        if not 0 < float(text.rstrip("% ")) <= 100:
            raise argparse.ArgumentTypeError(f"{text!r} is not above 0% and at most 100%")
        return text
    try:
        return size(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is none of: frames (512), a size (64MiB), a share (25%)") from None


def budget(text: str) -> int | None:
    """An argparse type: tokens, or "none"."""
    return None if text.lower() == "none" else positive(text)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--model``, ``--dtype``, ``--weights`` and ``--threads``."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        metavar="NAME",
        help="a folder of Hugging Face files, a .gguf file, a Hugging Face id, or smollm2-135m (default: %(default)s)",
    )
    group.add_argument(
        "--dtype",
        choices=MODEL_DTYPES,
        default="auto",
        help="number format of weights and activations; auto is the model's own (default: %(default)s)",
    )
    group.add_argument(
        "--weights",
        choices=WEIGHTS,
        default="auto",
        help="who computes the linear layers: auto packs bfloat16 weights for the compiled kernels, int8 rounds them "
        "to 8 bits on the way, unpacked leaves it to PyTorch (default: auto)",
    )
    group.add_argument(
        "--threads",
        type=whole(1, 256),
        metavar="N",
        help="threads for the model and the kernels (default: physical cores)",
    )


def load_model(args: argparse.Namespace, *, identify: bool = False) -> LoadedModel:
    """The model that :func:`add_model_options` parsed; `identify` and what it raises as in `build.load_model`."""
    return build.load_model(
        args.model, dtype=args.dtype, weights=args.weights, threads=args.threads, identify=identify, progress=say
    )


def add_pager_options(parser: argparse.ArgumentParser, swap: str | None = None) -> None:
    """Add the options that :func:`pager_options` reads, ``--seed`` among them; `swap` is the default of ``--swap``."""
    group = parser.add_argument_group("paging")
    group.add_argument(
        "--memory", type=size, metavar="SIZE", help="bound on frames, digests and tables together, as in 64MiB"
    )
    group.add_argument(
        "--pool",
        type=pool,
        metavar="SIZE|FRAMES|SHARE",
        help="frames alone, for experts: a size (64MiB), a number of frames (512), or a share of the request's "
        "full KV (25%%) (default: the full KV, up to 256MiB)",
    )
    group.add_argument(
        "--budget",
        type=budget,
        metavar="TOKENS|none",
        help="past tokens that a KV head attends to; none means all, and then the text does not change (default: none)",
    )
    group.add_argument(
        "--mode", choices=MODES, default="recall", help="what happens to evicted pages (default: recall)"
    )
    group.add_argument(
        "--policy", choices=POLICIES, default="attention", help="which page leaves first (default: attention)"
    )
    group.add_argument("--digest", choices=DIGESTS, default="2bit", help="what selection reads (default: 2bit)")
    group.add_argument("--page-size", type=int, choices=(8, 16, 32), default=16, help="tokens a page (default: 16)")
    group.add_argument(
        "--tile", type=whole(1, 1024), default=64, metavar="N", help="queries that share a selection (default: 64)"
    )
    group.add_argument(
        "--swap",
        metavar="memory|PATH",
        default=swap,
        help=f"where evicted pages go (default: {swap or 'a file under the cache directory'})",
    )
    group.add_argument(
        "--swap-limit", type=size, default="64GiB", metavar="SIZE", help="the most that swap may hold (default: 64GiB)"
    )
    group.add_argument(
        "--kernel",
        choices=KERNELS,
        default="auto",
        help="who computes attention: native is compiled, reference is NumPy (default: auto, native where it is built)",
    )
    group.add_argument(
        "--kv-dtype",
        choices=("auto", *DTYPES),
        default="auto",
        help="number format of pages; int8 has scales a page and channel, or token (default: auto, as --dtype)",
    )
    group.add_argument(
        "--seed", type=whole(0, 2**63 - 1), default=0, metavar="N", help="of everything that is random (default: 0)"
    )


def pager_options(args: argparse.Namespace) -> PagerOptions:
    """What :func:`add_pager_options` parsed, for :mod:`kvpager.build`.

    Raises ConfigError for combinations that can't be: pool with memory, discard without a budget.
    """
    if args.pool is not None and args.memory is not None:
        raise ConfigError("memory: give either --memory or --pool, not both")
    if args.mode == "discard" and args.budget is None:
        raise ConfigError("budget: --mode discard needs --budget TOKENS")
    return PagerOptions(
        pool=args.pool,
        memory=args.memory,
        budget=args.budget,
        mode=args.mode,
        policy=args.policy,
        digest=args.digest,
        page_size=args.page_size,
        tile=args.tile,
        swap=args.swap,
        swap_limit=args.swap_limit,
        kernel=args.kernel,
        kv_dtype=None if args.kv_dtype == "auto" else args.kv_dtype,
        seed=args.seed,
    )


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that :func:`workload` reads, but for ``--seed``."""
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--num-prompts", type=whole(1, 10**6), default=16, metavar="N", help="requests (default: %(default)s)"
    )
    group.add_argument(
        "--request-rate",
        type=number(1e-6, 1e6),
        metavar="R",
        help="requests a second on average, at random times (default: all at once)",
    )
    group.add_argument(
        "--input-len", type=positive, default=512, metavar="N", help="tokens of a prompt (default: %(default)s)"
    )
    group.add_argument(
        "--output-len", type=positive, default=128, metavar="N", help="tokens to write at most (default: %(default)s)"
    )
    group.add_argument(
        "--mix",
        metavar="NAME=IN/OUT:SHARE[,...]",
        help="several kinds of requests, as in short=100/64:0.8,long=2000/128:0.2, in place of the two above",
    )
    group.add_argument(
        "--shared-prefix",
        type=whole(0),
        default=0,
        metavar="N",
        help="tokens that all prompts begin with, on top of their own (default: %(default)s)",
    )
    group.add_argument(
        "--prefix-groups",
        type=positive,
        default=1,
        metavar="N",
        help="prefixes among which the prompts are dealt (default: %(default)s)",
    )
    group.add_argument(
        "--ignore-eos",
        action="store_true",
        help="have all answers go on to their full length, past the model's end mark",
    )


def workload(args: argparse.Namespace) -> Workload:
    """What :func:`add_load_options` parsed; raises InputError for what can't be."""
    from kvpager.bench.workload import Kind, Workload, parse_mix

    return Workload(
        kinds=(Kind("all", args.input_len, args.output_len),) if args.mix is None else parse_mix(args.mix),
        requests=args.num_prompts,
        rate=args.request_rate,
        shared_prefix=args.shared_prefix,
        groups=args.prefix_groups,
        seed=args.seed,
    )


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add --temperature and --top-p."""
    parser.add_argument(
        "--temperature", type=number(0, 100), default=0.0, metavar="T", help="0 takes the likeliest token (default: 0)"
    )
    parser.add_argument(
        "--top-p",
        type=number(1e-6, 1),
        default=1.0,
        metavar="P",
        help="sample from the likeliest tokens that make up P (default: 1)",
    )
