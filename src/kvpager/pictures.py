"""What all pictures need: matplotlib, imported only when one is drawn (it needs no display), and a place to go to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvpager.errors import InputError, MissingDependency

__all__ = ["check_target", "figure_type"]


def check_target(path: str | Path) -> Path:
    """The path of a picture that can be drawn; raises InputError or MissingDependency before any work is done."""
    figure_type()
    target = Path(path)
    if target.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise InputError(f"plot: {target} ends in {target.suffix or 'nothing'}; use .png, .svg or .pdf")
    if not target.parent.is_dir():
        raise InputError(f"plot: the folder {target.parent} does not exist")
    return target


def figure_type() -> Any:
    """matplotlib's Figure; raises MissingDependency, with the command that installs it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependency("pictures need matplotlib: pip install 'kvpager[demo]'") from error
    return Figure
