"""The user's cache directory, and folders made there at one stroke."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from kvpager.errors import ModelError

__all__ = ["cache_directory", "make_folder"]

UNFINISHED = ".unfinished-"


def cache_directory() -> Path:
    """Where kvpager keeps files that can be made again: ``$XDG_CACHE_HOME/kvpager``, or ``~/.cache/kvpager``."""
    base = os.environ.get("XDG_CACHE_HOME") or ""
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "kvpager"


def make_folder(target: Path, fill: Callable[[Path], None], is_whole: Callable[[Path], bool], room: int) -> Path:
    """Return `target`, filled; it is made only when it is not there or not whole.

    `fill` writes into an unfinished folder beside it, which gets its name when all is on the disk: a process that
    is killed leaves nothing that looks done. Processes that want the same folder wait for the first. `room` is
    the bytes that will be written. Raises ModelError when the place can't be written or lacks room.
    """
    from filelock import FileLock

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.parent / f"{target.name}.lock"):
            if not is_whole(target):
                _replace(target, fill, room)
    except OSError as error:
        raise ModelError(
            f"{target.parent} can't be used: {error.strerror or error}; set XDG_CACHE_HOME to a writable folder"
        ) from error
    return target


def _replace(target: Path, fill: Callable[[Path], None], room: int) -> None:
    # The lock is ours, so whatever is unfinished was left by a process that is gone.
    for left in target.parent.glob(f"{UNFINISHED}{target.name}-*"):
        shutil.rmtree(left, ignore_errors=True)
    shutil.rmtree(target, ignore_errors=True)
    free = shutil.disk_usage(target.parent).free
    if room > free:
        raise ModelError(f"{target.parent} needs {room / 1e9:.2f} GB of disk; {free / 1e9:.2f} GB are free")
    unfinished = Path(tempfile.mkdtemp(prefix=f"{UNFINISHED}{target.name}-", dir=target.parent))
    try:
        fill(unfinished)
        unfinished.chmod(0o755)
        for path in (*unfinished.iterdir(), unfinished):
            _to_disk(path)
        unfinished.rename(target)
        _to_disk(target.parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _to_disk(path: Path) -> None:
    with contextlib.suppress(PermissionError):  # Windows opens no folders
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
