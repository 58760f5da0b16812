"""Swap in a memory-mapped file that nobody else sees and that never outlives the process."""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import sys
import tempfile
import weakref
from pathlib import Path

import numpy as np

from kvpager.errors import SwapError, SwapFull, is_disk_full
from kvpager.ports import Bytes, IntArray
from kvpager.swap.slots import SlabSwap

__all__ = ["FileSwap"]

_GAP_BYTES = 2**16  # a call costs more than reading so much too much
HINTS = 64


class FileSwap(SlabSwap):
    """Pages in a file that is mapped into memory slab by slab.

    A write is a copy into the system's page cache, which is written to disk behind it; a read is a copy out of
    it, from disk where it has to be. Every slab's space is reserved before it is mapped: a full disk is SwapFull,
    never a fault in the middle of a copy.

    `path` is a file that does not exist yet, or a folder, in which a file with a name of its own is made. The file
    is only for its owner (mode 0600) and loses its name as soon as it is open, so that nothing is left behind even
    when the process is killed. Where a file system does not allow that, the file is removed at `close`, when
    the swap is collected, or when the interpreter ends. Raises SwapError when the file can't be made.
    """

    def __init__(self, path: str | Path, page_bytes: int, limit_bytes: int) -> None:
        super().__init__(page_bytes, limit_bytes, granularity=mmap.ALLOCATIONGRANULARITY)
        self.path, self._fd = _create(path)
        self._maps: list[mmap.mmap] = []
        self._waits = resource.getrusage(resource.RUSAGE_SELF).ru_majflt  # for the disk, when it was last looked at
        self._hints = HINTS  # calls of `prefetch` that are still passed on
        named: str | None = str(self.path)
        with contextlib.suppress(OSError):
            os.unlink(self.path)
            named = None
        self._finalizer = weakref.finalize(self, _release, self._fd, named, os.getpid())

    def prefetch(self, slots: IntArray) -> None:
        """Ask the system to read these slots ahead (madvise WILLNEED, one call for slots that lie close together).

        While nothing has to come from disk, asking costs as much as reading: only where the process had to wait for
        it lately (a major page fault) are the next 64 calls passed on.
        """
        self._check_open()
        waits = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        if waits != self._waits:
            self._waits, self._hints = waits, HINTS
        if not self._hints or not hasattr(mmap, "MADV_WILLNEED"):
            return
        self._hints -= 1
        ordered = np.unique(slots)
        ordered = ordered[self._known(ordered)]
        if not len(ordered):
            return
        owner = self._slabs.owner(ordered)
        most = 1 + _GAP_BYTES // self.page_bytes
        last = np.append((np.diff(ordered) > most) | (np.diff(owner) != 0), True)
        first = np.append(True, last[:-1])
        places = ordered - self._slabs.starts[owner]
        begins = places[first] * self.page_bytes
        begins -= begins % mmap.PAGESIZE
        sizes = (places[last] + 1) * self.page_bytes - begins
        with contextlib.suppress(OSError):  # only a hint
            for index, begin, size in zip(owner[first].tolist(), begins.tolist(), sizes.tolist(), strict=True):
                self._maps[index].madvise(mmap.MADV_WILLNEED, begin, size)

    def close(self) -> None:
        """Unmap, close and remove the file; idempotent."""
        super().close()
        self._maps.clear()
        self._finalizer()

    def _add_slab(self, slots: int) -> Bytes:
        offset, length = self.nbytes, slots * self.page_bytes
        try:
            _reserve(self._fd, offset, length)
            mapped = mmap.mmap(self._fd, length, offset=offset)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, offset)
            message = f"swap file {self.path}: no room for {length} more bytes ({offset} bytes held): {error.strerror}"
            raise (SwapFull if is_disk_full(error) else SwapError)(message) from error
        self._maps.append(mapped)
        return np.frombuffer(mapped, np.uint8).reshape(slots, self.page_bytes)


def _create(place: str | Path) -> tuple[Path, int]:
    """Make the file, or one inside the folder; returns its path and descriptor."""
    path = Path(place)
    try:
        path = path.expanduser()
        if path.is_dir():
            fd, name = tempfile.mkstemp(prefix="kvpager-", suffix=".swap", dir=path)
            return Path(name), fd
        return path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise SwapError(f"swap file {path} exists already; give a path that does not exist, or a folder") from error
    except OSError as error:
        raise SwapError(f"swap file {path} can't be made: {error.strerror}") from error
    except (RuntimeError, ValueError) as error:  # an unknown user's home, a zero byte in the name
        raise SwapError(f"swap file {str(path)!r} can't be made: {error}") from error


def _reserve(fd: int, offset: int, length: int) -> None:
    """Extend the file to offset + length with space that is really there."""
    if sys.platform != "darwin":
        os.posix_fallocate(fd, offset, length)
        return
    zeros = bytes(min(length, 2**20))
    while length:
        written = os.pwrite(fd, zeros[:length], offset)
        offset, length = offset + written, length - written


def _release(fd: int, named: str | None, pid: int) -> None:
    """Close the file, and remove it if it still has its name. A forked child leaves its parent's file alone."""
    os.close(fd)
    if named is not None and os.getpid() == pid:
        with contextlib.suppress(OSError):
            os.unlink(named)
