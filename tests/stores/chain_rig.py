"""What tests of the chain share: how tiers fail, and chains that look into what happened."""

import os
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from kvpager.errors import (
    StoreDamaged,
    StoreError,
    StoreForeign,
    StoreFull,
    StoreLocked,
    StoreNewer,
    StoreUnavailable,
)
from kvpager.ports import Bytes
from kvpager.stored import StoredBlock
from kvpager.stores.backlog import size_of
from kvpager.stores.chain import Chain
from tests.stores.fake import SETTLED, FakeTier, block, key_of

NO_SPACE = OSError(28, os.strerror(28))
FAILURES = [
    (StoreFull("full"), "full"),
    (StoreLocked("locked"), "locked"),
    (StoreDamaged("damaged"), "damaged"),
    (StoreUnavailable("lost", "lost"), "lost"),
    (StoreUnavailable("readonly", "read-only"), "readonly"),
    (StoreUnavailable("io", "failing"), "io"),
    (StoreError("another"), "io"),
    (OSError(5, os.strerror(5)), "io"),
    (NO_SPACE, "full"),
    (MemoryError(), "io"),
]
FOR_GOOD = [
    (StoreForeign("another application's"), "foreign"),
    (StoreNewer("newer"), "newer"),
    (ZeroDivisionError("unforeseen"), "io"),
]
READS = ("contains", "heads", "get", "load_record", "sizes")
WRITES = ("put", "update", "drop", "save_record", "drop_record", "erase")
LIMITS = {"failures": 3, "pause_s": 5.0, "longest_pause_s": 20.0, "slow_s": 1.0, "erase_s": 0.05, "close_s": 0.05}
MINE = b"mine".ljust(16, b"\0")
SIZE = size_of(block(0))
Make = Callable[..., Chain]


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def fail(tier: FakeTier, names: tuple[str, ...], error: Exception) -> None:
    tier.fails = dict.fromkeys(names, error)


def until(chain: Chain, happened: Callable[[], bool]) -> None:
    """Let the writer work until something has happened."""
    ends = time.monotonic() + SETTLED
    while not happened():
        assert time.monotonic() < ends
        chain.flush(0.001)


def found(chain: Chain, number: int) -> bool:
    """Whether a block is found, and right."""
    payload = chain.get([key_of(number)])[0]
    assert payload is None or np.array_equal(payload, block(number).payload)
    return payload is not None


def same(found: Sequence[Bytes | None], expected: Sequence[StoredBlock | None]) -> bool:
    assert len(found) == len(expected)
    for payload, held in zip(found, expected, strict=True):
        if (payload is None) != (held is None):
            return False
        if payload is not None and held is not None and not np.array_equal(payload, held.payload):
            return False
    return True
