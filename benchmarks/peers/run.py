"""Measure a peer, or kvpager itself, on workloads that kvpager is compared by; prints one JSON object.

The peer runs in the environment that setup.sh made. Its engine is driven in its own process, without HTTP.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from workloads import WORKLOADS, plan_round, warm_up

from kvpager.bench.machine import describe
from kvpager.config import parse_size
from kvpager.evaluation.text import bundled_ids
from kvpager.models.find import find

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
PEERS = Path(os.environ.get("KVPAGER_PEERS") or CACHE / "kvpager" / "peers")
LIBRARIES = "/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4"
EPILOG = """\
examples:
  python benchmarks/peers/run.py vllm batch8 --repeats 3
  python benchmarks/peers/run.py vllm pressure --kv-memory 24MiB --set block_size=32 --set kv_cache_dtype=fp8
  python benchmarks/peers/run.py openvino single
"""


def environment(peer: str, threads: int) -> dict[str, str]:
    """What the peer's makers advise: threads on cores of their own, and the faster allocator where it is there."""
    found = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    found.pop("PYTHONPATH", None)
    if peer == "vllm":
        openmp = PEERS / "vllm" / "lib" / "libiomp5.so"
        preloaded = [str(path) for path in (Path(LIBRARIES), openmp) if path.exists()]
        found.update(LD_PRELOAD=":".join(preloaded), VLLM_CPU_OMP_THREADS_BIND=f"0-{threads - 1}")
    return found


def folder_of(peer: str, model: str) -> str:
    """The model as the peer reads it."""
    if peer == "openvino":
        return str(PEERS / "openvino-models" / model)
    return str(find(model, lambda line: print(line, file=sys.stderr)).path)


def tokenised(model: str) -> tuple[list[int], int]:
    """Ids of the bundled book, and the bytes of a token's keys and values in 16 bits."""
    from transformers import AutoConfig, AutoTokenizer

    folder = find(model, lambda line: print(line, file=sys.stderr)).path
    config = AutoConfig.from_pretrained(folder)
    token_bytes = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return bundled_ids(tokenizer), token_bytes


def settings_of(options: argparse.Namespace, token_bytes: int) -> dict[str, Any]:
    """What the driver gets: --set's values, read as JSON where they are, and the memory."""
    found: dict[str, Any] = {"token_bytes": token_bytes, "kv_bytes": options.kv_memory}
    for one in options.set:
        name, _, value = one.partition("=")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found


def figures(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the repetitions of each round."""
    found = {}
    for name in dict.fromkeys(one["name"] for one in rounds):
        rows = [row(one) for one in rounds if one["name"] == name]
        found[name] = {key: _median([each[key] for each in rows]) for key in rows[0]}
    return found


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def row(one: dict[str, Any]) -> dict[str, float | None]:
    """The figures of one round; the first request's time to the first token apart from that of the others."""
    requests = one["requests"]
    first, later = requests[0], requests[1:]
    made = sum(request["tokens"] for request in requests)
    found = {
        "output_tokens_per_s": made / one["seconds"],
        "seconds": one["seconds"],
        "ttft_first_s": first["first_s"],
        "preemptions": one["preemptions"],
    }
    if later:
        found["ttft_later_median_s"] = statistics.median(request["first_s"] for request in later)
        found["ttft_later_max_s"] = max(request["first_s"] for request in later)
    else:
        found["prefill_tokens_per_s"] = one["prompt_tokens"] / first["first_s"]
        found["decode_tokens_per_s"] = (made - 1) / (first["end_s"] - first["first_s"])
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the peer and put what it answers together."""
    ids, token_bytes = tokenised(options.model)
    named = [one for name in options.workloads for one in WORKLOADS[name]]
    chosen = [one for one in named if not options.only or one[0] in options.only]
    plan = {
        "model": folder_of(options.peer, options.model),
        "settings": settings_of(options, token_bytes),
        "lock": options.lock,
        "warm_up": warm_up(ids),
        "rounds": [plan_round(*one, ids, again) for again in range(options.repeats) for one in chosen],
    }
    python = sys.executable if options.peer == "kvpager" else str(PEERS / options.peer / "bin" / "python")
    answer = subprocess.run(
        [python, str(HERE / f"drive_{options.peer}.py")],
        input=json.dumps(plan),
        stdout=subprocess.PIPE,
        text=True,
        env=environment(options.peer, options.threads),
    )
    if answer.returncode:
        raise SystemExit(f"{options.peer} ended with {answer.returncode}")
    result = json.loads(answer.stdout)
    for one, planned in zip(result["rounds"], plan["rounds"], strict=True):
        one["prompt_tokens"] = sum(len(request["prompt"]) for request in planned["requests"])
    return {
        "peer": options.peer,
        "machine": describe(),
        "threads": options.threads,
        "workload": {
            "rounds": [{"name": name, "in_turn": in_turn, **load.figures()} for name, load, in_turn in chosen],
            "repeats": options.repeats,
        },
        "figures": figures(result["rounds"]),
        **result,
    }


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peer", choices=("vllm", "openvino", "kvpager"))
    parser.add_argument("workloads", nargs="+", choices=tuple(WORKLOADS), metavar="WORKLOAD", help=", ".join(WORKLOADS))
    parser.add_argument("--model", default="smollm2-135m", help="as kvpager knows it (default: %(default)s)")
    parser.add_argument("--kv-memory", type=parse_size, metavar="SIZE", help="the most that keys and values may take")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the peer's own")
    parser.add_argument(
        "--only", action="append", default=[], metavar="ROUND", help="among the workloads' (default: all)"
    )
    parser.add_argument("--repeats", type=int, default=3, help="rounds, each with other prompts (default: 3)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads (default: all cores)")
    parser.add_argument("--lock", metavar="FILE", help="hold the lock on FILE while measuring, not while loading")
    print(json.dumps(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
