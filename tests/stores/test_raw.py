"""A look at a database's bytes must not cost the process its locks: others would take themselves for the last one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvpager.stores import SqliteStore, raw
from tests.stores.made import made_block

OTHER = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('SELECT count(*) FROM blocks'); c.close()"


@pytest.mark.promise(4)
def test_a_look_at_the_header_leaves_the_log_to_who_has_the_database_open(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    log = tmp_path / "store.db-wal"
    first = SqliteStore(path, limit_bytes=2**24)
    first.put([made_block(1)])
    before = log.stat().st_ino
    second = SqliteStore(path, limit_bytes=2**24)  # which looks at the header before it connects
    assert second.contains([made_block(1).head.key]) == [True]
    second.close()
    assert raw.first_bytes(path, 16) == b"SQLite format 3\0"
    subprocess.run([sys.executable, "-c", OTHER, str(path)], check=True, timeout=60)
    assert log.stat().st_ino == before, "another process has deleted the log"
    first.put([made_block(2)])
    assert first.get([made_block(1).head.key])[0] is not None
    first.close()
    assert not raw._users
    assert not raw._kept


def test_a_file_that_nobody_has_open_is_read_and_closed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    assert raw.first_bytes(path, 100) == b"abc"
    with pytest.raises(FileNotFoundError):
        raw.first_bytes(tmp_path / "none", 1)
    assert not raw._kept
    assert not raw._users
