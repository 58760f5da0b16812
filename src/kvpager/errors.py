"""Every exception that kvpager raises on purpose.

::

    KVPagerError
    |-- ConfigError (ValueError)          a setting is out of its range; names the field
    |-- InputError (ValueError)           an argument has a wrong shape, dtype or value
    |   `-- RequestTooLarge               a request that could never be served, whatever else runs
    |-- QueueFull (RuntimeError)          as many requests wait already as the engine allows
    |-- EngineStopped (RuntimeError)      the engine was closed
    |-- SessionBusy (RuntimeError)        another request is using the session
    |-- SequenceError (ValueError)        a sequence that is closed, or another pager's
    |-- StepError (RuntimeError)          append, attend, commit or rollback out of order
    |-- ThreadError (RuntimeError)        a call from a thread that does not own the pager
    |-- PoolExhausted (RuntimeError)      frames are needed and nothing can be evicted
    |-- PageLost (RuntimeError)           a live page could not be read back from swap
    |-- SwapError (RuntimeError)          swap could not be opened or written
    |   `-- SwapFull                      swap has reached its limit, or the disk is full
    |-- StoreError (RuntimeError)         a store of blocks could not be opened, read or written
    |   |-- StoreDamaged                  bytes of a store that do not match their checksum or key
    |   |-- StoreForeign                  a file that another application made
    |   |-- StoreNewer                    written by a newer kvpager, and left as it is
    |   |-- StoreFull                     the disk is full
    |   |-- StoreTooLarge                 more than there may be of it, by the store's limit or its tenant's
    |   |-- StoreLocked                   another process holds it for too long
    |   `-- StoreUnavailable              it is lost, read-only, or its disk fails
    |-- CacheMismatch (RuntimeError)      a cache and an attention that don't belong together
    |-- SampleError (RuntimeError)        no token can be chosen from a row of logits
    |-- UnsupportedModel (ValueError)     an architecture that kvpager can't page
    |-- ModelError (RuntimeError)         a model could not be loaded
    |   |-- ModelNotFound                 nothing is there
    |   |-- ModelCorrupt                  a truncated or wrong file
    |   `-- ModelTooLarge                 it would not fit in memory
    |-- RemoteError (RuntimeError)        a server could not be reached, or answered with an error
    `-- MissingDependency (ImportError)   an extra is not installed; names the command

Each is raised before anything has changed, or after the change has been undone. A broken invariant
of kvpager itself is an ``AssertionError`` and never one of these.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable

__all__ = [
    "CacheMismatch",
    "ConfigError",
    "EngineStopped",
    "InputError",
    "KVPagerError",
    "MissingDependency",
    "ModelCorrupt",
    "ModelError",
    "ModelNotFound",
    "ModelTooLarge",
    "PageLost",
    "PoolExhausted",
    "QueueFull",
    "RemoteError",
    "RequestTooLarge",
    "SampleError",
    "SequenceError",
    "SessionBusy",
    "StepError",
    "SteppedDown",
    "StoreDamaged",
    "StoreError",
    "StoreForeign",
    "StoreFull",
    "StoreLocked",
    "StoreNewer",
    "StoreTooLarge",
    "StoreUnavailable",
    "SwapError",
    "SwapFull",
    "ThreadError",
    "UnsupportedModel",
    "is_disk_full",
]


def is_disk_full(error: OSError) -> bool:
    """Whether the system refused to write because there is no room: on the disk, in a quota, or in a file."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class KVPagerError(Exception):
    """The root of the tree: catch this to catch all that kvpager raises on purpose."""


class ConfigError(KVPagerError, ValueError):
    """A setting is out of its range; the message names the field, the value and what is allowed."""


class InputError(KVPagerError, ValueError):
    """An argument has a wrong shape, dtype or value; the message names it and what is allowed."""


class RequestTooLarge(InputError):
    """A request that could never be served, however little else runs; the message says its size and the limit."""


class QueueFull(KVPagerError, RuntimeError):
    """As many requests wait already as the engine allows: try again later."""


class EngineStopped(KVPagerError, RuntimeError):
    """The engine was closed."""


class SteppedDown(EngineStopped):
    """This process is not, or not any more, the one of a pair that serves: the other one is to be asked."""


class SessionBusy(KVPagerError, RuntimeError):
    """Another request is using the session, here or in another process: send this one when that has ended."""


class SequenceError(KVPagerError, ValueError):
    """The sequence is closed, or belongs to another pager."""


class StepError(KVPagerError, RuntimeError):
    """A call of a step came out of order (append, attend, commit, rollback)."""


class ThreadError(KVPagerError, RuntimeError):
    """The call came from a thread that does not own the pager."""


class PoolExhausted(KVPagerError, RuntimeError):
    """Frames are needed and nothing can be evicted; the message says how many, and how many there are."""


class PageLost(KVPagerError, RuntimeError):
    """A live page could not be read back from swap: it is missing or its checksum differs.

    slots      those of swap that hold no page or another one, where swap says which
    rows       the blocks whose pages those are, from the pager on
    sequences  the ids of all sequences that hold such a block; `Pager.open` doesn't find these blocks any more
    """

    def __init__(self, message: str, slots: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.slots = tuple(slots)
        self.rows: tuple[int, ...] = ()
        self.sequences: tuple[int, ...] = ()


class SwapError(KVPagerError, RuntimeError):
    """Swap could not be opened, written or read."""


class SwapFull(SwapError):
    """Swap has reached its limit, or its disk is full."""


class StoreError(KVPagerError, RuntimeError):
    """A store of blocks could not be opened, read or written.

    kind  one word for counters and logs, as in StoreStats.errors
    """

    kind = "io"


class StoreDamaged(StoreError):
    """Bytes of a store are cut off, changed, or another block's: they do not match their checksum or their key."""

    kind = "damaged"


class StoreForeign(StoreError):
    """The file was made by another application, and is left as it is."""

    kind = "foreign"


class StoreNewer(StoreError):
    """The store was written by a newer kvpager, and is left as it is; the message gives both versions."""

    kind = "newer"


class StoreFull(StoreError):
    """The disk is full, or the store can't keep to its limit just now; nothing was half written."""

    kind = "full"


class StoreTooLarge(StoreError):
    """What was to be stored is more than the store's limit or its tenant's allows, whatever makes way."""

    kind = "large"


class StoreLocked(StoreError):
    """Another process has held the store for longer than one waits for it."""

    kind = "locked"


class StoreUnavailable(StoreError):
    """The store can't be used as it is.

    kind  "lost" (deleted or replaced), "readonly", or "io" for any other failure of the file system
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class CacheMismatch(KVPagerError, RuntimeError):
    """A PagerCache was used with another attention, or kvpager's attention with another cache."""


class SampleError(KVPagerError, RuntimeError):
    """No token can be chosen: the logits hold NaN or infinity, or everything is ruled out; the message says which."""


class UnsupportedModel(KVPagerError, ValueError):
    """The architecture can't be paged; the message names it and says why."""


class ModelError(KVPagerError, RuntimeError):
    """A model could not be loaded."""


class ModelNotFound(ModelError):
    """There is no model at the given place."""


class ModelCorrupt(ModelError):
    """A model file is truncated, damaged or of another kind."""


class ModelTooLarge(ModelError):
    """The model would not fit in the memory that is free; the message gives both in GB."""


class RemoteError(KVPagerError, RuntimeError):
    """A server could not be reached, or answered with an error.

    kind         "connect", "timeout", "cut", "malformed", "server", or "http_" and the status
    status       the HTTP status, where there was one
    retry_after  seconds that the server asks to wait; None where it does not say
    """

    def __init__(self, kind: str, message: str, *, status: int | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.status = status
        self.retry_after = retry_after


class MissingDependency(KVPagerError, ImportError):
    """An optional package is not installed; the message gives the command that installs it."""
