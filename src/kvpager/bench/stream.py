"""The yardstick: how fast the threads in use can read memory, in the same minute as what is compared to it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from statistics import median
from time import perf_counter

import numpy as np
import numpy.typing as npt

from kvpager.bench.machine import l3_bytes
from kvpager.kernels.choose import native_module

__all__ = ["Stream"]

LEAST_BYTES = 2**28
CACHES = 8  # times the largest cache, so that nothing of one pass is left for the next


class Stream:
    """Reads a buffer far larger than the caches, once each time that it is asked, and keeps every rate.

    The compiled reader is used where the extension is there, with the best instruction set of this processor whatever
    the kernels are told to use: a yardstick must not shrink with what it measures. Without the extension NumPy reads,
    which can be slower.
    """

    def __init__(self, threads: int, size: int | None = None) -> None:
        self.threads = threads
        self.rates: list[float] = []
        self._native = native_module()
        wanted = size or max(LEAST_BYTES, CACHES * (l3_bytes() or 0))
        self._buffer: npt.NDArray[np.uint8]
        self._buffer = np.zeros(wanted, np.uint8) if self._native is None else self._native.allocate(wanted)
        self._buffer[:] = 1  # untouched memory has no place yet, and reading it costs nothing

    @property
    def reader(self) -> str:
        """Who reads: "native" or "numpy"."""
        return "numpy" if self._native is None else "native"

    @property
    def gb_per_s(self) -> float:
        """The median rate of all passes so far, in 10^9 bytes a second."""
        return median(self.rates)

    def read(self, passes: int = 1) -> float:
        """Read the buffer so many times; returns the median rate of these passes in GB/s."""
        rates = [len(self._buffer) / self._seconds() / 1e9 for _ in range(passes)]
        self.rates += rates
        return median(rates)

    def _seconds(self) -> float:
        native = self._native
        if native is None:
            return self._read_by_numpy()
        used, best = native.isa(), native.isas()[-1]
        native.set_isa(best)
        try:
            return float(native.stream_read(self._buffer, 1))
        finally:
            native.set_isa(used)

    def _read_by_numpy(self) -> float:
        parts = np.array_split(self._buffer.view(np.int64), self.threads)
        with ThreadPoolExecutor(self.threads) as pool:
            list(pool.map(np.max, parts))  # the threads are there
            started = perf_counter()
            list(pool.map(np.max, parts))
            return perf_counter() - started
