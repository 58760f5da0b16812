"""``kvpager bench serve``: many requests against any OpenAI-compatible server, and how long they took."""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from typing import TYPE_CHECKING, Any

from kvpager.cli.console import aligned, emit, emit_json, progress, say
from kvpager.cli.options import add_load_options, number, positive, whole, workload
from kvpager.errors import InputError

if TYPE_CHECKING:
    from kvpager.bench.load import Load
    from kvpager.bench.load_prompts import Requests
    from kvpager.bench.workload import Item, Workload
    from kvpager.remote import Remote

__all__ = ["add_parser", "run"]

FAILED, INTERRUPTED = 1, 130
API_KEY = "OPENAI_API_KEY"
LATE_MS = 50.0  # after the time said, above which the load is not what was asked for
EPILOG = """\
examples:
  kvpager bench serve --num-prompts 8 --input-len 2000 --output-len 128 --ignore-eos
  kvpager bench serve --base-url http://127.0.0.1:8080 --request-rate 2 --mix short=100/64:0.8,long=2000/128:0.2
  kvpager bench serve --shared-prefix 1500 --input-len 32 --num-prompts 32 --concurrency 4 --plot load.png --json

Works with kvpager's server, vLLM's, llama.cpp's and others. The API key is read from the environment, see
--api-key-env. Percentiles are values that were measured, and are left out where fewer than 10 (p90) or 100 (p99) were.
"""


def add_parser(tasks: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``serve`` to the tasks of ``bench``."""
    serve = tasks.add_parser(
        "serve",
        help="requests against an OpenAI-compatible server",
        description="Make requests against an OpenAI-compatible server: latencies, tokens a second, errors.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    serve.add_argument(
        "--base-url", default="http://127.0.0.1:8000", metavar="URL", help="the server (default: %(default)s)"
    )
    serve.add_argument("--model", metavar="NAME", help="the model to ask for (default: the first that is listed)")
    serve.add_argument(
        "--api-key-env",
        default=API_KEY,
        metavar="NAME",
        help="the environment variable that holds the API key (default: %(default)s)",
    )
    serve.add_argument(
        "--endpoint",
        choices=("completions", "chat"),
        default="completions",
        help="completions gets token ids; chat gets texts, measured by the server's /tokenize (default: %(default)s)",
    )
    serve.add_argument(
        "--token-ids",
        default="1000-20000",
        metavar="LOW-HIGH",
        help="for completions of a server without /tokenize: draw ids from this range (default: %(default)s)",
    )
    add_load_options(serve)
    _add_conditions(serve)
    serve.add_argument("--plot", metavar="FILE.png", help="draw latencies and a timeline")
    serve.add_argument("--json", action="store_true", help="print one JSON object with all figures and requests")
    serve.set_defaults(run=run)


def _add_conditions(serve: argparse.ArgumentParser) -> None:
    """How the requests are made, and when it is enough."""
    group = serve.add_argument_group("conditions")
    group.add_argument("--concurrency", type=positive, metavar="N", help="requests at once at most (default: no limit)")
    group.add_argument(
        "--timeout", type=number(0.001, 1e6), default=600.0, metavar="S", help="seconds a request (default: 600)"
    )
    group.add_argument(
        "--max-seconds",
        type=number(0.001, 1e6),
        default=3600.0,
        metavar="S",
        help="seconds for all; what is under way then counts as unfinished (default: 3600)",
    )
    group.add_argument(
        "--warmup",
        type=whole(0, 1000),
        default=1,
        metavar="N",
        help="requests before the others, with prompts of their own, that don't count (default: %(default)s)",
    )
    group.add_argument(
        "--temperature", type=number(0, 100), default=0.0, metavar="T", help="0 takes the likeliest (default: 0)"
    )
    group.add_argument("--seed", type=whole(0, 2**31), default=0, metavar="N", help="of prompts and times (default: 0)")


def run(args: argparse.Namespace) -> int:
    """Measure a server; returns 0, 1 when no request went well, 130 when interrupted.

    Raises InputError for what can't be and RemoteError when the server does not answer at all.
    """
    from kvpager.bench import load_figures, load_plots, machine
    from kvpager.bench.load import Load
    from kvpager.pictures import check_target

    target = None if args.plot is None else check_target(args.plot)
    work, ids, others = workload(args), _range(args.token_ids), machine.Others()
    load = Load()
    about = asyncio.run(_measure(args, work, ids, load))
    if target is not None and load.records:
        result = load_figures.figures(load)
        load_plots.draw_load(load, result["requests"], f"{about['model']} at {about['base_url']}", target)
        say(f"drawn: {target}")
    result = {**about, **load_figures.figures(load), "others_share": others.share, "versions": machine.versions()}
    if args.json:
        emit_json(result)
    else:
        emit(table(result))
    if load.interrupted:
        return INTERRUPTED
    return 0 if result["completed"] else FAILED


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    if not low.isdigit() or not high.isdigit() or int(low) >= int(high):
        raise InputError(f"token-ids: {text!r} is not like 1000-20000")
    return int(low), int(high)


async def _measure(args: argparse.Namespace, work: Workload, ids: tuple[int, int], load: Load) -> dict[str, Any]:
    """Fill `load`; returns what was measured, for ``--json``."""
    from kvpager.bench.load import Limits, drive
    from kvpager.remote import Remote

    async with Remote(args.base_url, os.environ.get(args.api_key_env) or None, timeout=args.timeout) as remote:
        model = args.model or await _first_model(remote)
        requests, source = await _requests(args, work, remote, model, ids)
        items = work.items()
        await requests.warm_up(_spare(items, args.warmup))
        limits = Limits(args.concurrency, args.timeout, args.max_seconds)
        with progress("Requests", len(items)) as advance:
            await drive(requests, items, limits, load, clock=time.perf_counter, progress=advance)
    return {
        "base_url": remote.url,
        "model": model,
        "endpoint": args.endpoint,
        "prompts_from": source,
        "workload": {**work.figures(), "concurrency": args.concurrency, "ignore_eos": args.ignore_eos},
    }


def _spare(items: list[Item], count: int) -> list[Item]:
    """Items for requests that don't count, whose prompts no other request has."""
    from dataclasses import replace

    return [replace(items[index % len(items)], index=len(items) + index, at=0.0) for index in range(count)]


async def _first_model(remote: Remote) -> str:
    models = await remote.models()
    if not models:
        raise InputError(f"model: {remote.url} lists none; use --model NAME")
    return models[0]


async def _requests(
    args: argparse.Namespace, work: Workload, remote: Remote, model: str, ids: tuple[int, int]
) -> tuple[Requests, str]:
    """What makes the requests, and where its prompts come from: "tokenize", or "random ids"."""
    from kvpager.bench import load_prompts
    from kvpager.bench.workload import Prompts
    from kvpager.evaluation.text import bundled_text

    text, items = bundled_text(), work.items()
    prompts: Any
    source = "tokenize"
    if args.endpoint == "chat":
        every = [*items, *_spare(items, args.warmup)]
        with progress("Measuring prompts", len(every)) as advance:
            texts = await load_prompts.chat_texts(remote, model, text.split(), work, every, advance)

        def prompts(item: Item) -> Any:
            return texts[item.index]
    else:
        with progress("Reading the text", len(text)) as advance:
            known = await load_prompts.text_ids(remote, model, text, advance)
        if known is None:
            source = "random ids"
            say(f"note: {remote.url} has no /tokenize; prompts are random token ids of {args.token_ids}")
            known = load_prompts.unknown_ids(work, *ids)
        prompts = Prompts(known, work, spare=args.warmup)
    requests = load_prompts.Requests(
        remote, model, args.endpoint, prompts, ignore_eos=args.ignore_eos, temperature=args.temperature
    )
    return requests, source


def table(result: dict[str, Any]) -> str:
    """All figures for people."""
    from kvpager.bench.load_figures import LATENCIES

    rows: list[tuple[str, ...]] = [("", "n", "mean", "p50", "p90", "p99", "most")]
    groups = {"": result} | (result["kinds"] if len(result["kinds"]) > 1 else {})
    for kind, figures in groups.items():
        for name, meaning in LATENCIES.items():
            rows.append(_row(f"{kind}: {meaning}" if kind else f"ms {meaning}", figures[name]))
    ended = " (interrupted)" if result["interrupted"] else " (time was over)" if result["out_of_time"] else ""
    parts = [
        f"{result['model']} at {result['base_url']} ({result['endpoint']}): {result['completed']} of {result['sent']} "
        f"requests went well in {result['duration_s']:.2f} s{ended}, {result['most_at_once']} at once at most",
        "",
        aligned(rows),
        "",
        _speeds(result),
    ]
    for kind, error in result["errors"].items():
        wait = f", asked to wait {error['retry_after_s']:g} s" if error["retry_after_s"] else ""
        parts.append(f"failed, {kind}: {error['count']}{wait} ({'; '.join(error['messages'])})")
    parts += [f"note: {line}" for line in _doubts(result)]
    return "\n".join(parts)


def _row(name: str, spread: dict[str, Any]) -> tuple[str, ...]:
    values = (spread[key] for key in ("mean", "p50", "p90", "p99", "max"))
    return (name, str(spread["n"]), *("-" if value is None else f"{value:.1f}" for value in values))


def _speeds(result: dict[str, Any]) -> str:
    if not result["completed"]:
        return "no request went well: no speeds"
    cached = "" if result["cached_tokens"] is None else f", {result['cached_tokens']} of them cached"
    return (
        f"{result['output_tokens_per_s']:.1f} output tokens/s, {result['total_tokens_per_s']:.1f} tokens/s in all, "
        f"{result['requests_per_s']:.2f} requests/s; {result['prompt_tokens']} tokens read{cached}, "
        f"{result['output_tokens']} written"
    )


def _doubts(result: dict[str, Any]) -> list[str]:
    """What makes the figures less than they seem."""
    counts, found = result["counts"], []
    if counts["from_pieces"]:
        found.append(f"{counts['from_pieces']} answers came without usage: their tokens are counted by pieces")
    if counts["fewer_tokens_than_pieces"]:
        found.append(f"{counts['fewer_tokens_than_pieces']} answers have more pieces than tokens in their usage")
    if counts["other_prompt_lengths"]:
        found.append(f"{counts['other_prompt_lengths']} prompts have another length by the server's count")
    if counts["short_answers"]:
        found.append(f"{counts['short_answers']} answers ended before their full length")
    if counts["long_answers"]:
        found.append(f"{counts['long_answers']} answers are longer than was asked for")
    late = result["late_ms"]["max"]
    if late is not None and result["workload"]["request_rate"] is not None and late > LATE_MS:
        found.append(f"requests were sent up to {late:.0f} ms after their time")
    return found
