"""What nodes that share a Redis come to: measured figures of one node and one Redis, and arithmetic from them.

    python benchmarks/scaling.py measure [--blocks 256] [--batches 1,4,11] [--rounds 5] [--redis URL]
    python benchmarks/scaling.py table [--read-mb-s 1100] [--server-read-us 90] ... [--plot scaling.png]

`measure` starts a redis-server (or uses the one at a URL: it must be empty) and writes and reads blocks of 370 KB in
pipelines. Told are blocks a round trip, microseconds a block and MB/s as one client sees them, and the processor time
that redis-server takes a block, which is what bounds a server that has several clients.

`table` computes. All its inputs are options; their defaults are what was measured for docs/scaling.md. Hit rates are
Che's approximation of a least-recently-used cache under Zipf's law (Che, Tung and Wang 2002).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from kvpager.bench.store import random_blocks
from kvpager.stores import RedisSettings, RedisStore

BLOCK_TOKENS = 16
PAGES = 90  # of a block: 30 layers of 3 KV heads
CONNECTION = {"socket_read_size": 2**20, "protocol": 2}  # as kvpager.stores.redis connects


@dataclass(frozen=True)
class Figures:
    """What the arithmetic starts from.

    kv_bytes        of keys and values a token
    compute_tok_s   tokens of a prompt that a node computes a second
    read_mb_s       of blocks that one client reads from Redis
    server_read_us  processor time of redis-server for reading a block of 16 tokens
    server_write_us the same for writing one
    network_mb_s    of the machine that a Redis runs on, each way
    request_s       requests a second that come to each node
    prefix_tokens   of a prompt that others have in common with it
    own_tokens      of a prompt that nobody else has
    prefixes        different ones for each node that there is: more nodes serve more users
    zipf            how unevenly they are asked for (0: all alike)
    local           prefixes that fit into a node's own memory and store: 290 are 10 GB
    shared          prefixes that fit into one shard of Redis: 1,850 are 64 GB
    nodes_a_shard   nodes for which there is a shard, or more where they could not keep up
    published       share of what is computed that is written to Redis (1 for the policy `all`)
    """

    kv_bytes: int = 23_040
    compute_tok_s: float = 1_700.0
    read_mb_s: float = 775.0
    server_read_us: float = 72.0
    server_write_us: float = 275.0
    network_mb_s: float = 1_250.0
    request_s: float = 1.0
    prefix_tokens: int = 1_500
    own_tokens: int = 200
    prefixes: int = 1_000
    zipf: float = 0.8
    local: int = 290
    shared: int = 1_850
    nodes_a_shard: int = 20
    published: float = 0.5

    @property
    def block_mb(self) -> float:
        """Megabytes of a block's pages."""
        return self.kv_bytes * BLOCK_TOKENS / 1e6

    @property
    def prefix_mb(self) -> float:
        """Megabytes of a prefix's pages."""
        return self.kv_bytes * self.prefix_tokens / 1e6


@dataclass(frozen=True)
class Row:
    """So many nodes under one way to route and to share.

    at_home    share of prefixes that the node has itself
    from_redis share that Redis has of what it has not
    computed   tokens a second that a node computes, of those that prompts have
    busy       share of a node's time that this takes; over 1 it can't
    read_mb_s  from Redis, all nodes together
    write_mb_s to it
    shards     of Redis that this takes, by processor and by network, whichever is more
    """

    nodes: int
    affinity: bool
    redis: bool
    at_home: float
    from_redis: float
    computed: float
    busy: float
    read_mb_s: float
    write_mb_s: float
    shards: int


def hit_rates(count: int, exponent: float, sizes: Sequence[float]) -> list[float]:
    """Share of requests that hit a least-recently-used cache of each size: Che's approximation under Zipf's law."""
    weights = np.arange(1, count + 1, dtype=float) ** -exponent
    chances = weights / weights.sum()
    return [_hit_rate(chances, size) for size in sizes]


def _hit_rate(chances: np.ndarray, size: float) -> float:
    if size >= len(chances):
        return 1.0
    if size <= 0:
        return 0.0
    low, high = 0.0, 1.0  # for so many requests after its last use an entry is kept
    while -np.expm1(-chances * high).sum() < size:
        high *= 2
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if -np.expm1(-chances * middle).sum() < size else (low, middle)
    return float(chances @ -np.expm1(-chances * high))


def row(figures: Figures, nodes: int, *, affinity: bool, redis: bool) -> Row:
    """The arithmetic for one line of the table."""
    everybody = figures.prefixes * nodes
    (at_home,) = hit_rates(figures.prefixes if affinity else everybody, figures.zipf, [figures.local])
    shards = math.ceil(nodes / figures.nodes_a_shard) if redis else 0
    while True:
        # what Redis has includes what nodes have: a block goes to both
        anywhere = max(at_home, *hit_rates(everybody, figures.zipf, [figures.shared * shards]))
        wanted = figures.request_s * (figures.own_tokens + figures.prefix_tokens * (1 - anywhere))
        busy = wanted / figures.compute_tok_s
        computed = min(wanted, figures.compute_tok_s)
        fetched = figures.request_s * figures.prefix_tokens * (anywhere - at_home)
        read, write = (nodes * rate * figures.kv_bytes / 1e6 for rate in (fetched, computed * figures.published))
        if not redis:
            write = 0.0
            break
        need = math.ceil(_shards(figures, read, write))
        if need <= shards:
            break
        shards = need
    from_redis = 0.0 if at_home >= 1 else (anywhere - at_home) / (1 - at_home)
    return Row(nodes, affinity, redis, at_home, from_redis, computed, busy, read, write, shards)


def _shards(figures: Figures, read_mb_s: float, write_mb_s: float) -> float:
    """Servers that carry this, each with one busy core and its own network."""
    core = (read_mb_s * figures.server_read_us + write_mb_s * figures.server_write_us) / figures.block_mb / 1e6
    return max(core, read_mb_s / figures.network_mb_s, write_mb_s / figures.network_mb_s)


def single_lines(figures: Figures) -> list[str]:
    """What one node and one Redis come to, as lines of a Markdown table."""
    compute_s, read_s = figures.prefix_tokens / figures.compute_tok_s, figures.prefix_mb / figures.read_mb_s
    core = figures.block_mb / figures.server_read_us * 1e6
    least = figures.compute_tok_s * figures.kv_bytes / 1e6
    most = min(core, figures.network_mb_s)
    told = {
        f"a prefix of {figures.prefix_tokens:,} tokens": f"{figures.prefix_mb:.1f} MB",
        "computing it": f"{compute_s * 1e3:,.0f} ms",
        "reading it from Redis": f"{read_s * 1e3:,.0f} ms, {read_s / compute_s:.1%} of that",
        "one core of redis-server reads at most": f"{core:,.0f} MB/s",
        f"a network of {figures.network_mb_s * 8 / 1e3:,.0f} Gbit/s carries": f"{figures.network_mb_s:,.0f} MB/s",
        "below this a node reads more slowly than it computes": f"{least:,.0f} MB/s",
        "so one Redis is worth asking for so many nodes at once": f"{most / least:,.0f}",
    }
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in told.items())]


def table_lines(figures: Figures, counts: Sequence[int]) -> list[str]:
    """The table for these numbers of nodes, in Markdown."""
    lines = [
        "| nodes | routed by | Redis | at home | from Redis | computed, tokens/s a node | a node's time "
        "| Redis read, MB/s | written, MB/s | shards |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in rows(figures, counts):
        routed, shared = ("affinity" if one.affinity else "turns"), ("yes" if one.redis else "no")
        lines.append(
            f"| {one.nodes:,} | {routed} | {shared} | {one.at_home:.0%} | {one.from_redis:.0%} | {one.computed:,.0f} "
            f"| {one.busy:.0%} | {one.read_mb_s:,.0f} | {one.write_mb_s:,.0f} | {one.shards or ''} |"
        )
    return lines


def rows(figures: Figures, counts: Sequence[int]) -> Iterator[Row]:
    """Every number of nodes, with and without affinity, with and without Redis."""
    for nodes in counts:
        for affinity in (False, True):
            for redis in (False, True):
                yield row(figures, nodes, affinity=affinity, redis=redis)


def plot(figures: Figures, path: str) -> None:
    """MB/s that are asked of Redis over the number of nodes, beside what one server and one network carry."""
    from kvpager.pictures import check_target, figure_type

    target = check_target(path)
    picture = figure_type()(figsize=(7, 4), layout="constrained")
    axes = picture.subplots()
    counts = [1, 2, 3, 5, 10, 20, 30, 50, 100, 200, 300, 500, 1000]
    for affinity, style in ((False, "--"), (True, "-")):
        got = [row(figures, nodes, affinity=affinity, redis=True) for nodes in counts]
        label = "by affinity" if affinity else "in turns"
        axes.loglog(counts, [one.read_mb_s + one.write_mb_s for one in got], style, label=f"routed {label}")
    for limit, what in (
        (figures.block_mb / figures.server_read_us * 1e6, "one core of redis-server"),
        (figures.network_mb_s, f"{figures.network_mb_s * 8 / 1e3:g} Gbit/s"),
    ):
        axes.axhline(limit, color="0.5", linewidth=0.8)
        axes.annotate(what, (counts[0], limit), va="bottom", fontsize="small", color="0.3")
    axes.set_xlabel("nodes")
    axes.set_ylabel("read and written, MB/s")
    axes.legend()
    picture.savefig(target)


# -- measuring


@contextmanager
def redis_server(url: str | None) -> Iterator[str]:
    """The URL of a server: the one that is given, or one that is started here."""
    if url is not None:
        yield url
        return
    program = shutil.which("redis-server")
    if program is None:
        raise SystemExit("redis-server is missing: apt-get install redis-server, or give --redis URL")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        options = ["--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--save", "", "--appendonly", "no"]
        process = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL)
        try:
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.terminate()
            process.wait(30)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Write and read blocks in pipelines of several sizes."""
    import redis

    found = []
    with redis_server(args.redis) as url, redis.Redis.from_url(url, socket_timeout=30, **CONNECTION) as client:
        _wait(client)
        if client.dbsize():
            raise SystemExit("the Redis is not empty")
        size = args.page_bytes * PAGES
        names = [f"kvpager:b:{{{os.urandom(32).hex()}}}" for _ in range(args.blocks)]
        blobs = [os.urandom(size) for _ in names]
        for batch in args.batches:
            write, read = [], []
            for _ in range(args.rounds):
                sets = [("SET", name, blob, "EX", 3600) for name, blob in zip(names, blobs, strict=True)]
                write.append(_timed(client, lambda sets=sets, batch=batch: _piped(client, batch, sets)))
                gets = [("GET", name) for name in names]
                read.append(_timed(client, lambda gets=gets, batch=batch: _piped(client, batch, gets)))
                client.flushdb()
            found += [_line("written", str(batch), write, args), _line("read", str(batch), read, args)]
        found += _through_the_store(client, url, args)
    return found


def _through_the_store(client: Any, url: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Write and read as nodes do: books, checksums and headers included."""
    write, read = [], []
    blocks = random_blocks(args.blocks, PAGES, args.page_bytes, 0)
    keys = [block.head.key for block in blocks]
    for _ in range(args.rounds):
        with closing(RedisStore(url, RedisSettings(timeout_s=30.0))) as store:
            write.append(_timed(client, lambda store=store: store.put(blocks)))
            read.append(
                _timed(client, lambda store=store: [store.get(keys[i : i + 8]) for i in range(0, len(keys), 8)])
            )
        client.flushdb()
    return [_line("written", "the store's", write, args), _line("read", "the store's", read, args)]


def _line(what: str, batch: str, times: Sequence[tuple[float, float]], args: argparse.Namespace) -> dict[str, Any]:
    wall, server = (statistics.median(column) / args.blocks for column in zip(*times, strict=True))
    size = args.page_bytes * PAGES
    return {"what": what, "batch": batch, "us": wall * 1e6, "mb_s": size / wall / 1e6, "server_us": server * 1e6}


def _wait(client: Any) -> None:
    import redis

    end = time.monotonic() + 30
    while True:
        try:
            client.ping()
            return
        except redis.RedisError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


def _timed(client: Any, work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds that it takes, and seconds of the server's processor."""
    before, began = _server_s(client), time.perf_counter()
    work()
    wall = time.perf_counter() - began
    return wall, _server_s(client) - before


def _piped(client: Any, batch: int, commands: Sequence[tuple[Any, ...]]) -> None:
    """All commands, `batch` a round trip."""
    for first in range(0, len(commands), batch):
        pipeline = client.pipeline(transaction=False)
        for command in commands[first : first + batch]:
            pipeline.execute_command(*command)
        pipeline.execute()


def _server_s(client: Any) -> float:
    told = client.info("cpu")
    return float(told["used_cpu_user"]) + float(told["used_cpu_sys"])


def main() -> None:
    """Measure, or compute."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("measure")
    one.add_argument("--redis", metavar="URL")
    one.add_argument("--blocks", type=int, default=256)
    one.add_argument("--page-bytes", type=int, default=4096, help=f"of a page; a block has {PAGES}")
    one.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4, 11])
    one.add_argument("--rounds", type=int, default=5)
    one.add_argument("--json", action="store_true")
    other = commands.add_parser("table")
    for field in fields(Figures):
        other.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    other.add_argument("--nodes", type=lambda text: [int(part) for part in text.split(",")], default=[10, 100, 1000])
    other.add_argument("--plot", metavar="FILE")
    other.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.command == "measure":
        got = measure(args)
        if args.json:
            print(json.dumps(got))
        else:
            print("| | blocks a round trip | µs a block | MB/s | µs of the server's core |\n|---|---|---|---|---|")
            for line in got:
                told = f"{line['us']:.0f} | {line['mb_s']:,.0f} | {line['server_us']:.0f}"
                print(f"| {line['what']} | {line['batch']} | {told} |")
        return
    figures = Figures(**{field.name: getattr(args, field.name) for field in fields(Figures)})
    if args.json:
        print(json.dumps([asdict(one) for one in rows(figures, args.nodes)]))
    else:
        print("\n".join([*single_lines(figures), "", *table_lines(figures, args.nodes)]))
    if args.plot:
        plot(figures, args.plot)


if __name__ == "__main__":
    main()
