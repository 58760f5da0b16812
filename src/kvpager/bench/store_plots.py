"""The picture of ``kvpager bench store``: microseconds a page back, and MB/s written and checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvpager.bench.plots import COLOURS, INK, dressed
from kvpager.bench.store import READERS
from kvpager.pictures import figure_type

__all__ = ["draw"]


def draw(figures: Mapping[str, Any], title: str, path: str | Path) -> None:
    """Draw one run; `figures` as in ``--json``."""
    figure = figure_type()(figsize=(10, 4), layout="constrained")
    pages, speeds = figure.subplots(1, 2)
    for colour, (reader, meaning) in zip(COLOURS, READERS.items(), strict=False):
        mine = [fault for fault in figures["faults"] if fault["reader"] == reader]
        batches = [fault["batch"] for fault in mine]
        pages.plot(batches, [fault["us_per_page"] for fault in mine], marker="o", color=colour, lw=1.4, label=meaning)
    pages.set_xscale("log", base=2)
    pages.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    pages.set_ylim(bottom=0)
    pages.legend(frameon=False, fontsize=8)
    bars = {f"{one['synchronous']}, {one['compression']}": one["mb_per_s"] for one in figures["writes"]}
    bars |= {"a plain file": figures["plain_file_mb_per_s"], "verified": figures["verify_mb_per_s"]}
    speeds.barh(list(bars)[::-1], list(bars.values())[::-1], color=COLOURS[0])
    dressed(pages, "pages wanted at once", "microseconds a page")
    dressed(speeds, "MB/s", "")
    figure.suptitle(title, fontsize=10, color=INK)
    figure.savefig(path, dpi=110)
