"""What one tenant may not have is left out, and costs no other anything."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.stores.disk import block, opened, there
from tests.stores.fake import SETTLED, key_of

MINE, YOURS = b"mine".ljust(16, b"\0"), b"yours".ljust(16, b"\0")
MIB = 2**20


@pytest.mark.promise(4)
@pytest.mark.parametrize("settings", [{"tenant_limit_bytes": MIB}, {"limit_bytes": 8 * MIB}])
def test_a_record_larger_than_a_limit_is_left_out_and_all_else_is_stored(
    tmp_path: Path, settings: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    """Its clock stands still: were the store out of use for a while after it, nothing more would be stored."""
    store = opened(tmp_path / "store.db", **settings)
    assert store.save_record(key_of(100), MINE, b"a small one")
    assert store.put([block(1, tenant=MINE)]) == 1
    assert store.flush(SETTLED)
    with caplog.at_level(logging.WARNING, "kvpager.stores"):
        for number in range(100, 110):
            assert store.save_record(key_of(number), MINE, bytes(12 * MIB))
            assert store.put([block(number, tenant=YOURS)]) == 1
            assert store.save_record(key_of(1000 + number), YOURS, b"another's")
            assert store.flush(SETTLED)
    assert there(store, range(100, 110)) == list(range(100, 110))
    assert there(store, [1]) == [1]
    records = [store.load_record(key_of(number)) for number in range(100, 110)]
    assert records == [b"a small one", *[None] * 9]
    assert all(store.load_record(key_of(1000 + number)) == b"another's" for number in range(100, 110))
    stats = store.stats()
    assert (stats.state, stats.errors, stats.skipped, stats.dropped) == ("ok", {"large": 10}, 0, 0)
    assert sum("no room for a record" in line for line in caplog.messages) == 1
    store.close()
