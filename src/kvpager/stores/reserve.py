"""Room on the disk that is kept back, so that a store on a full disk can still forget something."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from kvpager.errors import is_disk_full

__all__ = ["Reserve"]


class Reserve:
    """A file of no content beside a database, whose space is really there (posix_fallocate).

    Deleting from a database writes too: first to its log, then to the database. On a full disk that fails, and the
    disk stays full. So the file is given up when the disk is full, and taken again, before the next block is written,
    when there is room: until then nothing but deleting writes. It is large enough (see Shares) for the database to
    take up all of the log, after which the log's own room is free as well.

    A `guest` leaves its size to those who serve from the store, whose limit it does not know.
    """

    def __init__(self, path: Path, nbytes: int, guest: bool = False) -> None:
        self.path = path
        self.nbytes = nbytes
        self._guest = guest

    @property
    def held(self) -> bool:
        """Whether the space is taken, by this process or another one."""
        try:
            return os.lstat(self.path).st_size >= (1 if self._guest else self.nbytes)
        except OSError:
            return False

    def take(self) -> bool:
        """Take the space, where it is not taken already; False where the disk has no room for it. Raises OSError."""
        if self.held or self._guest:
            return self.held
        if self.path.is_symlink():
            self.give_up()
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                _allocate(fd, self.nbytes)
            finally:
                os.close(fd)
        except OSError as error:
            self.give_up()
            if not is_disk_full(error):
                raise
            return False
        return True

    def fit(self) -> None:
        """Give back what is more than `nbytes`, where it was taken for a larger limit."""
        with contextlib.suppress(OSError):
            if os.lstat(self.path).st_size > self.nbytes:
                os.truncate(self.path, self.nbytes)

    def give_up(self) -> None:
        """Give the space back to the disk."""
        with contextlib.suppress(OSError):
            os.unlink(self.path)


def _allocate(fd: int, nbytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, nbytes)
        return
    for offset in range(0, nbytes, 2**16):
        os.pwrite(fd, bytes(2**16), offset)
