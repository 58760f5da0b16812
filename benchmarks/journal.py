"""What the journal costs: on the engine's thread, and until a step is acknowledged; over a Redis on this machine.

    python benchmarks/journal.py [--requests 8] [--slot-bytes 23040] [--steps 300] [--every-ms 30] [--url URL]

Without `--url`, a redis-server from the PATH is started on loopback, one more as its replica with `--replica`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from contextlib import ExitStack

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvpager.journaled import Accepted, Gained, Told
from kvpager.replication.journal import Journal
from kvpager.replication.lease import Lease
from kvpager.replication.mirror import Mirror

PAGE = 16


def start(stack: ExitStack, *more: str) -> int:
    """A redis-server on a free port of loopback, until the stack is left."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    program = shutil.which("redis-server") or "redis-server"
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
    server = subprocess.Popen([*command, "--repl-diskless-sync-delay", "0", *more], stdout=subprocess.DEVNULL)
    stack.callback(lambda: (server.kill(), server.wait()))
    client = redis.Redis(port=port)
    for _ in range(500):
        try:
            if client.ping() and client.info("replication").get("master_link_status", "up") == "up":
                return port
        except redis.RedisError:
            pass
        time.sleep(0.01)
    raise SystemExit("redis-server does not start")


def told(request: int, position: int, slot: bytes) -> Told:
    """One token of one answer, whose sequence is `position` tokens long, all of them told."""
    length = position + 1
    full = length // PAGE
    ends = length % PAGE == 0
    keys = bytes(32) if ends else b""
    gained = Gained({"length": length, "format": 1, "namespace": "n" * 64}, full - ends, keys, position, slot)
    return Told(f"request-{request}", 0, (position,), None, gained)


def measure(journal: Journal, arguments: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Microseconds of each call on this thread, and milliseconds until each step was acknowledged."""
    for request in range(arguments.requests):
        journal.accept(Accepted(f"request-{request}", [1] * PAGE, {"max_tokens": 10**6}, 0, None, b"", None, request))
    pattern = bytes(range(256)) * (arguments.slot_bytes // 256 + 2)
    begin = Gained({"length": PAGE}, 0, bytes(32), PAGE, b"")
    journal.step([Told(f"request-{n}", 0, (), None, begin) for n in range(arguments.requests)], lambda: None)
    calls, acknowledged = [], []
    done = threading.Event()
    for step in range(arguments.steps):
        slot = pattern[step % 256 : step % 256 + arguments.slot_bytes]
        news = [told(request, PAGE + step, slot) for request in range(arguments.requests)]
        done.clear()
        began = time.perf_counter()
        journal.step(news, done.set)
        calls.append((time.perf_counter() - began) * 1e6)
        done.wait()
        acknowledged.append((time.perf_counter() - began) * 1e3)
        time.sleep(max(0.0, arguments.every_ms / 1e3 - (time.perf_counter() - began)))
    return calls, acknowledged


def report(name: str, values: list[float], unit: str) -> None:
    values = sorted(values)
    print(
        f"{name:28} median {statistics.median(values):8.2f} {unit}, 95 % {values[int(0.95 * len(values))]:8.2f}, "
        f"most {values[-1]:8.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--slot-bytes", type=int, default=23040)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every-ms", type=float, default=30.0)
    parser.add_argument("--url")
    parser.add_argument("--replica", action="store_true")
    parser.add_argument("--mirror", action="store_true", help="follow the journal with a mirror in this process")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        port = 0 if arguments.url else start(stack)
        if arguments.replica and port:
            start(stack, "--replicaof", "127.0.0.1", str(port))
        url = arguments.url or f"redis://127.0.0.1:{port}/0"

        def connect() -> redis.Redis:
            return redis.Redis.from_url(url, socket_timeout=0.5, retry=Retry(NoBackoff(), 0))

        lease = Lease(connect, f"benchmark-{os.getpid()}", "benchmark", 600.0)
        if not lease.acquire():
            raise SystemExit("the lease is taken")
        stack.callback(lease.release)
        journal = Journal(connect, lease, PAGE, on_lost=lambda: None)
        journal.start()
        stack.callback(journal.close)
        if arguments.mirror:
            mirror = Mirror(connect, lease.keys.name)
            mirror.start()
            stack.callback(mirror.close)
        began = time.process_time(), time.perf_counter()
        calls, acknowledged = measure(journal, arguments)
        busy = (time.process_time() - began[0]) / (time.perf_counter() - began[1])
        stats = journal.stats()
        print(f"{arguments.requests} requests, {arguments.slot_bytes} bytes of slots each, {arguments.steps} steps")
        report("on the engine's thread", calls, "us")
        report("until acknowledged", acknowledged, "ms")
        print(f"{'this process':28} {busy:.1%} of a core; {stats.bytes / stats.entries / 1024:.0f} KiB an entry")
        print(f"{'state':28} {stats.state}, {stats.wholes} requests written in full, {stats.replicas} replicas")


if __name__ == "__main__":
    main()
