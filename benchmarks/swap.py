"""How long a page takes into swap and back: ``python benchmarks/swap.py [FOLDER]`` (default: the current one).

Prints microseconds a page, best of five runs, checksum included.
"""

import sys
import time
import zlib
from collections.abc import Callable

import numpy as np

from kvpager.swap import open_swap

PAGE_BYTES, PAGES, BATCH = 4096, 4096, 64


def best(run: Callable[[], object], runs: int = 5) -> float:
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times) / PAGES * 1e6


def measure(place: str) -> list[float]:
    swap = open_swap(place, PAGE_BYTES, 2**30)
    rng = np.random.default_rng(0)
    pages = rng.integers(0, 256, (PAGES, PAGE_BYTES), dtype=np.uint8)
    batches = np.split(pages, PAGES // BATCH)
    held: list[np.ndarray] = []

    def write() -> None:
        held[:] = [swap.write(batch) for batch in batches]

    def rewrite() -> None:
        swap.free(np.concatenate(held))
        write()

    first = best(write, runs=1)
    again = best(rewrite)
    scattered = np.split(rng.permutation(np.concatenate(held)), PAGES // BATCH)
    read = best(lambda: [swap.read(batch) for batch in scattered])
    ahead = best(lambda: [swap.prefetch(batch) for batch in scattered])
    swap.close()
    return [first, again, read, ahead]


def main() -> None:
    if sys.argv[1:] in (["-h"], ["--help"]):
        sys.exit(__doc__)
    folder = sys.argv[1] if len(sys.argv) > 1 else "."
    print("| place | first write | write again | scattered read | prefetch |")
    print("|---|---|---|---|---|")
    for name, place in (("memory", "memory"), ("file", folder)):
        print(f"| {name} | " + " | ".join(f"{figure:.2f}" for figure in measure(place)) + " |")
    page = np.random.default_rng(0).integers(0, 256, PAGE_BYTES, dtype=np.uint8).tobytes()
    print(f"\nchecksum alone: {best(lambda: [zlib.crc32(page) for _ in range(PAGES)]):.2f}")


main()
