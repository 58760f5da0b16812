"""How long the compiled digests take to choose the pages of one layer, for decode steps and for tiles of a prompt.

Random keys and queries; the digests of all layers are pushed out of the caches before each round, as a model's weights
push them out between two steps. Times are medians over rounds, in microseconds a layer, everything included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

from kvpager import _native
from kvpager.kernels import native_digest
from kvpager.ports import Room, TileQuery

EXAMPLE = "example: python benchmarks/digest_speed.py --threads 2 --json"
CASES = [(8192, 1, 1), (3500, 64, 1), (3500, 64, 2), (3500, 64, 3), (3500, 64, 4), (3500, 64, 8)]


def measure(tokens: int, tile: int, sample: int, options: argparse.Namespace) -> float:
    """Median microseconds a layer for one choice among `tokens` past tokens."""
    rng = np.random.default_rng(0)
    pages, heads, query_heads, head_dim = tokens // 16, options.kv_heads, options.query_heads, options.head_dim
    digest = native_digest.make("2bit", options.layers, heads, head_dim, 16, sample)
    if digest is None:
        raise SystemExit(f"head_dim: {head_dim} is not a multiple of 8 up to 256")
    rows = np.arange(pages)
    digest.grow(pages)
    for layer in range(options.layers):
        digest.build(layer, rows, rng.normal(size=(pages, heads, 16, head_dim)).astype(np.float32))
    queries = rng.normal(size=(query_heads, tile, head_dim)).astype(np.float32)
    query = TileQuery(queries, pages * 16, head_dim**-0.5, None, None)
    own = np.full((query_heads, tile), 3, np.float32)
    room = Room(max(pages // 8, 4), 1, 2)
    times, weights = [], np.zeros(1 << 25, np.float32)
    for _ in range(options.rounds):
        weights += 1
        began = time.perf_counter()
        for layer in range(options.layers):
            digest.choose(layer, rows, query, rows * 16, own, room)
        times.append((time.perf_counter() - began) / options.layers * 1e6)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0], epilog=EXAMPLE)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--query-heads", type=int, default=9)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--isa", choices=_native.isas(), default=_native.isa(), help="default: the best one here")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    options = parser.parse_args()
    _native.set_isa(options.isa)
    _native.set_threads(options.threads)
    found = [
        {"tokens": tokens, "tile": tile, "sample": sample, "us": round(measure(tokens, tile, sample, options), 1)}
        for tokens, tile, sample in CASES
    ]
    if options.json:
        print(json.dumps({"isa": options.isa, "threads": options.threads, "rows": found}))
        return
    print(f"{options.isa}, {options.threads} threads; past tokens, tile, sample, microseconds a layer")
    for row in found:
        print(f"{row['tokens']:6} {row['tile']:4} {row['sample']:4} {row['us']:9.1f}")


if __name__ == "__main__":
    main()
