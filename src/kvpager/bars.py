"""A bar that shows how far a job is, for the command line and for the library."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["progress"]


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
