"""Locks beside a database that end with the process that holds them, without any clock."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import struct
from pathlib import Path

from kvpager.errors import StoreForeign

__all__ = ["MENDING", "Claims"]

MARK = b"kvpager store\n"
MENDING = b""
"""The claim of whoever puts a damaged database aside."""

_FLOCK = struct.Struct("@hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, process
_TAKEN = (errno.EAGAIN, errno.EACCES)


class Claims:
    """Bytes of a file that are locked, one for each key (62 bits of its SHA-256 say which).

    Linux locks them for the open file (F_OFD_SETLK), so two stores in one process keep each other out as two processes
    do. Elsewhere the locks are the process's (lockf): there, one process should open a store only once.

    The file says what it is: where it lies beside a database that can't be read any more, that one was a store.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None
        self._held: set[bytes] = set()

    @property
    def marked(self) -> bool:
        """Whether a store was made here once."""
        try:
            return self.path.read_bytes() == MARK
        except OSError:
            return False

    def open(self) -> None:
        """Open the file, made where it is missing; claims in one that is gone are made again in it.

        Raises OSError, and StoreForeign where the file is another application's.
        """
        if self._fd is not None and self._still_there(self._fd):
            return
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        start = os.pread(fd, len(MARK) + 1, 0)
        if not MARK.startswith(start):
            os.close(fd)
            raise StoreForeign(f"{self.path} is another application's file, and is left as it is")
        self._fd = fd
        if start != MARK:
            os.pwrite(fd, MARK, 0)
        self._held = {key for key in self._held if _lock(fd, key, fcntl.F_WRLCK)}

    def _still_there(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), os.stat(self.path))
        except OSError:
            return False

    def take(self, key: bytes) -> bool:
        """Claim a key; False where it is claimed already, here or elsewhere. Raises OSError."""
        if self._fd is None:
            self.open()
        if key in self._held or self._fd is None or not _lock(self._fd, key, fcntl.F_WRLCK):
            return False
        self._held.add(key)
        return True

    def give_back(self, key: bytes) -> None:
        """End a claim; nothing happens where it was not claimed here."""
        if key in self._held and self._fd is not None:
            self._held.discard(key)
            _lock(self._fd, key, fcntl.F_UNLCK)

    def close(self) -> None:
        """End all claims."""
        self._held.clear()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _lock(fd: int, key: bytes, kind: int) -> bool:
    """Lock or unlock one byte; False where another one has it locked."""
    start = 0 if key == MENDING else 1 + (int.from_bytes(hashlib.sha256(key).digest()[:8], "big") >> 2)
    command = getattr(fcntl, "F_OFD_SETLK", None)
    try:
        if command is not None:
            fcntl.fcntl(fd, command, _FLOCK.pack(kind, os.SEEK_SET, start, 1, 0))
        else:
            free = kind == fcntl.F_UNLCK
            fcntl.lockf(fd, fcntl.LOCK_UN if free else fcntl.LOCK_EX | fcntl.LOCK_NB, 1, start)
    except OSError as error:
        if error.errno in _TAKEN:
            return False
        raise
    return True
