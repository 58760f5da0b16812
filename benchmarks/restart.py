"""How long the first token of a prompt takes that was seen before a restart.

    python benchmarks/restart.py [--prompt-tokens 7000] [--budgets none,1024] [--repeats 3] [--cold-disk] [--json]
    python benchmarks/restart.py --model path/to/model -- --kv-dtype int8 --store-sync full
    python benchmarks/restart.py --redis redis://127.0.0.1:6379 --prompt-tokens 1500 --budgets none

A repeat is: `kvpager serve --store` on a new file; a short other request, so that threads and weights are there; the
prompt (cold); the prompt again; SIGTERM; the same server again on the same file; the short request; the prompt once
more (restart). Told are medians over the repeats of the time to the first token, with the least and the most; whether
the first token is that of the cold run; and whether all tokens, with the bits of their log-probabilities, are those of
the run before the restart (the cold run computes the prompt's end in a larger chunk, which rounds otherwise in
bfloat16). What follows `--` goes to `kvpager serve`.

With --redis the first server is one node and the second one another: they share that Redis (all is published, and each
repeat has a prefix of its own) and no file.

The stored file is usually in the system's page cache after a restart of the process; with --cold-disk the system is
asked to forget it before the second start, as after a restart of the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from kvpager.evaluation.text import bundled_text

STOP_S = 60.0
CHARACTERS = 8  # of the bundled text, more than a token of it has on average
HEADINGS = (
    "budget",
    "cold, s",
    "again, s",
    "after a restart, s",
    "of cold",
    "first token same",
    "all same",
    "ready, s",
    "ready again, s",
    "stop, s",
    "store, MiB",
)


@dataclass(frozen=True)
class First:
    """What came of one request: seconds to its first token, and its tokens with their log-probabilities."""

    seconds: float
    tokens: list[tuple[str, float]]
    cached: int


@contextmanager
def served(args: argparse.Namespace, budget: str, folder: Path) -> Iterator[tuple[httpx.Client, dict[str, float]]]:
    """A client of a server on the store in `folder`; its times fill as they are known: "ready", "stop" (seconds)."""
    code = "import sys; from kvpager.cli.main import main; sys.exit(main())"
    options = ["serve", args.model, "--port", "0", "--budget", budget, "--store"]
    options += [str(folder / "store.db")] if args.redis is None else [f"{args.redis}?prefix={folder.name}"]
    options += [] if args.redis is None else ["--store-publish", "all"]
    log, times, began = (folder / "log").open("ab"), {}, time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", code, *options, *args.more], stdout=log, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        url, last = "", ""
        for line in process.stderr:
            last = line
            url = next((word for word in line.split() if word.startswith("http://")), url)
            if line.startswith("serving "):
                break
        else:
            raise SystemExit(f"the server did not start: {last}")
        times["ready"] = time.perf_counter() - began
        with httpx.Client(base_url=url.removesuffix("/v1"), timeout=600) as client:
            yield client, times
    finally:
        began = time.perf_counter()
        process.terminate()
        process.communicate(timeout=STOP_S)
        times["stop"] = time.perf_counter() - began
        log.close()


def ask(client: httpx.Client, prompt: list[int], tokens: int) -> First:
    """Ask for `tokens` tokens, greedily, and take the time until the first one is there."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    found: list[tuple[str, float]] = []
    first, cached, began = None, 0, time.perf_counter()
    with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise SystemExit(f"the server answered {answer.status_code}: {answer.read().decode()[:300]}")
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            piece = json.loads(line.removeprefix("data: "))
            if "error" in piece:
                raise SystemExit(f"the server failed: {piece['error']['message']}")
            for choice in piece["choices"]:
                told = choice["logprobs"] or {"tokens": [], "token_logprobs": []}
                if told["tokens"] and first is None:
                    first = time.perf_counter() - began
                found += zip(told["tokens"], told["token_logprobs"], strict=True)
            if piece.get("usage"):
                cached = piece["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert first is not None, "an answer has a first token"
    return First(first, found, cached)


def forget(path: Path) -> None:
    """Have the system drop a file from its page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def repeat(args: argparse.Namespace, budget: str, number: int) -> dict[str, Any]:
    """One start, stop and start."""
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        with served(args, budget, folder) as (client, before):
            text = bundled_text()[number * 1000 :][: CHARACTERS * args.prompt_tokens]
            prompt = client.post("/tokenize", json={"prompt": text}).raise_for_status().json()["tokens"]
            if len(prompt) < args.prompt_tokens:
                raise SystemExit(f"the bundled text has only {len(prompt)} tokens here")
            prompt, other = prompt[: args.prompt_tokens], prompt[-64:]
            ask(client, other, 8)
            cold, again = ask(client, prompt, args.tokens), ask(client, prompt, args.tokens)
        size = sum(file.stat().st_size for file in folder.glob("store.db*"))
        if args.cold_disk:
            forget(folder / "store.db")
        with served(args, budget, folder) as (client, after):
            ask(client, other, 8)
            restarted = ask(client, prompt, args.tokens)
            stats = client.get("/stats").json()
        return {
            "cold_s": cold.seconds,
            "again_s": again.seconds,
            "restart_s": restarted.seconds,
            "cached_again": again.cached,
            "cached_restart": restarted.cached,
            "first_token_same": restarted.tokens[0][0] == cold.tokens[0][0],
            "all_same": restarted.tokens == again.tokens,
            "ready_s": before["ready"],
            "ready_again_s": after["ready"],
            "stop_s": before["stop"],
            "store_bytes": size,
            "stats": stats,
        }


def median(runs: list[dict[str, Any]], name: str) -> float:
    return float(statistics.median(run[name] for run in runs))


def line(budget: str, runs: list[dict[str, Any]]) -> str:
    """A row of the table."""
    cells = [budget]
    for name in ("cold_s", "again_s", "restart_s"):
        values = [run[name] for run in runs]
        cells.append(f"{median(runs, name):.3f} ({min(values):.3f}-{max(values):.3f})")
    cells.append(f"{median(runs, 'restart_s') / median(runs, 'cold_s'):.1%}")
    cells += [f"{sum(run[name] for run in runs)} of {len(runs)}" for name in ("first_token_same", "all_same")]
    cells += [f"{median(runs, name):.2f}" for name in ("ready_s", "ready_again_s", "stop_s")]
    cells.append(f"{median(runs, 'store_bytes') / 2**20:.0f}")
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompt-tokens", type=int, default=7000)
    parser.add_argument("--tokens", type=int, default=16, help="of each answer")
    parser.add_argument("--budgets", default="none,1024", help="names or numbers, separated by commas")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", help="where the stores are made (default: the system's for temporary files)")
    parser.add_argument("--redis", metavar="URL", help="two nodes that share this Redis, in place of a restart")
    parser.add_argument("--cold-disk", action="store_true", help="drop the stored file from the page cache")
    parser.add_argument("--json", action="store_true", help="print one JSON object with every repeat")
    parser.add_argument("more", nargs="*", metavar="-- OPTION", help="options for kvpager serve")
    args = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {}
    for budget in args.budgets.split(","):
        found[budget] = []
        for number in range(args.repeats):
            found[budget].append(repeat(args, budget, number))
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        print(f"| {' | '.join(HEADINGS)} |\n{'|---' * len(HEADINGS)}|")
        for budget, runs in found.items():
            print(line(budget, runs))
    return 0 if all(run["first_token_same"] for runs in found.values() for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
