"""The picture of ``kvpager bench kernel``. matplotlib is imported only when one is drawn, and needs no display."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvpager.bench.cases import Heads
from kvpager.bench.kernel import Result, Row
from kvpager.errors import InputError, MissingDependency

__all__ = ["check_target", "draw_kernels"]

INK, GRID = "#1b1f24", "#d8dee4"
COLOURS = ("#0b6e4f", "#5b6fb8", "#c8553d", "#777777", "#b8860b", "#7a4f9a")
MARKS = "osDv^P"
STYLES = ("-", "--", ":", "-.")


def check_target(path: str | Path) -> Path:
    """The path of a picture that can be drawn; raises InputError or MissingDependency before any work is done."""
    _figure()
    target = Path(path)
    if target.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise InputError(f"plot: {target} ends in {target.suffix or 'nothing'}; use .png, .svg or .pdf")
    if not target.parent.is_dir():
        raise InputError(f"plot: the folder {target.parent} does not exist")
    return target


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependency("pictures need matplotlib: pip install 'kvpager[demo]'") from error
    return Figure


def draw_kernels(result: Result, title: str, path: str | Path) -> None:
    """GB/s of keys and values against tokens, a panel for each shape of heads, one query a sequence.

    A kernel keeps its colour; batches differ by the line's style. The stream's rate is a line across.
    """
    rows = [row for row in result.rows if row.case.tile == 1] or result.rows
    shapes = list(dict.fromkeys(row.case.heads for row in rows))
    names = list(dict.fromkeys((row.kernel, row.dtype) for row in rows))
    batches = sorted({row.case.batch for row in rows})
    figure = _figure()(figsize=(1.2 + 3.6 * max(len(shapes), 1), 4.6), layout="constrained")
    panels = figure.subplots(1, max(len(shapes), 1), sharey=True, squeeze=False)[0]
    for axes, heads in zip(panels, shapes, strict=False):
        for index, (kernel, dtype) in enumerate(names):
            for batch, style in zip(batches, STYLES, strict=False):
                case = (kernel, dtype, heads, batch)
                mine = [row for row in rows if (row.kernel, row.dtype, row.case.heads, row.case.batch) == case]
                label = _label(kernel, dtype) + (f", batch {batch}" if len(batches) > 1 else "")
                _line(axes, mine, index, style, label)
        _dress(axes, heads, result.stream.gb_per_s)
    panels[0].set_ylabel("keys and values read (GB/s)")
    found = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10, color=INK)
    figure.savefig(path, dpi=110)


def _label(kernel: str, dtype: str) -> str:
    return kernel if kernel.startswith("sdpa") else f"{kernel}, {dtype}"


def _line(axes: Any, rows: list[Row], index: int, style: str, label: str) -> None:
    if rows:
        rows = sorted(rows, key=lambda row: row.case.tokens)
        look = {"color": COLOURS[index % len(COLOURS)], "marker": MARKS[index % len(MARKS)], "ls": style}
        axes.plot([row.case.tokens for row in rows], [row.gb_per_s for row in rows], label=label, ms=4, lw=1.4, **look)


def _dress(axes: Any, heads: Heads, stream: float) -> None:
    axes.axhline(stream, color=INK, lw=1.2, label="memory, read as a stream")
    axes.axhline(0.75 * stream, color=INK, lw=0.8, ls=":", label="three quarters of it")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_title(f"{heads.query_heads} query / {heads.kv_heads} KV heads of {heads.head_dim}", fontsize=9, color=INK)
    axes.set_xlabel("tokens")
    axes.grid(color=GRID, lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
