"""What it costs to read a page back: ``python benchmarks/faults.py [--json] [--policies all] [--swap FOLDER ...]``.

A pool of 24 MiB (6,144 pages of 4 KiB: SmolLM2-135M, bfloat16) under 16 sequences of 752 tokens. Step after step,
layer after layer, so many pages are brought in at once as one batch wants; most of them are absent. What is timed is
the whole of it: victims chosen by the policy and let go of, pages found, read, checked, put into frames, and entered in
the books. Beside it, and not timed, every page brought in is given some attention, so that policies have something to
go by. Printed are microseconds a page read back: of the quickest tenth of the layers in the steps after a first one,
and the median, which is more where others use the machine. ``--cpu`` counts the processor's time instead, with one
thread, which others hardly change. Filling counts writing the keys and values and evicting what does not fit.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import numpy as np

from kvpager import KVShape, Pager, PagerConfig
from kvpager.config import POLICIES
from kvpager.core.scorer import Observed
from kvpager.kernels.choose import native_module, set_threads
from kvpager.ports import Masses

SHAPE = KVShape(layers=30, kv_heads=3, query_heads=9, head_dim=64, dtype="bfloat16")
SEQUENCES, TOKENS, FRAMES, STEPS = 16, 752, 6144, 3
BATCHES = (48, 256, 768, 2256)  # pages; 768 is a budget of 256 tokens in 16 sequences, 2,256 all that they hold


clock = time.perf_counter


def filled(policy: str, place: str) -> tuple[Pager, np.ndarray, float]:
    """A pager under pressure, the rows of its blocks [sequences, blocks], and the microseconds a page to fill it."""
    pager = Pager(SHAPE, PagerConfig(pool=FRAMES, policy=policy, swap=place, budget=None))
    rng = np.random.default_rng(0)
    sequences = [pager.open() for _ in range(SEQUENCES)]
    keys = rng.standard_normal((SHAPE.kv_heads, TOKENS, SHAPE.head_dim)).astype(np.float32)
    began = clock()
    for sequence in sequences:
        pager.begin([sequence], [TOKENS])
        for layer in range(SHAPE.layers):
            pager.append(sequence, layer, keys, keys)
        pager.commit()
    seconds = clock() - began
    blocks = TOKENS // pager.config.page_size
    rows = np.stack([sequence.rows[:blocks] for sequence in sequences])
    return pager, rows, seconds * 1e6 / (rows.size * SHAPE.layers * SHAPE.kv_heads)


def measure(policy: str, place: str, batch: int) -> dict[str, float]:
    """Microseconds a page read back, and how many of a batch were absent."""
    pager, rows, fill = filled(policy, place)
    residency = pager._state.residency
    rng = np.random.default_rng(1)
    pages = rows.size * SHAPE.kv_heads
    costs, absent = [], []
    for step in range(STEPS):
        residency.clock.tick += 1
        for layer in range(SHAPE.layers):
            residency.clock.layer = layer
            chosen = np.sort(rng.permutation(pages)[: min(batch, pages)])
            of, heads = rows.reshape(-1)[chosen // SHAPE.kv_heads], chosen % SHAPE.kv_heads
            flat = residency.table.flat(of, layer, heads)
            began = clock()
            _, came = residency.fault(flat)
            seconds = clock() - began
            if step and len(came):
                costs.append(seconds * 1e6 / len(came))
                absent.append(len(came))
            mass = rng.random(len(flat), np.float32) ** 4
            masses = Masses(mass, mass, mass, mass)
            given = Observed(of, heads, masses, [0, len(flat)], [1], [residency.clock.tick], distinct=True)
            residency.scorer.observe(layer, given)
    closing = clock()
    for sequence in list(pager._state.sequences.values()):
        pager.close(sequence)
    closing = (clock() - closing) * 1e3 / SEQUENCES
    pager.check()
    pager.shutdown()
    return {
        "us_a_page": float(np.quantile(costs, 0.1)),
        "us_a_page_median": float(np.median(costs)),
        "absent": float(np.mean(absent)),
        "fill_us_a_page": fill,
        "close_ms": closing,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--swap", nargs="*", default=["memory", "."], help="'memory', or a folder for the file")
    parser.add_argument("--policies", nargs="*", default=["attention"], help="names, or 'all'")
    parser.add_argument("--batches", nargs="*", type=int, default=list(BATCHES), help="pages wanted at once")
    parser.add_argument("--threads", type=int, help="threads of the kernels")
    parser.add_argument("--cpu", action="store_true", help="processor time with one thread")
    options = parser.parse_args()
    if options.cpu:
        global clock
        clock = time.thread_time
    set_threads(1 if options.cpu else options.threads)
    policies = list(POLICIES) if options.policies == ["all"] else options.policies
    found = []
    for place in options.swap:
        for policy in policies:
            for batch in options.batches:
                figures = measure(policy, place, batch)
                found.append({"swap": place, "policy": policy, "batch": batch, **figures})
                print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    native = native_module()
    if options.json:
        print(json.dumps({"threads": native.threads() if native else 0, "cases": found}, indent=1))
        return
    names = ("us_a_page", "us_a_page_median", "fill_us_a_page", "close_ms")
    print(f"| swap | policy | pages wanted | absent | {' | '.join(names)} |")
    print("|" + "---|" * (4 + len(names)))
    for one in found:
        figures = " | ".join(f"{one[name]:.2f}" for name in names)
        print(f"| {one['swap']} | {one['policy']} | {one['batch']} | {one['absent']:.0f} | {figures} |")


main()
