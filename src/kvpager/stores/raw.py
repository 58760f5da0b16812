"""The first bytes of a database, read without SQLite.

POSIX takes all locks that a process has on a file away when the process closes any descriptor of it, and SQLite's
connections rest on such locks: without them another process takes itself for the last one, and deletes the log. So a
descriptor that was opened for a look stays open while this process has the database open, and is used again.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from pathlib import Path

__all__ = ["File", "begin", "end", "first_bytes"]

File = tuple[int, int]
"""A file, whatever its name: device and inode."""

# of the process, as its locks are
_lock = threading.Lock()
_users: Counter[File] = Counter()
_kept: dict[File, int] = {}


def begin(path: Path) -> File:
    """Connections to this file are about to be made; raises OSError. `end` follows when all of them are closed."""
    with _lock:
        status = os.stat(path)
        file = (status.st_dev, status.st_ino)
        _users[file] += 1
        return file


def end(file: File) -> None:
    """The connections that `begin` was called for are closed."""
    with _lock:
        _users[file] -= 1
        if not _users[file]:
            del _users[file]
            if (descriptor := _kept.pop(file, None)) is not None:
                os.close(descriptor)


def first_bytes(path: Path, nbytes: int) -> bytes:
    """The first bytes of a file, at most so many; raises OSError."""
    with _lock:
        status = os.stat(path)
        descriptor = _kept.get((status.st_dev, status.st_ino))
        if descriptor is not None:
            return os.pread(descriptor, nbytes, 0)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        status = os.fstat(descriptor)
        file = (status.st_dev, status.st_ino)
        try:
            return os.pread(descriptor, nbytes, 0)
        finally:
            if _users[file] and file not in _kept:
                _kept[file] = descriptor
            else:
                os.close(descriptor)
