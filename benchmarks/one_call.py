"""Decode attention as a pager has it computed where all pages lie in frames: one call a tile, all groups in it.

`kvpager bench kernel` gives a kernel one group of pages a call, as a pager must where pages have to be brought back in
between. This compares both with the speed at which the memory is read, round by round in turn, out of the caches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

from kvpager import KVShape, _native
from kvpager.kernels.cores import default_threads
from kvpager.kernels.native import NativeKernel
from kvpager.ports import Layer, PageList, TileQuery, Tiles

EXAMPLE = "example: python benchmarks/one_call.py --tokens 8192,32768 --rounds 9 --json"
SHAPES = {"9/3x64": (9, 3, 64), "32/8x128": (32, 8, 128), "32/32x128": (32, 32, 128)}
PAGE = 16
GROUP = 256  # as PagerConfig.group_pages
STREAM_BYTES = 2**28


class Cache:
    """Keys and values of `tokens` tokens of several sequences in random frames, above `least` bytes in all."""

    def __init__(self, heads: tuple[int, int, int], tokens: int, least: int) -> None:
        query_heads, self.kv_heads, dim = heads
        shape = KVShape(layers=1, kv_heads=self.kv_heads, query_heads=query_heads, head_dim=dim, dtype="bfloat16")
        self.blocks, self.kernel = tokens // PAGE, NativeKernel()
        self.bytes = self.blocks * self.kv_heads * shape.page_bytes(PAGE)
        self.places = max(2, -(-least // self.bytes))
        rng = np.random.default_rng(0)
        frames = self.places * self.blocks * self.kv_heads
        self.storage = self.kernel.storage(frames, shape, PAGE)
        keys = rng.standard_normal((512, PAGE, dim), np.float32)
        for low in range(0, frames, 512):
            count = min(512, frames - low)
            self.storage.write(np.arange(low, low + count), 0, keys[:count], keys[:count])
        self.table = rng.permutation(frames).astype(np.int32).reshape(-1, 1, self.kv_heads)
        self.queries = rng.standard_normal((query_heads, 1, dim), np.float32)
        self.tile = TileQuery(self.queries, tokens - 1, dim**-0.5, None, None)
        self.output = np.empty_like(self.queries)
        self.pages = [self._pages(place) for place in range(self.places)]
        self.tiles = [self._tiles(place) for place in range(self.places)]

    def _pages(self, place: int) -> list[tuple[np.ndarray, ...]]:
        """The own pages of a sequence and the past ones: heads, positions, and places in the table."""
        made = []
        for first, stop in ((self.blocks - 1, self.blocks), (0, self.blocks - 1)):
            heads = np.repeat(np.arange(self.kv_heads), stop - first)
            blocks = np.tile(np.arange(first, stop), self.kv_heads)
            made.append((heads, blocks * PAGE, (blocks + place * self.blocks) * self.kv_heads + heads))
        return made

    def _tiles(self, place: int) -> Tiles:
        """A sequence's last token as one tile."""
        rows = np.arange(place * self.blocks, (place + 1) * self.blocks)
        end, own = self.blocks * PAGE, self.blocks - 1
        return Tiles(rows, np.array([[0, 1, end - 1, 0, 0, own, self.blocks, end]]), None, PAGE, GROUP, None)

    def one_call(self, place: int) -> None:
        """The whole tile at once."""
        layer, tile = Layer(self.storage, self.table, 0), self.tile
        batch = self.kernel.batch(layer, self.tiles[place], self.queries, tile.scale, None, None, self.output)
        if batch.advance(0) is not None:
            raise SystemExit("a page is absent")
        batch.result()

    def by_groups(self, place: int) -> None:
        """A call for each group, and one that joins them."""
        parts, heads = [], []
        for of_head, starts, flat in self.pages[place]:
            frames = self.table.reshape(-1)[flat].astype(np.int64)
            heads.append(of_head)
            full = np.full(len(frames), PAGE)
            for low in range(0, len(frames), GROUP):
                at = slice(low, low + GROUP)
                group = PageList(frames[at], of_head[at], starts[at], full[at], self.kv_heads)
                parts.append(self.kernel.attend(self.storage, self.tile, group))
        self.kernel.settle(parts, np.concatenate(heads))


def measure(heads: tuple[int, int, int], tokens: int, options: argparse.Namespace) -> dict[str, float]:
    """Medians over rounds: milliseconds of both ways, the stream's GB/s, and the share of it that one call reaches."""
    cache = Cache(heads, tokens, options.least)
    stream = _native.allocate(STREAM_BYTES)
    stream[:] = 1
    times: dict[str, list[float]] = {"one_call": [], "by_groups": []}
    streams = []
    for _ in range(options.rounds):
        streams.append(STREAM_BYTES / _native.stream_read(stream, 1))
        for name, run in (("one_call", cache.one_call), ("by_groups", cache.by_groups)):
            began = time.perf_counter()
            for place in range(cache.places):
                run(place)
            times[name].append((time.perf_counter() - began) / cache.places)
    shares = [cache.bytes / seconds / speed for seconds, speed in zip(times["one_call"], streams, strict=True)]
    return {
        "one_call_ms": 1e3 * statistics.median(times["one_call"]),
        "by_groups_ms": 1e3 * statistics.median(times["by_groups"]),
        "stream_gb_per_s": statistics.median(streams) / 1e9,
        "one_call_stream_fraction": statistics.median(shares),
    }


def main() -> None:
    """Measure the shapes and print a line, or an object, for each."""
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLE)
    parser.add_argument("--shapes", default=",".join(SHAPES), help="query heads/KV heads x channels (default: all)")
    parser.add_argument("--tokens", default="8192,32768", help="lengths (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds, of which the median (default: 9)")
    parser.add_argument("--least", type=int, default=2**28, help="bytes of keys and values at least (default: 2^28)")
    parser.add_argument("--threads", type=int, default=default_threads(), help="threads (default: physical cores)")
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    options = parser.parse_args()
    _native.set_threads(options.threads)
    for name in options.shapes.split(","):
        for tokens in map(int, options.tokens.split(",")):
            row = measure(SHAPES[name], tokens, options)
            if options.json:
                print(json.dumps({"shape": name, "tokens": tokens, **row}), flush=True)
            else:
                print(f"{name} {tokens}:", ", ".join(f"{key} {value:.3g}" for key, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
