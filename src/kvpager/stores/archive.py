"""Archives: blocks and records in one file, to be carried from a store to another one.

::

    magic "KVPA", format version
    an entry each: what it is, key, tenant, bytes, XXH3 of the data, XXH3 of these fields; the data
    the end: an entry of its own kind whose bytes are the number of entries before it

Little-endian. A file that was cut off has no end, so it is told from a whole one.
"""

from __future__ import annotations

import errno
import os
import struct
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from kvpager.errors import (
    InputError,
    StoreDamaged,
    StoreError,
    StoreForeign,
    StoreFull,
    StoreNewer,
    StoreUnavailable,
    is_disk_full,
)
from kvpager.stored import KEY_BYTES, TENANT_BYTES
from kvpager.stores.packages import xxh3

__all__ = ["Entry", "export_blocks", "import_blocks"]

VERSION = 1
MAGIC = b"KVPA"
MOST_ENTRY = 2**31
_START = struct.Struct("<4sI")
_ENTRY = struct.Struct(f"<I{KEY_BYTES}s{TENANT_BYTES}sQQ")
_SUM = struct.Struct("<Q")
_BLOCK, _RECORD, _END = 1, 2, 3
_KINDS: dict[str, int] = {"block": _BLOCK, "record": _RECORD}
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


@dataclass(frozen=True)
class Entry:
    """One block or record of a store: its key (32 bytes), its tenant (16), and its bytes (see codec, records)."""

    kind: Literal["block", "record"]
    key: bytes
    tenant: bytes
    data: bytes


def export_blocks(path: Path, entries: Iterable[Entry]) -> int:
    """Write an archive, mode 0600, in the place of an older file; returns how many entries it has.

    It has a temporary name in the same folder until all of it is on disk. Raises StoreForeign where the older file
    is no archive, StoreFull, StoreUnavailable for any other failure of the file system, InputError for an entry that
    can't be, and what `entries` raises; then nothing is left behind, and an older file is as it was.
    """
    _require_archive(path)
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise _outside(error, path) from error
    partial = Path(name)
    try:
        with open(descriptor, "wb") as file:
            count = _write(file, entries)
            file.flush()
            os.fsync(descriptor)
        partial.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        raise _outside(error, path) from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
    return count


def _require_archive(path: Path) -> None:
    """Only an archive, or a file of no bytes, makes way for an archive: never a store, say."""
    if path.is_dir() or not path.exists():
        return  # what is written says it, or there is nothing
    if path.is_file():
        try:
            with path.open("rb") as file:
                start = file.read(len(MAGIC))
        except OSError as error:
            raise _outside(error, path) from error
        if start in (b"", MAGIC):
            return
    raise StoreForeign(f"{path} is there and no archive of kvpager's, and is left as it is")


def _write(file: IO[bytes], entries: Iterable[Entry]) -> int:
    file.write(_START.pack(MAGIC, VERSION))
    count = 0
    for entry in entries:
        if len(entry.key) != KEY_BYTES or len(entry.tenant) != TENANT_BYTES or len(entry.data) > MOST_ENTRY:
            raise InputError(
                f"an entry has {len(entry.key)} bytes of a key, {len(entry.tenant)} of a tenant and {len(entry.data)} "
                f"of data; {KEY_BYTES}, {TENANT_BYTES} and at most {MOST_ENTRY} are allowed"
            )
        file.write(_fields(_KINDS[entry.kind], entry.key, entry.tenant, len(entry.data), xxh3()(entry.data)))
        file.write(entry.data)
        count += 1
    file.write(_fields(_END, bytes(KEY_BYTES), bytes(TENANT_BYTES), count, 0))
    return count


def _fields(*values: bytes | int) -> bytes:
    fields = _ENTRY.pack(*values)
    return fields + _SUM.pack(xxh3()(fields))


def _sync_folder(folder: Path) -> None:
    """So that the new name outlives a loss of power too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def import_blocks(path: Path) -> Iterator[Entry]:
    """The entries of an archive in order, each checked before it is handed out.

    Raises StoreForeign where the file is no archive, StoreNewer for a later version, StoreDamaged where it is cut off
    or changed (what was handed out before is right all the same), and StoreUnavailable where it can't be read.
    """
    try:
        with path.open("rb") as file:
            yield from _read(file, os.fstat(file.fileno()).st_size, path)
    except OSError as error:
        raise _outside(error, path) from error


def _read(file: IO[bytes], left: int, path: Path) -> Iterator[Entry]:
    start = file.read(_START.size)
    if len(start) < _START.size or start[:4] != MAGIC:
        raise StoreForeign(f"{path} is no archive of kvpager's")
    if _START.unpack(start)[1] != VERSION:
        raise StoreNewer(f"{path} has format version {_START.unpack(start)[1]}, and this kvpager reads {VERSION}")
    left -= _START.size
    names = {code: name for name, code in _KINDS.items()}
    count = 0
    while True:
        kind, key, tenant, size, checksum = _read_fields(file, f"entry {count} of {path}")
        left -= _ENTRY.size + _SUM.size
        if kind == _END:
            if size != count or left:
                raise StoreDamaged(f"{path} ends after {count} entries and says {size}, or goes on behind its end")
            return
        if kind not in names or size > min(left, MOST_ENTRY):
            raise StoreDamaged(f"entry {count} of {path} is cut off or of an unknown kind")
        data = file.read(size)
        left -= size
        if len(data) != size or xxh3()(data) != checksum:
            raise StoreDamaged(f"entry {count} of {path} does not match its checksum")
        yield Entry("block" if kind == _BLOCK else "record", key, tenant, data)
        count += 1


def _read_fields(file: IO[bytes], what: str) -> tuple[int, bytes, bytes, int, int]:
    fields = file.read(_ENTRY.size + _SUM.size)
    if len(fields) < _ENTRY.size + _SUM.size:
        raise StoreDamaged(f"{what} is cut off")
    if _SUM.unpack_from(fields, _ENTRY.size)[0] != xxh3()(fields[: _ENTRY.size]):
        raise StoreDamaged(f"{what} does not match its checksum")
    values: tuple[int, bytes, bytes, int, int] = _ENTRY.unpack_from(fields)
    return values


def _outside(error: OSError, path: Path) -> StoreError:
    if is_disk_full(error):
        return StoreFull(f"{path} could not be written, the disk is full: {error.strerror}")
    kind = "readonly" if error.errno in _READ_ONLY else "io"
    return StoreUnavailable(kind, f"{path} could not be written or read: {error.strerror}")
