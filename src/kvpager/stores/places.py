"""Where a store lies: its database file and what SQLite and kvpager keep beside it."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from pathlib import Path
from urllib.parse import quote

from kvpager.stores import raw

__all__ = ["Places"]

_PARTS = ("", "-wal", "-shm")


class Places:
    """The paths of a store, and what the file system says about them.

    NAME             the database; NAME-wal and NAME-shm are SQLite's log and the index of the log
    NAME-journal     SQLite's too, for as long as the database is being made
    NAME.lock        claims
    NAME.reserve     room kept back on the disk
    NAME.damaged-N   a malformed database that was put aside
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(os.path.realpath(Path(path).expanduser()))
        self.log = self._beside("-wal")
        self.journal = self._beside("-journal")
        self.lock = self._beside(".lock")
        self.reserve = self._beside(".reserve")
        self._aside: list[Path] = []  # what was put aside, as it was last looked for

    def uri(self, query: str) -> str:
        """For SQLite."""
        return f"file:{quote(str(self.path))}?{query}"

    def mode(self, readonly: bool) -> str:
        """How to open it. What can't be written and has no log is read as it is: SQLite could not make an index."""
        if not readonly:
            return "mode=rw"
        return "mode=ro" if _size(self.log) > 0 else "immutable=1"

    @property
    def size(self) -> int:
        """Bytes of the database; -1 where there is none."""
        return _size(self.path)

    @property
    def changed(self) -> tuple[int, ...]:
        """Which file has the name, its bytes, and when they were last written: the same while nobody writes."""
        status = os.stat(self.path)
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

    def begins_with(self, nbytes: int) -> bytes:
        """The first bytes of the database, at most so many; raises OSError."""
        return raw.first_bytes(self.path, nbytes)

    @property
    def cut_off(self) -> bool:
        """Whether the database has fewer bytes than its header says. Another process that is just moving its log into
        it may make it seem so: worth asking where something was malformed.
        """
        try:
            header = self.begins_with(32)
        except OSError:
            return False
        size = int.from_bytes(header[16:18], "big")
        return self.size < (2**16 if size == 1 else size) * int.from_bytes(header[28:32], "big")

    @property
    def special(self) -> bool:
        """Whether what has the name is no file: a folder or a device, say."""
        return self.path.exists() and not self.path.is_file()

    @property
    def nbytes(self) -> int:
        """Bytes of all that belongs to the store, what was put aside included."""
        paths = [self._beside(part) for part in _PARTS]
        return sum(max(0, _size(path)) for path in [*paths, self.lock, self.reserve, *self._aside])

    @property
    def disk_bytes(self) -> int:
        """Bytes of the disk that it lies on, or will lie on."""
        for folder in self.path.parents:
            with contextlib.suppress(OSError):
                status = os.statvfs(folder)
                return status.f_blocks * status.f_frsize
        return 0

    @property
    def writable(self) -> bool:
        """Whether the file (or where there is none, the folder) may be written."""
        if not os.access(self.path.parent, os.W_OK | os.X_OK):
            return False
        return self.size < 0 or os.access(self.path, os.W_OK)

    @property
    def inode(self) -> tuple[int, int] | None:
        """Which file has the name now; None for none."""
        return _inode(self.path)

    @property
    def log_inode(self) -> tuple[int, int] | None:
        """Which file is the log now; None for none."""
        return _inode(self.log)

    def make_folder(self) -> None:
        """Make the folder with mode 0700 where it is missing; raises OSError."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._aside = self._look_aside()

    def make_file(self) -> bool:
        """Make the file where it is missing, and see to its mode, 0600; False where it can only be read.

        Raises OSError. SQLite gives the files that it makes beside it the same mode.
        """
        with contextlib.suppress(FileExistsError):
            if self.size < 0:
                os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
                return True
        if not self.writable:
            return False
        if os.stat(self.path).st_mode & 0o077:
            with contextlib.suppress(PermissionError):
                os.chmod(self.path, 0o600)
        return True

    def put_aside(self) -> None:
        """Give the database, with its log, another name; of those put aside before, none is kept. Raises OSError."""
        before = self._look_aside()
        number = 1 + max([0, *(int(path.name.rpartition("-")[2]) for path in before if path.name[-1].isdigit())])
        for part in _PARTS:
            with contextlib.suppress(FileNotFoundError):
                os.rename(self._beside(part), self._beside(f".damaged-{number}{part}"))
        for path in before:
            path.unlink(missing_ok=True)
        self._aside = self._look_aside()

    def forget_aside(self) -> None:
        """Remove what was put aside; raises OSError."""
        for path in self._aside:
            path.unlink(missing_ok=True)
        self._aside = []

    def forget_log(self) -> None:
        """Remove the log of a database that is there no more."""
        for part in _PARTS[1:]:
            with contextlib.suppress(OSError):
                self._beside(part).unlink()

    @property
    def has_aside(self) -> bool:
        """Whether there is something that was put aside."""
        return bool(self._aside)

    def explain(self, error: OSError) -> tuple[str, str]:
        """A kind and a message for StoreUnavailable."""
        if error.errno in (errno.EEXIST, errno.ENOTDIR):
            return "io", f"store {self.path} can't be made: a file stands where its folder should be"
        readonly = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
        return "readonly" if readonly else "io", f"store {self.path} can't be opened: {error.strerror}"

    def _look_aside(self) -> list[Path]:
        pattern = re.compile(re.escape(self.path.name) + r"\.damaged-\d+(-wal|-shm)?")
        try:
            names = os.listdir(self.path.parent)
        except OSError:
            return []
        return [self.path.parent / name for name in sorted(names) if pattern.fullmatch(name)]

    def _beside(self, ending: str) -> Path:
        return self.path.with_name(self.path.name + ending)


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino
