"""What the connector costs a vLLM that finds nothing in the store: one engine, the connector on and off in turn.

    benchmarks/peers/setup.sh vllm
    python benchmarks/vllm_cost.py [--prompt-tokens 7000] [--tokens 64] [--repeats 5] [--json]

Each prompt is of random ids, so that none begins like another. Off means that the connector follows no request: it
looks for nothing and saves nothing (vllm_restart.py compares with a vLLM that has none). What is written is written
to its end before the next prompt comes. Told are medians, those of the ratios by pairs of neighbours; and how much of a
processor's time copying and writing took, which says what it costs on a machine that is too busy for the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ON, OFF = "on", "off"


class Engine:
    """vLLM in this process, scheduler and worker too, on a new store."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.engine = LLM(disable_log_stats=False, **settings).llm_engine
        self.books = self.engine.engine_core.engine_core.scheduler.connector._books
        self.transfers = get_kv_transfer_group()._transfers
        self.makers = self.books.makers
        self.copying_s = 0.0
        self._save = self.transfers.save
        self.transfers.save = self._timed_save

    def ask(self, prompt: list[int], tokens: int, kind: str) -> dict[str, float]:
        """Seconds to the first token and for each further one, and of copying and writing."""
        from vllm import SamplingParams

        self.books.makers = self.makers if kind == ON else ()
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        copied, written = self.copying_s, self._writing_s()
        began, first_s = time.perf_counter(), 0.0
        self.engine.add_request(f"{kind}-{began}", {"prompt_token_ids": prompt}, params)
        row = {}
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            if not first_s and outputs and outputs[0].outputs[0].token_ids:
                first_s = time.perf_counter() - began
                row = {"first_s": first_s, "copying_s": self.copying_s - copied}
                row["written_before_s"] = self._writing_s() - written
        row["token_s"] = (time.perf_counter() - began - first_s) / (tokens - 1)
        row["written_behind_s"] = self._writing_s() - written - row["written_before_s"]
        assert self.transfers._store.flush(60)
        row["written_s"] = self._writing_s() - written
        return row

    def _timed_save(self, plan: Any) -> None:
        began = time.perf_counter()
        self._save(plan)
        self.copying_s += time.perf_counter() - began

    def _writing_s(self) -> float:
        """The writing thread's time on a processor."""
        for thread in threading.enumerate():
            if thread.name == "kvpager-store-writer":
                return int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]) / 1e9
        return 0.0


def inside() -> None:
    """In vLLM's environment: read what is wanted, and print the rows."""
    wanted = json.loads(sys.stdin.readline())
    engine = Engine(wanted["settings"])
    engine.ask(ids(0, 300), 8, ON)
    engine.ask(ids(1, wanted["prompt_tokens"]), 8, ON)
    for number in range(wanted["repeats"]):
        for kind in (OFF, ON) if number % 2 else (ON, OFF):
            prompt = ids(2 + 2 * number + (kind == ON), wanted["prompt_tokens"])
            row = engine.ask(prompt, wanted["tokens"], kind)
            print(json.dumps({"kind": kind, **row}), flush=True)
    os._exit(0)  # nothing of it is needed any more


def ids(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(100, 40000), k=count)


def measure(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Rows, one a prompt."""
    sys.path.append(str(Path(__file__).parent / "peers"))
    from run import PEERS, environment, folder_of
    from vllm_restart import transfer

    settings = {"model": folder_of("vllm", args.model), "dtype": "bfloat16", "max_model_len": 8192}
    settings |= {"max_num_batched_tokens": 2048, "kv_transfer_config": transfer(folder / "kv" / "store.db")}
    wanted = {"settings": settings, "prompt_tokens": args.prompt_tokens, "tokens": args.tokens, "repeats": args.repeats}
    env = {**environment("vllm", args.threads), "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    command = [str(PEERS / "vllm" / "bin" / "python"), __file__, "--inside"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(wanted) + "\n")
        process.stdin.flush()
        rows = []
        for line in process.stdout:
            if line.startswith('{"kind"'):
                print(line, end="", file=sys.stderr, flush=True)
                rows.append(json.loads(line))
    if len(rows) < 2 * args.repeats:
        raise SystemExit(f"vLLM ended with {process.returncode} after {len(rows)} prompts")
    return rows


def figures(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Medians."""
    on, off = ([row for row in rows if row["kind"] == kind] for kind in (ON, OFF))
    found = {f"on_{name}": statistics.median(row[name] for row in on) for name in on[0] if name != "kind"}
    for name in ("first_s", "token_s"):
        found[f"off_{name}"] = statistics.median(row[name] for row in off)
        found[f"{name}_overhead"] = statistics.median(a[name] / b[name] - 1 for a, b in zip(on, off, strict=True))
    return found


def told(found: dict[str, float]) -> str:
    """The figures as a table."""
    ms = {name: f"{1000 * value:.1f} ms" for name, value in found.items()}
    rows = [
        ("first token, off and on", f"{ms['off_first_s']}, {ms['on_first_s']} ({found['first_s_overhead']:+.1%})"),
        ("a token behind, off and on", f"{ms['off_token_s']}, {ms['on_token_s']} ({found['token_s_overhead']:+.1%})"),
        ("before the first token: copying, writing", f"{ms['on_copying_s']}, {ms['on_written_before_s']}"),
        ("writing while the answer is computed", ms["on_written_behind_s"]),
        ("writing in all", ms["on_written_s"]),
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompt-tokens", type=int, default=7000)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", help="where the store is made (default: the system's for temporary files)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        inside()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        rows = measure(args, Path(name))
    print(json.dumps({"figures": figures(rows), "rows": rows}, indent=1) if args.json else told(figures(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
