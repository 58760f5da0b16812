"""Token scores in NumPy against the same in a Python loop: one query, 4,096 keys of 64 channels by default."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np

from kvpager.kernels.reference import token_scores
from kvpager.ports import FloatArray


def looped(query: list[float], keys: list[list[float]], scale: float) -> list[float]:
    """What token_scores computes, one number at a time."""
    scores = []
    for key in keys:
        total = 0.0
        for one, other in zip(query, key, strict=True):
            total += one * other
        scores.append(total * scale)
    return scores


def median_ms(call: Callable[[], object], runs: int) -> float:
    """The median of several runs, after one that is not counted."""
    call()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def main() -> None:
    """Print both times and their ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog="example: python benchmarks/token_scores.py --keys 4096 --channels 64 --json"
    )
    parser.add_argument("--keys", type=int, default=4096)
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    query: FloatArray = rng.standard_normal((1, 1, args.channels)).astype(np.float32)
    keys: FloatArray = rng.standard_normal((1, args.keys, args.channels)).astype(np.float32)
    scale = args.channels**-0.5
    plain_query, plain_keys = query[0, 0].tolist(), keys[0].tolist()
    fast = token_scores(query, keys)[0, 0]
    np.testing.assert_allclose(fast, looped(plain_query, plain_keys, scale), atol=1e-4)
    vectorised = median_ms(lambda: token_scores(query, keys), args.runs)
    loop = median_ms(lambda: looped(plain_query, plain_keys, scale), args.runs)
    figures = {"keys": args.keys, "channels": args.channels, "numpy_ms": vectorised, "loop_ms": loop}
    figures["ratio"] = loop / vectorised
    if args.json:
        print(json.dumps(figures))
    else:
        print(f"NumPy {vectorised:.3f} ms, Python loop {loop:.1f} ms: {figures['ratio']:.0f} times faster")


if __name__ == "__main__":
    main()
