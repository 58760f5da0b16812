"""Pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvpager.pictures import figure_type

__all__ = ["EchoPoint", "draw_echo", "draw_page_map"]

MIB = 2**20
INK, GRID = "#1b1f24", "#d8dee4"
COLOURS = ("#0b6e4f", "#c8553d", "#5b6fb8", "#b8860b", "#7a4f9a", "#4d7c8a", "#8a5a44", "#777777")
MARKS = "osD^vP*X"


@dataclass(frozen=True)
class EchoPoint:
    """One run of the echo task: what it was, what it held in memory, and how it did (nats)."""

    series: str
    budget: int
    resident_bytes: int
    second_loss: float
    kl_mean: float


def draw_echo(
    points: Sequence[EchoPoint], full_second_loss: float, full_bytes: int, title: str, path: str | Path
) -> None:
    """Loss on the second reading against budget, and against resident bytes; the full cache is a line.

    Resident bytes are frames, digests and tables (promise 7).
    """
    figure = figure_type()(figsize=(10.5, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    series = list(dict.fromkeys(point.series for point in points))
    for index, name in enumerate(series):
        own = sorted((point for point in points if point.series == name), key=lambda point: point.budget)
        loss = [point.second_loss for point in own]
        style = {"color": COLOURS[index % len(COLOURS)], "marker": MARKS[index % len(MARKS)], "ms": 5, "lw": 1.6}
        left.plot([point.budget for point in own], loss, label=name, **style)
        right.plot([100 * point.resident_bytes / full_bytes for point in own], loss, **style)
    for axes in (left, right):
        axes.axhline(full_second_loss, color=INK, lw=1.2, ls="--", label="full cache" if axes is left else None)
        axes.grid(color=GRID, lw=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    left.set_ylim(bottom=0)
    right.set_xlim(left=0)
    left.set_xlabel("budget (tokens a head)")
    left.set_ylabel("loss on the second reading (nats a token)")
    right.set_xlabel(f"resident: frames, digests, tables (% of the full KV, {full_bytes / MIB:.0f} MiB)")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11, color=INK)
    figure.savefig(path, dpi=150)


def draw_page_map(
    mass: npt.NDArray[np.float64], labels: Sequence[tuple[int, str]], title: str, path: str | Path
) -> None:
    """A map of attention to recalled pages, float [layers, blocks]; `labels` names blocks.

    Colours are relative to the brightest cell outside the first block, and follow the square root.
    """
    figure = figure_type()(figsize=(11, 4.8), layout="constrained")
    axes = figure.subplots()
    most = float(mass[:, 1:].max(initial=0)) or 1.0
    light = np.sqrt(np.minimum(1, mass / most))
    image = axes.imshow(light, aspect="auto", cmap="magma", interpolation="nearest", vmin=0, vmax=1)
    bar = figure.colorbar(image, ax=axes, pad=0.01)
    bar.set_ticks([0, 0.5**0.5, 1], labels=["0", "half", "most"])
    for index, (block, name) in enumerate(labels):
        axes.annotate(
            name,
            xy=(block, -0.5),
            xytext=(0, 8 + 11 * (index % 3)),
            textcoords="offset points",
            fontsize=8,
            ha="center",
            va="bottom",
            color=INK,
            arrowprops={"arrowstyle": "-", "color": INK, "lw": 0.6, "shrinkA": 1, "shrinkB": 0},
            annotation_clip=False,
        )
    axes.set_xlabel("block of 16 tokens, from the beginning of the text to its end")
    axes.set_ylabel("layer")
    figure.suptitle(title, fontsize=11, color=INK)
    figure.savefig(path, dpi=150)
