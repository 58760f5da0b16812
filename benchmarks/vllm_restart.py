"""What kvpager's store does for vLLM, and what it costs: a long prompt before and after a restart, beside vLLM alone.

    benchmarks/peers/setup.sh vllm
    python benchmarks/vllm_restart.py [--prompt-tokens 7000] [--repeats 3] [--cold-disk] [--json]

Two servers run: vLLM alone, and vLLM with the connector on a new store. They are asked in turn, so that what else the
machine does hits both alike. A repeat is, for each: a short prompt with a long answer, a long prompt that none has seen
(cold), and the same again. Then the server with the connector is stopped, another one is started on its store, and is
asked for the prompts of all repeats (restart). Told are medians; whether the answers after the restart are those that
vLLM alone gives when it has the prompt in its own cache (which computes what a cold prompt does in other pieces, and
rounds otherwise in bfloat16); and what the store takes on disk.

With --lock FILE the machine is held by this file, for one start or one repeat at a time.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

sys.path.append(str(Path(__file__).parent / "peers"))

from restart import First, ask, forget
from run import PEERS, environment, folder_of, tokenised

STOP_S, READY_S = 60.0, 400.0
SHORT, LONG = 256, 128  # tokens of a prompt, and of its answer, by which decoding is measured


@contextmanager
def held(path: str | None) -> Iterator[None]:
    """Hold a lock's file, if one is named."""
    if path is None:
        yield
        return
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Server:
    """vLLM's OpenAI server, on a store or alone."""

    def __init__(self, args: argparse.Namespace, folder: Path, store: Path | None) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        options = ["--model", folder_of("vllm", args.model), "--port", str(port), "--host", "127.0.0.1"]
        options += ["--max-model-len", "8192", "--dtype", "bfloat16", "--enable-prompt-tokens-details", *args.more]
        if store is not None:
            options += ["--kv-transfer-config", json.dumps(transfer(store))]
        self._log = (Path(args.logs or folder) / f"vllm-{port}.log").open("wb")
        settings = {**environment("vllm", args.threads), "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
        settings.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        began = time.perf_counter()
        self._process = subprocess.Popen(
            [str(PEERS / "vllm" / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server", *options],
            stdout=self._log,
            stderr=self._log,
            env=settings,
        )
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600)
        while not self._is_ready():
            if self._process.poll() is not None or time.perf_counter() - began > READY_S:
                raise SystemExit(f"vLLM did not start; see {self._log.name}")
            time.sleep(0.2)
        self.ready_s = time.perf_counter() - began

    def close(self) -> float:
        """Stop it; seconds that it took."""
        began = time.perf_counter()
        self.client.close()
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait(STOP_S)
        self._log.close()
        return time.perf_counter() - began

    def metrics(self) -> dict[str, float]:
        """The connector's figures at /metrics."""
        found = {}
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith("vllm:kvpager_") and "_created" not in line:
                name, value = line.rsplit(" ", 1)
                found[name.partition("{")[0].removeprefix("vllm:kvpager_").removesuffix("_total")] = float(value)
        return found

    def _is_ready(self) -> bool:
        try:
            return self.client.get("/health").status_code == 200
        except httpx.TransportError:
            return False


def transfer(store: Path) -> dict[str, Any]:
    """vLLM's --kv-transfer-config."""
    return {
        "kv_connector": "KVPagerConnector",
        "kv_connector_module_path": "kvpager.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": str(store)},
    }


def decoded(client: httpx.Client, prompt: list[int]) -> float:
    """Seconds a token, after the first."""
    began = time.perf_counter()
    answer = ask(client, prompt, LONG)
    return (time.perf_counter() - began - answer.seconds) / (LONG - 1)


def once(args: argparse.Namespace, ids: list[int], servers: dict[str, Server], number: int) -> dict[str, Any]:
    """One repeat; who is first changes from one to the next."""
    prompt, short = prompts(args, ids, number)
    row: dict[str, Any] = {}
    for name in sorted(servers, reverse=bool(number % 2)):
        client = servers[name].client
        row[name] = {"token_s": decoded(client, short)}
        row[name] |= {"cold": ask(client, prompt, args.tokens), "again": ask(client, prompt, args.tokens)}
    return row


def prompts(args: argparse.Namespace, ids: list[int], number: int) -> tuple[list[int], list[int]]:
    """A long prompt and a short one that no other number has."""
    need = args.prompt_tokens + SHORT
    start = number * 997 % (len(ids) - need)
    return ids[start : start + args.prompt_tokens], ids[start + args.prompt_tokens : start + need]


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start, ask, restart, ask."""
    ids, token_bytes = tokenised(args.model)
    store = folder / "kv" / "store.db"
    warm = ids[-64:]
    with ExitStack() as stack:
        servers = {}
        for name, path in (("alone", None), ("store", store)):
            with held(args.lock):
                servers[name] = stack.enter_context(closing(Server(args, folder, path)))
                ask(servers[name].client, warm, 8)
        rows = []
        for number in range(args.repeats):
            with held(args.lock):
                rows.append(once(args, ids, servers, number))
        saved = servers["store"].metrics()
        stop_s = servers["store"].close()
    size = sum(file.stat().st_size for file in store.parent.iterdir() if not file.name.endswith(".reserve"))
    if args.cold_disk:
        forget(store)
    with held(args.lock), closing(Server(args, folder, store)) as server:
        ask(server.client, warm, 8)
        restarted = [ask(server.client, prompts(args, ids, number)[0], args.tokens) for number in range(args.repeats)]
        ready_s, loaded = server.ready_s, server.metrics()
    return figures(rows, restarted) | {
        "ready_alone_s": servers["alone"].ready_s,
        "ready_s": ready_s,
        "stop_s": stop_s,
        "disk_of_kv": size / (saved["saved_bytes"] or 1),
        "kv_bytes": saved["saved_bytes"],
        "token_bytes": token_bytes,
        "before": saved,
        "after": loaded,
    }


@contextmanager
def closing(server: Server) -> Iterator[Server]:
    try:
        yield server
    finally:
        server.close()


def figures(rows: list[dict[str, Any]], restarted: list[First]) -> dict[str, Any]:
    """Medians, and whether answers are the same."""
    found: dict[str, Any] = {}
    for name in ("alone", "store"):
        for kind in ("cold", "again"):
            found[f"{name}_{kind}_s"] = statistics.median(row[name][kind].seconds for row in rows)
        found[f"{name}_token_s"] = statistics.median(row[name]["token_s"] for row in rows)
    found["restart_s"] = statistics.median(one.seconds for one in restarted)
    found["restart_of_cold"] = found["restart_s"] / found["alone_cold_s"]
    # each repeat is compared with itself: the two ran one after the other
    found["cold_overhead"] = statistics.median(
        row["store"]["cold"].seconds / row["alone"]["cold"].seconds - 1 for row in rows
    )
    found["decode_overhead"] = statistics.median(row["store"]["token_s"] / row["alone"]["token_s"] - 1 for row in rows)
    alone = [row["alone"]["again"] for row in rows]
    found["same_cold"] = sum(row["store"]["cold"].tokens == row["alone"]["cold"].tokens for row in rows)
    found["same_restart"] = sum(one.tokens == other.tokens for one, other in zip(restarted, alone, strict=True))
    found["cached_restart"] = [one.cached for one in restarted]
    found["cold_s"] = [[row[name]["cold"].seconds for row in rows] for name in ("alone", "store")]
    found["token_s"] = [[row[name]["token_s"] for row in rows] for name in ("alone", "store")]
    found["restart_each_s"] = [one.seconds for one in restarted]
    found["repeats"] = len(rows)
    return found


def told(found: dict[str, Any]) -> str:
    """The figures as a table."""
    rows = [
        ("vLLM alone, cold", f"{found['alone_cold_s']:.2f} s"),
        ("with the store, cold", f"{found['store_cold_s']:.2f} s ({found['cold_overhead']:+.1%})"),
        ("vLLM alone, again", f"{found['alone_again_s']:.3f} s"),
        ("with the store, again", f"{found['store_again_s']:.3f} s"),
        ("with the store, after a restart", f"{found['restart_s']:.3f} s ({found['restart_of_cold']:.1%} of cold)"),
        ("a token, vLLM alone", f"{1000 * found['alone_token_s']:.2f} ms"),
        ("a token, with the store", f"{1000 * found['store_token_s']:.2f} ms ({found['decode_overhead']:+.1%})"),
        ("answers the same: cold, restart", f"{found['same_cold']}, {found['same_restart']} of {found['repeats']}"),
        ("on disk, of the blocks' bytes", f"{found['disk_of_kv']:.1%} of {found['kv_bytes'] / 2**20:.0f} MiB"),
        ("to be ready, alone and on a store", f"{found['ready_alone_s']:.0f} s, {found['ready_s']:.0f} s"),
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompt-tokens", type=int, default=7000)
    parser.add_argument("--tokens", type=int, default=16, help="of each long prompt's answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", help="where the store is made (default: the system's for temporary files)")
    parser.add_argument("--cold-disk", action="store_true", help="drop the stored file from the page cache")
    parser.add_argument("--logs", help="a folder that keeps the logs of vLLM")
    parser.add_argument("--lock", help="a file to hold while measuring")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("more", nargs="*", metavar="-- OPTION", help="options for vLLM's server")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        found = measure(args, Path(name))
    print(json.dumps(found, indent=1, default=vars) if args.json else told(found))
    return 0 if found["same_restart"] == args.repeats else 1


if __name__ == "__main__":
    sys.exit(main())
