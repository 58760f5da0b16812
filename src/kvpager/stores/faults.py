"""What SQLite says went wrong, in kvpager's words."""

from __future__ import annotations

import sqlite3

from kvpager.errors import StoreDamaged, StoreError, StoreFull, StoreLocked, StoreUnavailable

__all__ = ["explain", "is_damage"]

_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_SHORT = {sqlite3.SQLITE_IOERR_SHORT_READ}
_LOCKED = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}
_NO_ROOM = {sqlite3.SQLITE_IOERR_SHMSIZE}  # the index of the log lies in a file too
_READONLY = {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH}
_MISSING = {sqlite3.SQLITE_READONLY_DBMOVED, sqlite3.SQLITE_IOERR_FSTAT}


def is_damage(error: sqlite3.Error) -> bool:
    """Whether the database, or the part of it that was read, is malformed or cut off."""
    code = _code(error)
    return code & 0xFF in _DAMAGED or code in _SHORT


def explain(error: sqlite3.Error, path: str) -> StoreError:
    """The StoreError for an error of SQLite's; one that only a mistake in kvpager explains is raised as it is."""
    code = _code(error)
    if code < 0:
        raise error
    primary, text = code & 0xFF, f"store {path}: {error}"
    if is_damage(error):
        return StoreDamaged(text)
    if code in _MISSING:
        return StoreUnavailable("lost", text)
    if primary == sqlite3.SQLITE_FULL or code in _NO_ROOM:
        return StoreFull(text)
    if primary in _LOCKED:
        return StoreLocked(text)
    if primary in _READONLY:
        return StoreUnavailable("readonly", text)
    if primary in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN):
        return StoreUnavailable("io", text)
    raise error


def _code(error: sqlite3.Error) -> int:
    """SQLite's extended result code; -1 where the error is the module's own."""
    return int(getattr(error, "sqlite_errorcode", -1))
