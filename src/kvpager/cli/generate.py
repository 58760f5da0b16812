"""``kvpager generate``: one prompt in, text out, with the memory that it took."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpager.cli.console import emit, emit_json, progress, say
from kvpager.cli.options import (
    add_model_options,
    add_pager_options,
    add_sampling_options,
    load_model,
    pager_options,
    positive,
)
from kvpager.errors import InputError
from kvpager.models.chat import chat_ids

if TYPE_CHECKING:
    from kvpager.build import PagerOptions
    from kvpager.cli.decoding import Generation
    from kvpager.models import LoadedModel
    from kvpager.stats import PagerStats

__all__ = ["add_parser", "run"]

EPILOG = """\
examples:
  kvpager generate "Explain virtual memory to a child."
  kvpager generate --prompt-file report.txt --budget 1024 --memory 64MiB --max-tokens 200
  echo "The capital of France is" | kvpager generate --raw --json

The chat template's own marks (such as <|im_end|>) are read as marks in the prompt too.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``generate`` and its options."""
    parser = subparsers.add_parser(
        "generate",
        help="write text from a prompt",
        description="Write text from a prompt: the text on standard output as it comes, all else on standard error.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prompt", nargs="?", help="the prompt (default: read from --prompt-file or standard input)")
    parser.add_argument(
        "--prompt-file",
        metavar="FILE",
        help="read the prompt from a UTF-8 file, less its last newline; - is standard input",
    )
    parser.add_argument(
        "--raw", action="store_true", help="give the prompt to the model as it is, without its chat template"
    )
    parser.add_argument(
        "--max-tokens", type=positive, default=256, metavar="N", help="tokens to write at most (default: 256)"
    )
    add_sampling_options(parser)
    parser.add_argument(
        "--ignore-eos", action="store_true", help="write on past the model's end mark (for measuring speed)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object with the text and all figures")
    add_model_options(parser)
    add_pager_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Generate; returns 0. Raises InputError for a prompt that can't be used, and what loading and paging raise."""
    from kvpager import build
    from kvpager.cli.decoding import Sampler, generate

    options = pager_options(args)
    options.settings()  # refused before a model is loaded
    prompt = read_prompt(args.prompt, args.prompt_file)
    started = time.perf_counter()
    loaded = load_model(args)
    load_seconds = time.perf_counter() - started
    token_ids = encode(loaded, prompt, raw=args.raw)
    max_tokens = fit(loaded, len(token_ids), args.max_tokens)
    cache = build.make_cache(loaded, options, tokens=len(token_ids) + max_tokens)
    try:
        with progress("Reading the prompt", len(token_ids)) as advance:
            result = generate(
                loaded,
                cache,
                token_ids,
                max_tokens=max_tokens,
                sampler=Sampler(args.temperature, args.top_p, args.seed),
                ignore_eos=args.ignore_eos,
                on_prefill=advance,
                on_text=None if args.json else lambda text: emit(text, end=""),
            )
        stats = cache.stats()
    except KeyboardInterrupt:
        if sys.stdout.isatty():
            emit("")  # the shell's prompt begins a line of its own
        raise
    finally:
        cache.close()
    if args.json:
        emit_json({**figures(args, loaded, options, result, stats), "load_seconds": round(load_seconds, 3)})
    else:
        emit("")
        say(summary(result, stats))
    return 0


def read_prompt(prompt: str | None, prompt_file: str | None) -> str:
    """The prompt from the argument, a file, or standard input; raises InputError when there is none, or two."""
    if prompt is not None and prompt_file is not None:
        raise InputError("prompt: give either a prompt or --prompt-file, not both")
    if prompt is None and prompt_file in (None, "-"):
        if sys.stdin.isatty():
            say("Type the prompt, then press Ctrl-D (on Windows Ctrl-Z and Enter).")
        data, source = sys.stdin.buffer.read(), "standard input"
    elif prompt is None:
        data, source = _read_file(Path(str(prompt_file))), str(prompt_file)
    else:
        data, source = prompt.encode("utf-8", "surrogateescape"), "prompt"
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"prompt: {source} is not UTF-8 text (byte {error.start})") from None
    if not text.strip():
        raise InputError(f"prompt: {source} is empty; give at least one word")
    # a shell's echo and an editor's last line end in a newline that nobody meant to be part of the prompt
    return text if prompt is not None else text.removesuffix("\n").removesuffix("\r")


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"prompt: {path} can't be read: {error.strerror}") from None


def encode(loaded: LoadedModel, prompt: str, *, raw: bool) -> list[int]:
    """Token ids of the prompt, inside the model's chat template unless `raw`.

    Raises InputError when the model has no chat template, or when no token comes out.
    """
    tokenizer: Any = loaded.tokenizer
    if raw:
        ids = tokenizer(prompt)["input_ids"]
    else:
        if not tokenizer.chat_template:
            raise InputError(f"prompt: {loaded.name} has no chat template; use --raw")
        ids = chat_ids(loaded, [{"role": "user", "content": prompt}])
    if not ids:
        raise InputError("prompt: it has no tokens")
    return list(ids)


def fit(loaded: LoadedModel, prompt_tokens: int, max_tokens: int) -> int:
    """The tokens that may be written: `max_tokens`, or less where the model's context ends.

    Raises InputError when the prompt leaves no room for one token.
    """
    context = loaded.context_length
    if context is None:
        return max_tokens
    limit = f"the context of {loaded.name} is {context} tokens"
    if prompt_tokens >= context:
        raise InputError(f"prompt: its {prompt_tokens} tokens leave no room for an answer; {limit}")
    if prompt_tokens + max_tokens > context:
        say(f"note: writing at most {context - prompt_tokens} tokens; {limit}, and the prompt takes {prompt_tokens}")
    return min(max_tokens, context - prompt_tokens)


def figures(
    args: argparse.Namespace, loaded: LoadedModel, options: PagerOptions, result: Generation, stats: PagerStats
) -> dict[str, Any]:
    """All that ``--json`` prints: the text, speeds, every figure of PagerStats, and the settings."""
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": len(result.token_ids),
        "prefill_seconds": round(result.prefill_seconds, 4),
        "decode_seconds": round(result.decode_seconds, 4),
        "prefill_tokens_per_s": round(result.prefill_tokens_per_s, 2),
        "decode_tokens_per_s": None if result.decode_tokens_per_s is None else round(result.decode_tokens_per_s, 2),
        **stats.as_dict(),
        "model": loaded.name,
        "dtype": loaded.dtype,
        "weight_bytes": loaded.weight_bytes,
        "context_length": loaded.context_length,
        "settings": {
            **asdict(options),
            "max_tokens": args.max_tokens,
            "temperature": args.temperature,
            "top_p": args.top_p,
            "raw": args.raw,
            "weights": args.weights,
            "threads": args.threads,
        },
    }


def summary(result: Generation, stats: PagerStats) -> str:
    """One line for people: speeds, and memory told whole."""
    mib = 2**20
    decode = result.decode_tokens_per_s
    lost = f", {stats.discards} dropped for good" if stats.discards else ""
    written = f"wrote {len(result.token_ids)}" + (f" ({decode:.1f} tokens/s)" if decode is not None else "")
    return (
        f"read {result.prompt_tokens} tokens ({result.prefill_tokens_per_s:.0f} tokens/s), {written}; "
        f"KV in memory {stats.resident_bytes / mib:.1f} MiB (frames {stats.pool_bytes / mib:.1f}, "
        f"digests {stats.digest_bytes / mib:.1f}, tables {stats.table_bytes / mib:.1f}) "
        f"where a full cache of {stats.tokens} tokens takes {stats.full_kv_bytes / mib:.1f} MiB; "
        f"swap {stats.swap_bytes / mib:.1f} MiB; "
        f"{stats.evictions} pages evicted, {stats.recalls} recalled{lost}; "
        f"peak of the process {stats.peak_rss_bytes / mib:.0f} MiB"
    )
