"""How fast blocks go to Redis and come back, and what a Redis that is dead or hangs costs an engine.

    python benchmarks/redis_store.py speed [--blocks 256] [--repeats 5]
    python benchmarks/redis_store.py dead [--repeats 5] [-- OPTIONS OF kvpager bench engine]

Both start a redis-server of their own on loopback (from PATH), without persistence. `speed` has blocks of random
numbers in the shape of smollm2-135m in bfloat16: 90 pages of 4 KiB. `dead` runs `kvpager bench engine` in turn without
a store, with a Redis whose port nobody listens on, and with one that accepts and never answers (SIGSTOP).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from kvpager.bench.store import random_blocks
from kvpager.stores import RedisSettings, RedisStore

PAGES, PAGE_BYTES = 90, 4096
DEFAULTS = ["--num-prompts", "16", "--input-len", "100", "--output-len", "200", "--ignore-eos", "--swap", "memory"]


@contextmanager
def redis_server() -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A Redis, and its URL."""
    program = shutil.which("redis-server")
    if program is None:
        raise SystemExit("redis-server is not in PATH")
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            wait_for(port)
            yield process, f"redis://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


def free_port() -> int:
    """A port that nobody listens on."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port: int = server.getsockname()[1]
        return port


def wait_for(port: int) -> None:
    """Until somebody listens."""
    while True:
        with closing(socket.socket()) as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)


def timed(call: Callable[[], object], repeats: int, before: Callable[[], object] = lambda: None) -> float:
    """Median seconds of a call."""
    found = []
    for _ in range(repeats):
        before()
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def speed(args: argparse.Namespace) -> None:
    """Figures of the tier alone."""
    blocks = random_blocks(args.blocks, PAGES, PAGE_BYTES, 0)
    keys = [block.head.key for block in blocks]
    payload = sum(block.payload.nbytes for block in blocks)
    with redis_server() as (_, url), closing(RedisStore(url, RedisSettings(timeout_s=5.0))) as store:
        store.open()

        def fresh() -> None:
            store.drop(keys)

        seconds = timed(lambda: store.put(blocks), args.repeats, fresh)
        print(f"written, new blocks: {payload / seconds / 1e6:.0f} MB/s")
        for batch in (1, 2, 8, 64):
            starts = range(0, len(keys), batch)
            taken = timed(lambda s=starts, n=batch: [store.get(keys[at : at + n]) for at in s], args.repeats)
            print(
                f"read, checked, {batch} blocks a call: {taken / len(keys) / PAGES * 1e6:.2f} us a page, "
                f"{payload / taken / 1e6:.0f} MB/s"
            )
        with closing(RedisStore(url, RedisSettings(timeout_s=5.0))) as other:
            asked = keys[:94]
            found = timed(lambda: other.contains(asked), args.repeats, other.probe)
            heads = timed(lambda: other.heads(asked), args.repeats)
            again = timed(lambda: other.contains(asked), args.repeats)
            print(
                f"a prompt of 1,500 tokens (94 blocks): looked up in {found * 1e3:.2f} ms, known {again * 1e3:.3f} ms"
            )
            print(f"their heads: {heads * 1e3:.2f} ms")


def dead(args: argparse.Namespace) -> None:
    """What a store that can't be reached costs."""
    found: dict[str, list[float]] = {"none": [], "dead": [], "hung": []}
    for _ in range(args.repeats):
        for name in found:
            found[name].append(run(name, args.more))
            print(f"{name}: {found[name][-1]:.1f} tokens/s", flush=True)
    base = statistics.median(found["none"])
    for name, rates in found.items():
        middle = statistics.median(rates)
        print(f"{name}: median {middle:.1f} tokens/s, {middle / base - 1:+.1%}")


def run(name: str, more: list[str]) -> float:
    """Tokens/s of one run of the engine."""
    code = "import sys; from kvpager.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "bench", "engine", "--json", *DEFAULTS, *more]
    if name == "none":
        return rate(command)
    if name == "dead":
        return rate([*command, "--store", f"redis://127.0.0.1:{free_port()}", "--store-publish", "all"])
    with redis_server() as (process, url):
        os.kill(process.pid, signal.SIGSTOP)
        return rate([*command, "--store", url, "--store-publish", "all"])


def rate(command: list[str]) -> float:
    """What it says."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    return float(json.loads(done.stdout)["output_tokens_per_s"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "dead"))
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    given, more = sys.argv[1:], []
    if "--" in given:
        given, more = given[: given.index("--")], given[given.index("--") + 1 :]
    args = parser.parse_args(given)
    args.more = more
    {"speed": speed, "dead": dead}[args.what](args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
