"""What ``kvpager demo`` shows on a terminal: columns, a map that lights up, and tables. Needs rich."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

__all__ = ["Scene", "Screen", "View", "map_text", "memory_table", "scores_table"]

MIB = 2**20
OTHER_LINES = 15  # of the screen, beside the map's own
COLD, GLOW = (43, 47, 60), (255, 176, 59)


@dataclass
class View:
    """What one column shows."""

    name: str
    caption: str
    memory: str
    read: int = 0
    answer: str = ""
    right: bool | None = None
    score: int = 0
    asked: int = 0


@dataclass
class Scene:
    """Everything on the screen at one moment."""

    tokens: int
    views: list[View]
    heat: npt.NDArray[np.float32]
    question: str = ""
    number: int = 0
    questions: int = 0
    before: str = ""
    words: str = ""
    after: str = ""
    block: int | None = None
    notes: list[str] = field(default_factory=list)


class Screen:
    """A live picture of the demo. Use it as a context manager, change `scene`, call `show`."""

    def __init__(self, scene: Scene, console: Console | None = None) -> None:
        self.scene = scene
        self.console = console or Console()
        self._live = Live(self.render(), console=self.console, auto_refresh=False, transient=False)

    def __enter__(self) -> Screen:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def show(self) -> None:
        """Draw the scene as it is now."""
        self._live.update(self.render(), refresh=True)

    def render(self) -> RenderableType:
        """The picture."""
        scene = self.scene
        columns = Table.grid(expand=True, padding=(0, 1))
        for _ in scene.views:
            columns.add_column(ratio=1)
        columns.add_row(*(_panel(view, scene) for view in scene.views))
        return Group(columns, _map_panel(scene, self.console.width, self.console.height))


def _panel(view: View, scene: Scene) -> Panel:
    if view.read < scene.tokens:
        line: RenderableType = Group(
            Text(f"reading {view.read} of {scene.tokens} tokens", style="dim"),
            ProgressBar(total=scene.tokens, completed=view.read, complete_style="rgb(255,176,59)"),
        )
    else:
        text = Text("... is", style="dim")
        style = {True: "bold green", False: "bold red", None: "bold yellow"}[view.right]
        text.append(view.answer.rstrip("\n") or " ", style=style)
        text.append({True: "  right", False: "  wrong", None: ""}[view.right], style=style)
        score = Text(f"{view.score} of {view.asked} right" if view.asked else "", style="dim")
        line = Group(text, score)
    title = Text(view.name, style="bold")
    body = Group(Text(view.caption, style="dim"), Text(view.memory), Text(""), line)
    return Panel(body, title=title, border_style="rgb(90,98,120)", padding=(0, 1), height=9)


def _map_panel(scene: Scene, width: int, height: int) -> Panel:
    columns = max(20, min(scene.heat.shape[1], width - 4))
    parts: list[RenderableType] = [map_text(scene.heat, columns, max(3, height - OTHER_LINES))]
    end = Text("first block", style="dim")
    end.append(" " * max(1, columns - len("first block") - len("last block")))
    end.append("last block")
    parts.append(end)
    if scene.question:
        asked = Text(f"{scene.number} of {scene.questions}  ", style="dim")
        asked.append(f"“{scene.question} ...”", style="bold")
        parts.append(asked)
    words = Text("came back: ", style="dim", no_wrap=True, overflow="ellipsis")
    if scene.block is not None:
        words.append(f"block {scene.block}  ", style="dim")
        words.append(scene.before, style="dim")
        words.append(f"[{scene.words}]", style="bold rgb(255,176,59)")
        words.append(scene.after, style="dim")
    parts.append(words)
    parts += [Text(note) for note in scene.notes]
    return Panel(
        Group(*parts),
        title=Text("kvpager: pages called back (across: blocks, down: layers)", style="bold"),
        border_style="rgb(90,98,120)",
        padding=(0, 1),
    )


def map_text(heat: npt.NDArray[np.float32], columns: int, lines: int = 1000) -> Text:
    """The map [layers, blocks] of values 0..1 as text of at most that many columns and lines.

    A line shows two rows of cells; where there is less room than layers or blocks, neighbours share a cell.
    """
    cells = _pooled(_pooled(heat, columns, axis=1), 2 * lines, axis=0)
    columns = cells.shape[1]
    if len(cells) % 2:
        cells = np.vstack([cells, np.zeros((1, columns), np.float32)])
    text = Text(no_wrap=True)
    for top in range(0, len(cells), 2):
        pairs = [(_colour(upper), _colour(lower)) for upper, lower in zip(cells[top], cells[top + 1], strict=True)]
        for (upper, lower), run in groupby(pairs):  # few changes of colour keep slow terminals in step
            text.append("▀" * len(list(run)), style=f"{upper} on {lower}")
        if top + 2 < len(cells):
            text.append("\n")
    return text


def _pooled(heat: npt.NDArray[np.float32], most: int, axis: int) -> npt.NDArray[np.float32]:
    """The same with at most `most` entries along an axis: the largest of neighbours."""
    size = heat.shape[axis]
    edges = np.linspace(0, size, min(most, size) + 1).astype(int)
    return np.maximum.reduceat(heat, edges[:-1], axis=axis)


def _colour(value: Any) -> str:
    share = round(15 * float(min(1.0, max(0.0, value)))) / 15
    red, green, blue = (round(cold + (glow - cold) * share) for cold, glow in zip(COLD, GLOW, strict=True))
    return f"rgb({red},{green},{blue})"


def scores_table(names: Sequence[str], rows: Sequence[tuple[str, str, Sequence[tuple[str, bool]]]]) -> Table:
    """Questions down, columns across: what each wrote, and the sums."""
    table = Table(title="Eight codes and places" if len(rows) == 8 else f"{len(rows)} codes and places")
    table.title_style = "bold"
    table.add_column("sentence")
    table.add_column("code", justify="right")
    for name in names:
        table.add_column(name, justify="right")
    for sentence, code, answers in rows:
        cells = [Text(text, style="green" if right else "red") for text, right in answers]
        table.add_row(f"{sentence} ...", code, *cells)
    table.add_section()
    sums = [sum(row[2][index][1] for row in rows) for index in range(len(names))]
    table.add_row("right", "", *(Text(f"{total} of {len(rows)}", style="bold") for total in sums))
    return table


def memory_table(rows: Sequence[tuple[str, dict[str, int]]]) -> Table:
    """Memory of each column, told whole."""
    full = rows[0][1]["resident_bytes"]
    table = Table(title="Memory for keys and values, MiB", title_style="bold")
    table.add_column("")
    for head in ("frames", "digests", "tables", "resident", "of full", "swap", "peak of process"):
        table.add_column(head, justify="right")
    for name, memory in rows:
        sizes = [memory[key] for key in ("pool_bytes", "digest_bytes", "table_bytes", "resident_bytes")]
        table.add_row(
            name,
            *(f"{size / MIB:.1f}" for size in sizes),
            f"{memory['resident_bytes'] / full:.0%}",
            f"{memory['swap_bytes'] / MIB:.1f}",
            f"{memory['peak_rss_bytes'] / MIB:.0f}",
        )
    return table
