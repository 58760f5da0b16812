"""How much true attention mass a selection by digest keeps, against the best possible selection.

Reads a trace of one sequence through a model: an .npz file with `q` [layers, query heads, tokens, head_dim]
and `k` [layers, KV heads, tokens, head_dim], both rotated, float32. For each layer and tile the true mass of
each past page is computed from all keys; a selection by digest and the best selection get the same budget and
the same protected pages. Nothing is generated: errors of one layer don't reach the next.

Columns, all in percent of what the best selection keeps, over all layers and tiles longer than the budget:
`kept` of the mass on past pages; `beyond` of what lies outside the protected pages; `worst layer` is the least
`kept` of a layer. "own" rows give `estimate` the exact log-sum-exp of the tile's own keys.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpager.config import DIGESTS
from kvpager.core.digest import Digest, make_digest
from kvpager.core.selection import select
from kvpager.ports import Room, TileQuery

Floats = npt.NDArray[np.float32]
EXAMPLE = "example: OPENBLAS_NUM_THREADS=1 python benchmarks/digest_quality.py trace.npz --kinds 2bit,minmax --json"


@dataclass
class Sums:
    """Mass kept by the digest's selection, by the best one, and by the protected pages, a layer each."""

    got: dict[int, float] = field(default_factory=dict)
    best: dict[int, float] = field(default_factory=dict)
    protected: dict[int, float] = field(default_factory=dict)

    def add(self, layer: int, got: float, best: float, protected: float) -> None:
        for sums, value in ((self.got, got), (self.best, best), (self.protected, protected)):
            sums[layer] = sums.get(layer, 0.0) + value

    def figures(self) -> dict[str, float]:
        got, best, protected = (sum(sums.values()) for sums in (self.got, self.best, self.protected))
        return {
            "kept": 100 * got / best,
            "beyond": 100 * (got - protected) / (best - protected),
            "worst_layer": 100 * min(self.got[layer] / self.best[layer] for layer in self.got),
        }


def true_mass(tile: TileQuery, keys: Floats, page_size: int, pages: int) -> tuple[Floats, Floats]:
    """True mass of the past pages [H, pages], summed over queries and group; the own keys' lse [H * G, T]."""
    heads, (query_heads, tokens, head_dim) = len(keys), tile.queries.shape
    seen = keys[:, : tile.start + tokens]
    scores = tile.queries.reshape(heads, -1, head_dim) * np.float32(tile.scale) @ seen.swapaxes(1, 2)
    by_token = scores.reshape(query_heads, tokens, -1)
    hidden = np.arange(seen.shape[1])[None] > tile.start + np.arange(tokens)[:, None]
    by_token[:, hidden] = -np.inf
    peak = by_token.max(axis=-1, keepdims=True)
    mass = np.exp(by_token - peak)
    past, own = mass[..., : pages * page_size], mass[..., pages * page_size :].sum(axis=-1)
    past = past / mass.sum(axis=-1, keepdims=True)
    by_page = past.reshape(heads, -1, pages, page_size).sum(axis=(1, 3), dtype=np.float32)
    return by_page, np.log(np.maximum(own, 1e-38)) + peak[..., 0]


def tiles(tokens: int, tile: int, single_every: int, least: int) -> Iterator[tuple[int, int]]:
    """Start and length of each tile past `least` tokens: full tiles, then a sample of tiles of one."""
    for start in range(-(-least // tile) * tile, tokens - tile + 1, tile):
        yield start, tile
    if single_every and tile > 1:
        for start in range(least, tokens, single_every):
            yield start, 1


def measure(path: Path, options: argparse.Namespace) -> dict[tuple[str, int, int], Sums]:
    with np.load(path) as trace:
        queries, keys = trace["q"].astype(np.float32), trace["k"].astype(np.float32)
    layers, heads, tokens, head_dim = keys.shape
    size = options.page_size
    found: dict[tuple[str, int, int], Sums] = {}
    for layer in range(0, layers, options.layer_step):
        began = time.perf_counter()
        rows = np.arange(tokens // size)
        blocks = keys[layer, :, : len(rows) * size].reshape(heads, len(rows), size, head_dim).swapaxes(0, 1)
        digests: dict[str, Digest] = {}
        for kind in options.kinds:
            digests[kind] = make_digest(kind, 1, heads, head_dim, size)
            digests[kind].grow(len(rows))
            digests[kind].build(0, rows, np.ascontiguousarray(blocks))
        for start, length in tiles(tokens, options.tile, options.single_every, min(options.budgets)):
            pages = start // size
            tile = TileQuery(queries[layer, :, start : start + length], start, head_dim**-0.5, None, None)
            truth, own = true_mass(tile, keys[layer], size, pages)
            for kind, digest in digests.items():
                for name, lse in ((kind, None), (f"{kind} own", own)):
                    estimate = digest.shares(0, rows[:pages], tile, rows[:pages] * size, lse).sum(axis=2).T
                    for budget in options.budgets:
                        if pages * size > budget:
                            sums = found.setdefault((name, budget, length), Sums())
                            sums.add(layer, *kept(truth, estimate, budget // size, options))
        print(f"{path.name}: layer {layer}, {time.perf_counter() - began:.1f} s", file=sys.stderr)
    return found


def kept(truth: Floats, estimate: Floats, pages: int, options: argparse.Namespace) -> tuple[float, float, float]:
    """True mass kept by the estimate's selection, by the best one, and by the protected pages."""
    room = Room(pages, options.sinks, options.recent)
    got = truth[select(estimate, room)[0]].sum()
    best = truth[select(truth, room)[0]].sum()
    protected = truth[:, : options.sinks].sum() + truth[:, truth.shape[1] - options.recent :].sum()
    return float(got), float(best), float(protected)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0], epilog=EXAMPLE)
    parser.add_argument("traces", nargs="+", type=Path, help=".npz files with q and k")
    parser.add_argument("--kinds", default=",".join(DIGESTS), help=f"of {', '.join(DIGESTS)} (default: all)")
    parser.add_argument("--budgets", default="480,240", help="past tokens a KV head (default: 480,240)")
    parser.add_argument("--tile", type=int, default=64, help="queries a tile (default: 64)")
    parser.add_argument("--single-every", type=int, default=37, help="sample a tile of one this often; 0 for none")
    parser.add_argument("--page-size", type=int, default=16, choices=(8, 16, 32))
    parser.add_argument("--sinks", type=int, default=1, help="first pages, always in (default: 1)")
    parser.add_argument("--recent", type=int, default=2, help="recent pages, always in (default: 2)")
    parser.add_argument("--layer-step", type=int, default=1, help="measure every so many layers (default: 1)")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    options = parser.parse_args(arguments)
    options.kinds = options.kinds.split(",")
    for kind in options.kinds:
        if kind not in DIGESTS:
            parser.error(f"--kinds: {kind!r} is not one of {', '.join(DIGESTS)}")
    options.budgets = [int(text) for text in options.budgets.split(",")]
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    report: dict[str, Any] = {}
    for path in options.traces:
        for (name, budget, length), sums in measure(path, options).items():
            report.setdefault(path.stem, {}).setdefault(name, {})[f"budget {budget}, tile {length}"] = sums.figures()
    if options.json:
        print(json.dumps(report))
        return
    for trace, kinds in report.items():
        print(f"\n{trace}: {'digest':<14} {'setting':<22} {'kept':>8} {'beyond':>8} {'worst layer':>12}")
        for name, settings in kinds.items():
            for setting, row in settings.items():
                figures = f"{row['kept']:8.3f} {row['beyond']:8.3f} {row['worst_layer']:12.3f}"
                print(f"{'':<{len(trace) + 1}} {name:<14} {setting:<22} {figures}")


if __name__ == "__main__":
    main()
