"""What commands print: results on standard output, everything else on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence

from kvpager.bars import progress

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
