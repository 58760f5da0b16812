"""How many pages does each eviction policy read back? A simulation on recorded queries and keys.

Selection never depends on what is resident, so one recording serves every policy and pool. The optimum
that knows the future (Belady: the page whose next use is farthest leaves first) is reported beside them.

The trace is an .npz file with `q` [layers, query heads, tokens, head_dim] and `k` [layers, KV heads,
tokens, head_dim], float32, rotated, of one sequence.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from kvpager.core.policies import POLICY_TYPES, Policy, make
from kvpager.core.scorer import AttentionScorer, Observed
from kvpager.kernels.reference import masses

SINKS, RECENT = 1, 2
EXAMPLE = "example: python benchmarks/eviction_policies.py trace.npz --budget 480 --pool 0.3 --order chunk:64"


@dataclass
class Attend:
    """One tile in one layer: pages as (head, block) pairs, sorted."""

    heads: np.ndarray  # [n] selected pages
    blocks: np.ndarray  # [n]
    mass: np.ndarray  # [n, G, T]
    ratio: np.ndarray | None  # [H, candidates] estimate over threshold; None when all were taken


@dataclass
class Recording:
    """Selections of a whole run: attends[tile][layer]."""

    layers: int
    heads: int
    page: int
    tiles: list[tuple[int, int]]  # token ranges
    attends: list[list[Attend]] = field(default_factory=list)


def two_bits(keys: np.ndarray, page: int) -> np.ndarray:
    """Keys [H, tokens, D] as they read back from 2 bits, per page and channel between least and largest."""
    heads, tokens, channels = keys.shape
    pages = keys.reshape(heads, tokens // page, page, channels)
    low, high = pages.min(2, keepdims=True), pages.max(2, keepdims=True)
    step = np.maximum(high - low, 1e-12) / 3
    return (low + np.rint((pages - low) / step) * step).reshape(keys.shape)


def softmax(scores: np.ndarray) -> np.ndarray:
    exp = np.exp(scores - scores.max(-1, keepdims=True))
    return exp / exp.sum(-1, keepdims=True)


def choose(estimate: np.ndarray, pages: int) -> tuple[np.ndarray, np.ndarray]:
    """Selection [H, n] and ratio [H, n] from estimates [H, n]: protected pages first, then the largest."""
    heads, n = estimate.shape
    protected = np.zeros((heads, n), bool)
    protected[:, :SINKS] = protected[:, n - RECENT :] = True
    left = pages * heads - protected.sum()
    rest = np.sort(estimate[~protected])[::-1]
    threshold = max(rest[left - 1], 1e-30)
    chosen = protected | (estimate >= threshold)
    ratio = estimate / threshold
    # 1 and above says that a page was selected, protected pages included.
    return chosen, np.where(chosen, np.maximum(ratio, 1), ratio)


def record(trace: dict[str, np.ndarray], tiles: list[tuple[int, int]], budget: int | None, page: int) -> Recording:
    """Run attention over the trace, tile by tile, and note what each selects and looks at."""
    queries, keys = trace["q"], trace["k"]
    layers, heads, tokens, channels = keys.shape
    group = queries.shape[1] // heads
    made = Recording(layers, heads, page, tiles, [[] for _ in tiles])
    scale = np.float32(channels**-0.5)
    for layer in range(layers):
        coarse = two_bits(keys[layer, :, : tokens // page * page], page)
        for at, (start, stop) in enumerate(tiles):
            q = queries[layer].reshape(heads, group, tokens, channels)[:, :, start:stop]
            made.attends[at].append(attend(q, keys[layer], coarse, start, scale, budget, page))
    return made


def attend(
    q: np.ndarray, keys: np.ndarray, coarse: np.ndarray, start: int, scale: np.float32, budget: int | None, page: int
) -> Attend:
    heads, group, width, channels = q.shape
    flat = q.reshape(heads, group * width, channels) * scale
    past = start // page
    blocks = -(-(start + width) // page)
    selected, ratio = np.ones((heads, blocks), bool), None
    if budget is not None and past > budget // page:
        # One softmax over all candidates of a query; then the page's share, summed over queries and group.
        estimate = softmax(flat @ coarse[:, : past * page].transpose(0, 2, 1))
        estimate = estimate.reshape(heads, group * width, past, page).sum((1, 3))
        selected[:, :past], ratio = choose(estimate, budget // page)
    scores = (flat @ keys[:, : start + width].transpose(0, 2, 1)).reshape(heads, group, width, start + width)
    position = np.arange(start + width)
    seen = (position <= np.arange(start, start + width)[:, None]) & selected[:, None, None, position // page]
    probability = softmax(np.where(seen, scores, -np.inf))
    mass = np.add.reduceat(probability, np.arange(0, start + width, page), axis=-1)
    of_head, block = np.nonzero(selected)
    return Attend(of_head, block, np.ascontiguousarray(mass[of_head, :, :, block]), ratio)


@dataclass
class Simulation:
    """One policy (or, without one, the optimum) and one pool over a recording."""

    recording: Recording
    frames: int
    policy: Policy | None
    grace: int
    decay: float
    group: int = 64
    recalls: int = 0
    evictions: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        run = self.recording
        self.rows = -(-run.tiles[-1][1] // run.page)
        self.size = self.rows * run.layers * run.heads
        self.resident = np.zeros(self.size, bool)
        self.written = np.zeros(self.size, bool)
        self.pinned = np.zeros(self.size, bool)
        self.rng = np.random.default_rng(0)
        needs = self.policy.needs if self.policy else frozenset()
        self.scorer = AttentionScorer(run.layers, run.heads, needs, self.decay, self.grace)
        self.scorer.grow(self.rows)
        self.next_use = np.full(self.size, np.inf)
        self.future: list[np.ndarray] = []
        self.tick = self.layer = 0
        self.again = False

    def flat(self, blocks: np.ndarray, layer: int, heads: np.ndarray) -> np.ndarray:
        return (blocks * self.recording.layers + layer) * self.recording.heads + heads

    def run(self, steps: list[list[int]]) -> None:
        """Each step (a forward) is a list of tiles; layers run one after the other, each over all its tiles."""
        events = [(tile, layer) for step in steps for layer in range(self.recording.layers) for tile in step]
        if self.policy is None:
            self.look_ahead(events)
        at = 0
        for step in steps:
            self.tick += 1
            for layer in range(self.recording.layers):
                self.layer = layer
                own = self.append(step)
                for tile in step:
                    self.again = tile != step[-1]
                    self.tick += tile != step[0]
                    self.one(self.recording.attends[tile][self.layer], at)
                    at += 1
                self.pinned[own] = False
                # The last page stays open while it is not full.
                if self.recording.tiles[step[-1]][1] % self.recording.page:
                    self.pinned[own[-self.recording.heads :]] = True

    def look_ahead(self, events: list[tuple[int, int]]) -> None:
        """For each attend, when each of its pages is used next."""
        following = np.full(self.size, np.inf)
        for at, (tile, layer) in reversed(list(enumerate(events))):
            run = self.recording.attends[tile][layer]
            pages = self.flat(run.blocks, layer, run.heads)
            self.future.append(following[pages])
            following[pages] = at
        self.future.reverse()
        self.next_use = following

    def append(self, step: list[int]) -> np.ndarray:
        run = self.recording
        blocks = np.arange(run.tiles[step[0]][0] // run.page, -(-run.tiles[step[-1]][1] // run.page))
        every = self.flat(np.repeat(blocks, run.heads), self.layer, np.tile(np.arange(run.heads), len(blocks)))
        new = every[~self.written[every]]
        self.pinned[every] = True
        self.room(len(new))
        self.resident[new] = self.written[new] = True
        rows = np.unique(new // (run.layers * run.heads))
        self.scorer.born(rows, self.layer, rows, self.tick)
        return every

    def one(self, attend: Attend, at: int) -> None:
        if attend.ratio is not None:
            self.scorer.estimated(np.arange(attend.ratio.shape[1]), self.layer, attend.ratio)
        pages = self.flat(attend.blocks, self.layer, attend.heads)
        for first in range(0, len(pages), self.group):
            part = pages[first : first + self.group]
            already = self.pinned[part]
            self.pinned[part] = True
            absent = part[~self.resident[part]]
            self.room(len(absent))
            self.resident[absent] = True
            self.recalls += len(absent)
            self.pinned[part] = already
            if self.policy is None:
                self.next_use[part] = self.future[at][first : first + self.group]
        given, queries = masses(attend.mass), attend.mass.shape[2]
        pages = len(attend.heads)
        observed = Observed(attend.blocks, attend.heads, given, [0, pages], [queries], [self.tick])
        self.scorer.observe(self.layer, observed)

    def room(self, wanted: int) -> None:
        """Evict until `wanted` frames are free."""
        short = wanted - (self.frames - int(self.resident.sum()))
        if short <= 0:
            return
        candidates = np.flatnonzero(self.resident & ~self.pinned)
        if short > len(candidates):
            raise SystemExit(f"--pool: {self.frames} frames are too few; {short - len(candidates)} more are needed")
        began = time.perf_counter()
        if self.policy is None:
            score = -self.next_use[candidates]
        else:
            score = self.policy.score(
                self.scorer.numbers(candidates, self.tick, self.layer, self.again, True), self.rng
            )
        victims = candidates[np.argpartition(score, short - 1)[:short]]
        self.seconds += time.perf_counter() - began
        self.resident[victims] = False
        self.evictions += short


def plan(order: str, tokens: int, tile: int) -> tuple[list[tuple[int, int]], list[list[int]]]:
    """Tiles (token ranges) and steps (lists of tiles) of an order: whole, chunk:TOKENS or decode:TOKENS."""
    kind, _, size = order.partition(":")
    if kind == "whole" and not size:
        chunk, prompt = tokens, tokens
    elif kind == "chunk" and size.isdigit() and int(size) and int(size) % tile == 0:
        chunk, prompt = int(size), tokens
    elif kind == "decode" and size.isdigit() and 0 < int(size) < tokens:
        chunk, prompt = tile, tokens - int(size)
    else:
        raise SystemExit(f"--order: {order!r} is not whole, chunk:TOKENS (a multiple of the tile) or decode:TOKENS")
    tiles = [(start, min(start + tile, prompt)) for start in range(0, prompt, tile)]
    each = chunk // tile or 1
    steps = [list(range(at, min(at + each, len(tiles)))) for at in range(0, len(tiles), each)]
    for start in range(prompt, tokens):
        steps.append([len(tiles)])
        tiles.append((start, start + 1))
    return tiles, steps


def report(arguments: argparse.Namespace) -> Iterator[dict[str, object]]:
    for path in arguments.trace:
        trace = dict(np.load(path))
        tokens = trace["k"].shape[2]
        recordings: dict[str, Recording] = {}
        for order in arguments.order:
            tiles, steps = plan(order, tokens, arguments.tile)
            key = str(tiles)
            if key not in recordings:
                print(f"{path}: recording {len(tiles)} tiles", file=sys.stderr)
                recordings[key] = record(trace, tiles, arguments.budget or None, arguments.page)
            run = recordings[key]
            frames = int(arguments.pool * (-(-tokens // run.page) * run.layers * run.heads))
            for name in ["belady", *arguments.policy]:
                policy = None if name == "belady" else make(name)
                simulation = Simulation(run, frames, policy, arguments.grace, arguments.decay)
                simulation.run(steps)
                yield {
                    "trace": path,
                    "order": order,
                    "policy": name,
                    "frames": frames,
                    "recalls": simulation.recalls,
                    "evictions": simulation.evictions,
                    "seconds": round(simulation.seconds, 3),
                }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLE)
    parser.add_argument("trace", nargs="+", help="npz files with q and k")
    parser.add_argument("--budget", type=int, default=480, help="past tokens a KV head; 0 for all (default 480)")
    parser.add_argument("--pool", type=float, default=0.3, help="frames as a share of all pages (default 0.3)")
    parser.add_argument("--tile", type=int, default=64, help="queries a tile (default 64)")
    parser.add_argument("--page", type=int, default=16, help="tokens a page (default 16)")
    parser.add_argument("--order", nargs="+", default=["chunk:64"], help="whole, chunk:TOKENS, decode:TOKENS")
    parser.add_argument("--policy", nargs="+", default=list(POLICY_TYPES), choices=list(POLICY_TYPES))
    parser.add_argument("--grace", type=int, default=2, help="tiles that see a page before it may leave (default 2)")
    parser.add_argument("--decay", type=float, default=0.9, help="fading of mass for each query (default 0.9)")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    arguments = parser.parse_args()
    rows = list(report(arguments))
    if arguments.json:
        print(json.dumps({"budget": arguments.budget, "pool": arguments.pool, "rows": rows}))
        return
    print(f"{'trace':<24}{'order':<12}{'policy':<10}{'frames':>8}{'recalls':>9}{'to lru':>8}{'seconds':>9}")
    for row in rows:
        lru = next((r for r in rows if all(r[k] == row[k] for k in ("trace", "order")) and r["policy"] == "lru"), None)
        share = f"{row['recalls'] / lru['recalls'] - 1:+.1%}" if lru and lru["recalls"] else ""  # type: ignore[operator]
        print(
            f"{str(row['trace'])[-23:]:<24}{row['order']:<12}{row['policy']:<10}{row['frames']:>8}"
            f"{row['recalls']:>9}{share:>8}{row['seconds']:>9}"
        )


if __name__ == "__main__":
    main()
