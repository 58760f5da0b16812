"""What the worker counts between two looks of vLLM."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping

__all__ = ["COUNTERS", "GAUGES", "Counts"]

COUNTERS = {
    "loaded_blocks": "Blocks read from the store into vLLM's cache.",
    "loaded_bytes": "Bytes of these blocks.",
    "load_seconds": "Time that loading took.",
    "lost_blocks": "Blocks that were to be loaded and could not be: they were missing or damaged, and are computed.",
    "saved_blocks": "Blocks copied out and handed to the store.",
    "saved_bytes": "Bytes of these blocks.",
    "skipped_blocks": "Blocks that were not saved because the store had no room for them in time.",
    "stored_blocks": "Blocks written to the store for good.",
    "damaged_blocks": "Blocks of the store that did not match their checksums or keys.",
    "store_errors": "Failures of the store, of any kind.",
}
GAUGES = {
    "store_bytes": "Bytes that the store takes up on disk.",
    "store_blocks": "Blocks in the store.",
    "waiting_blocks": "Blocks that wait to be written.",
    "store_usable": "1 while the store can be used, 0 while it is left alone.",
}


class Counts:
    """Counters that grow and gauges that are set, by name; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: defaultdict[str, float] = defaultdict(float)
        self._totals: dict[str, int] = {}
        self._gauges: dict[str, int] = {}
        self._told: dict[str, int] = {}

    def add(self, name: str, amount: float) -> None:
        """Count."""
        with self._lock:
            self._counters[name] += amount

    def total(self, name: str, total: int) -> None:
        """Count what a total has grown by since it was told last."""
        grown = total - self._totals.get(name, 0)
        self._totals[name] = total
        if grown > 0:
            self.add(name, grown)

    def set(self, gauges: Mapping[str, int]) -> None:
        """Set gauges."""
        with self._lock:
            self._gauges.update(gauges)

    def take(self) -> dict[str, float]:
        """What was counted since the last call, and gauges that have changed; empty where nothing happened."""
        with self._lock:
            news = {name: value for name, value in self._gauges.items() if self._told.get(name) != value}
            self._told.update(news)
            taken: dict[str, float] = {**self._counters, **news}
            self._counters = defaultdict(float)
            return taken
