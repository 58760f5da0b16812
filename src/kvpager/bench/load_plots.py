"""The picture of ``kvpager bench serve``: how latencies are spread, and what ran when."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvpager.bench.load import Load, Record
from kvpager.bench.plots import COLOURS, INK, dressed
from kvpager.pictures import figure_type

__all__ = ["draw_load"]

FAILED = "#c0392b"


def draw_load(load: Load, rows: Sequence[Mapping[str, Any]], title: str, path: str | Path) -> None:
    """Shares of requests up to each latency, a line for each kind, and a timeline of all requests.

    rows  the run's `requests` as in ``--json``
    """
    kinds = sorted({record.item.kind for record in load.records})
    well = [record for record in load.records if record.error is None]
    figure = figure_type()(figsize=(11, 7), layout="constrained")
    grid = figure.add_gridspec(2, 3, height_ratios=[1, 1.1])
    spread: list[tuple[str, Callable[[Record], list[float]]]] = [
        ("to the first text", lambda record: [] if record.first is None else [record.first]),
        ("between pieces", lambda record: record.gaps),
        ("to the end", lambda record: [record.whole]),
    ]
    for column, (name, values) in enumerate(spread):
        axes = figure.add_subplot(grid[0, column])
        for kind, colour in zip(kinds, _colours(kinds), strict=True):
            found = sorted(1e3 * value for record in well if record.item.kind == kind for value in values(record))
            if found:
                shares = [100 * (rank + 1) / len(found) for rank in range(len(found))]
                axes.plot(found, shares, drawstyle="steps-post", lw=1.4, color=colour, label=f"{kind} (n={len(found)})")
        axes.set_xlim(left=0)
        dressed(axes, f"{name} (ms)", "at most that (%)")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=8, loc="lower right")
    _timeline(figure.add_subplot(grid[1, :]), rows, dict(zip(kinds, _colours(kinds), strict=True)))
    figure.suptitle(title, fontsize=10, color=INK)
    figure.savefig(path, dpi=110)


def _colours(kinds: Sequence[str]) -> list[str]:
    return [COLOURS[index % len(COLOURS)] for index in range(len(kinds))]


def _timeline(axes: Any, rows: Sequence[Mapping[str, Any]], colours: Mapping[str, str]) -> None:
    """A bar for each request: pale until its first text, full after it, red where it failed."""
    for row in rows:
        first = row["first_s"] if row["first_s"] is not None else row["ended_s"]
        colour = FAILED if row["error"] else colours[row["kind"]]
        axes.barh(row["index"], first - row["sent_s"], left=row["sent_s"], height=0.8, color=colour, alpha=0.3)
        axes.barh(row["index"], row["ended_s"] - first, left=first, height=0.8, color=colour)
    axes.invert_yaxis()
    dressed(axes, "seconds (pale: until the first text; red: failed)", "request")
