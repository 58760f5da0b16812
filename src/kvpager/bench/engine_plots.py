"""The pictures of ``kvpager bench engine``: a run over time, and speed against the pool's size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvpager.bench.engine import PARTS, EngineRun
from kvpager.bench.plots import COLOURS, INK, dressed
from kvpager.pictures import figure_type

__all__ = ["draw_pools", "draw_run"]

MIB = 2**20


def draw_run(run: EngineRun, title: str, path: str | Path) -> None:
    """Batches and the pool over time, and each step's time in parts."""
    assert run.stats is not None, "a run has an end"
    steps = run.steps
    times = [step.at for step in steps]
    figure = figure_type()(figsize=(10, 8), layout="constrained")
    batch, pool, split = figure.subplots(3, 1, sharex=True)
    batch.step(times, [step.running for step in steps], where="post", color=COLOURS[0], lw=1.2, label="running")
    batch.step(times, [step.waiting for step in steps], where="post", color=COLOURS[2], lw=1.2, label="waiting")
    tokens = batch.twinx()
    tokens.step(times, [step.tokens for step in steps], where="post", color=COLOURS[1], lw=0.7, label="tokens a step")
    tokens.set_ylabel("tokens", fontsize=9)
    frames = max(1, run.stats.pager.frames)
    pool.step(times, [100 * step.frames_used / frames for step in steps], where="post", color=COLOURS[0], lw=1.2)
    pool.set_ylim(0, 105)
    layers = [[1e3 * step.seconds[part] for step in steps] for part in PARTS]
    split.stackplot(times, layers, labels=list(PARTS), colors=COLOURS[: len(PARTS)], step="post")
    dressed(batch, "", "requests")
    dressed(pool, "", "frames in use (%)")
    dressed(split, "seconds", "ms a step")
    handles = [*batch.get_legend_handles_labels()[0], *tokens.get_legend_handles_labels()[0]]
    batch.legend(handles=handles, frameon=False, fontsize=8, loc="upper right")
    split.legend(frameon=False, fontsize=8, loc="upper right", ncols=3)
    figure.suptitle(title, fontsize=10, color=INK)
    figure.savefig(path, dpi=110)


def draw_pools(rows: Sequence[Mapping[str, Any]], title: str, path: str | Path) -> None:
    """Output tokens a second, and pages recalled, against the bytes of the pool; `rows` as from compared."""
    rows = sorted(rows, key=lambda row: int(row["pool_bytes"]))
    sizes = [row["pool_bytes"] / MIB for row in rows]
    figure = figure_type()(figsize=(9, 4), layout="constrained")
    for axes, name, label in zip(
        figure.subplots(1, 2), ("output_tokens_per_s", "recalls"), ("output tokens/s", "pages recalled"), strict=True
    ):
        axes.plot(sizes, [row[name] for row in rows], marker="o", color=COLOURS[0], lw=1.4)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_ylim(bottom=0)
        dressed(axes, "pool (MiB)", label)
    figure.suptitle(title, fontsize=10, color=INK)
    figure.savefig(path, dpi=110)
