"""What commands print: results on standard output, everything else on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

__all__ = ["aligned", "emit", "emit_json", "progress", "say"]


def emit(text: str, end: str = "\n") -> None:
    """Write part of the result to standard output, at once."""
    sys.stdout.write(text + end)
    sys.stdout.flush()


def emit_json(figures: Mapping[str, object]) -> None:
    """Write one JSON object to standard output."""
    emit(json.dumps(figures, ensure_ascii=False, indent=2))


def say(message: str) -> None:
    """Write a line to standard error."""
    sys.stderr.write(message + "\n")
    sys.stderr.flush()


def aligned(rows: Sequence[tuple[str, ...]]) -> str:
    """A table for people: the first column to the left, all others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in pairs).rstrip()
        for pairs in (enumerate(zip(row, widths, strict=True)) for row in rows)
    )


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error for a job of `total` steps; the function it gives takes the steps done so far.

    Only a terminal sees it: a bar of rich where that is installed, else a line that rewrites itself. It goes
    away when all steps are done, so that what is printed after it does not run into it.
    """
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        try:
            yield lambda done: _rewrite(f"{title}: {done} of {total}" if done < total else "")
        finally:
            _rewrite("")
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)

        def advance(done: int) -> None:
            bar.update(task, completed=done)
            if done >= total:
                bar.stop()

        yield advance


def _rewrite(line: str) -> None:
    sys.stderr.write(f"\r\x1b[K{line}")
    sys.stderr.flush()
