"""The picture of ``kvpager bench kernel``, and the look that all pictures of speed share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvpager.bench.cases import Heads
from kvpager.pictures import figure_type

__all__ = ["COLOURS", "INK", "draw_kernels", "dressed"]

INK, GRID = "#1b1f24", "#d8dee4"
COLOURS = ("#0b6e4f", "#5b6fb8", "#c8553d", "#777777", "#b8860b", "#7a4f9a")
MARKS = "osDv^P"
STYLES = ("-", "--", ":", "-.")


def draw_kernels(rows: Sequence[Mapping[str, Any]], title: str, path: str | Path) -> None:
    """The share of the memory's speed that kernels reach against tokens, a panel for each shape of heads.

    rows  as in ``--json`` (of several runs, too: each is set against the stream beside it), one of them at least;
          those with one query a sequence are drawn, or all where there are none

    A kernel keeps its colour; batches differ by the line's style.
    """
    rows = [row for row in rows if row["queries"] == 1] or rows
    shapes = list(dict.fromkeys(_heads(row) for row in rows))
    names = list(dict.fromkeys((row["kernel"], row["dtype"]) for row in rows))
    batches = sorted({row["batch"] for row in rows})
    figure = figure_type()(figsize=(1.2 + 3.6 * len(shapes), 4.8), layout="constrained")
    panels = figure.subplots(1, len(shapes), sharey=True, squeeze=False)[0]
    for axes, heads in zip(panels, shapes, strict=True):
        for index, (kernel, dtype) in enumerate(names):
            for batch, style in zip(batches, STYLES, strict=False):
                case = (kernel, dtype, heads, batch)
                mine = [row for row in rows if (row["kernel"], row["dtype"], _heads(row), row["batch"]) == case]
                label = _label(kernel, dtype) + (f", batch {batch}" if len(batches) > 1 else "")
                _line(axes, mine, index, style, label)
        _dress(axes, heads)
    panels[0].set_ylabel("keys and values read (% of the memory's speed)")
    found = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10, color=INK)
    figure.savefig(path, dpi=110)


def _heads(row: Mapping[str, Any]) -> Heads:
    return Heads(row["query_heads"], row["kv_heads"], row["head_dim"])


def _label(kernel: str, dtype: str) -> str:
    return kernel if kernel.startswith("sdpa") else f"{kernel}, {dtype}"


def _line(axes: Any, rows: Sequence[Mapping[str, Any]], index: int, style: str, label: str) -> None:
    if rows:
        rows = sorted(rows, key=lambda row: int(row["tokens"]))
        shares = [100 * row["stream_beside_fraction"] for row in rows]
        look = {"color": COLOURS[index % len(COLOURS)], "marker": MARKS[index % len(MARKS)], "ls": style}
        axes.plot([row["tokens"] for row in rows], shares, label=label, ms=4, lw=1.4, **look)


def _dress(axes: Any, heads: Heads) -> None:
    axes.axhline(100, color=INK, lw=1.2, label="memory, read as a stream")
    axes.axhline(75, color=INK, lw=0.8, ls=":", label="three quarters of it")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: "")
    axes.set_title(f"{heads.query_heads} query / {heads.kv_heads} KV heads of {heads.head_dim}", fontsize=9, color=INK)
    dressed(axes, "tokens", "")


def dressed(axes: Any, below: str, beside: str) -> None:
    """The look that all panels share, and what stands at their axes; "" leaves a label as it is."""
    if below:
        axes.set_xlabel(below, fontsize=9)
    if beside:
        axes.set_ylabel(beside, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(color=GRID, lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
