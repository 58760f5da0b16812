"""Stores on a real disk, for tests of faults: opened, filled and looked into, also in a process of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpager.stored import StoredBlock
from kvpager.stores import Chain, Limits, open_store
from tests.stores import fake
from tests.stores.fake import SETTLED, Clock, key_of
from tests.stores.sqlite_rig import other_process, said

LIMIT = 2**30
RECORD = key_of(10**6)


def block(number: int, tenant: bytes = fake.NOBODY) -> StoredBlock:
    """A block of 64 KiB."""
    return fake.block(number, pages=16, page_bytes=4096, tenant=tenant)


def blocks(numbers: Iterable[int]) -> list[StoredBlock]:
    return [block(number) for number in numbers]


def opened(path: Path, clock: Clock | None = None, **settings: Any) -> Chain:
    """A store whose chain pauses for 5 s of its clock, which stands still unless a test says otherwise."""
    settings = {"limit_bytes": LIMIT, "busy_ms": 20, **settings}
    return open_store(path, limits=Limits(pause_s=5, close_s=2), clock=clock or Clock(), **settings)


def fill(path: Path, count: int) -> None:
    """Blocks 0 to count - 1 and a record, written and closed."""
    store = opened(path)
    assert store.put(blocks(range(count))) == count
    assert store.save_record(RECORD, fake.NOBODY, b"a record")
    assert store.flush(SETTLED)
    store.close()
    assert store.stats().stored == count


def there(store: Chain, numbers: Iterable[int]) -> list[int]:
    """Which of these blocks are found, by their heads and by their pages; what is found is right."""
    numbers = list(numbers)
    keys = [key_of(number) for number in numbers]
    found = []
    for number, payload in zip(numbers, store.get(keys), strict=True):
        if payload is not None:
            assert np.array_equal(payload, block(number).payload)
            found.append(number)
    return found


def goes_on(store: Chain, first: int = 1000) -> None:
    """Blocks can be stored, found and forgotten."""
    assert store.put(blocks([first, first + 1])) == 2
    assert store.flush(SETTLED)
    assert there(store, [first, first + 1]) == [first, first + 1]
    store.drop([key_of(first)])
    assert store.flush(SETTLED)
    assert there(store, [first, first + 1]) == [first + 1]


def flip(path: Path, content: bytes) -> None:
    """Change one bit of the one place in a file that has this content."""
    data = bytearray(path.read_bytes())
    assert data.count(content) == 1
    data[data.index(content) + len(content) // 2] ^= 4
    path.write_bytes(data)


def run(script: str, *arguments: str, before: Sequence[str] = ()) -> dict[str, Any]:
    """What a process says: one JSON object on its last line."""
    result: dict[str, Any] = said(other_process(script, *arguments, before=before))
    return result


def told(caplog: pytest.LogCaptureFixture, kind: str) -> int:
    """Lines of the log about a kind of fault."""
    return sum(f": {kind}" in record.getMessage() for record in caplog.records)


def quiet(caplog: pytest.LogCaptureFixture) -> bool:
    return not caplog.records


# ---- pages that are not what was written
