"""What tests of the SQLite store share: blocks in a row, stores with a clock of their own, another process."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvpager.stored import StoredBlock
from kvpager.stores.sqlite import SqliteStore
from tests.stores.fake import Clock
from tests.stores.made import made_block

ROOT = Path(__file__).parents[2]
MIB = 2**20
_running: list[subprocess.Popen[str]] = []
MINE, YOURS = b"mine".ljust(16, b"\0"), b"yours".ljust(16, b"\0")


def store(path: Path, limit_bytes: int = 64 * MIB, **settings: Any) -> SqliteStore:
    return SqliteStore(path, limit_bytes=limit_bytes, **{"busy_ms": 20, "clock": Clock(), **settings})


def chain(length: int, seed: int = 0, pages: int = 16, page_bytes: int = 4096, **fields: Any) -> list[StoredBlock]:
    """Blocks each of which follows the one before; chains of other seeds share none of them."""
    first = 1000 * (seed + 1)
    made = [made_block(first + depth, pages, page_bytes, depth=depth, hits=0, **fields) for depth in range(length)]
    made[0] = replace(made[0], head=replace(made[0].head, parent=b""))
    return made


def keys(blocks: Sequence[StoredBlock]) -> list[bytes]:
    return [block.head.key for block in blocks]


def found(tier: SqliteStore, blocks: Sequence[StoredBlock]) -> list[bool]:
    """Which blocks are there, by their heads and pages; what is there is as it was put."""
    there = []
    for block, head, payload in zip(blocks, tier.heads(keys(blocks)), tier.get(keys(blocks)), strict=True):
        assert (head is None) == (payload is None)
        if head is not None and payload is not None:
            assert head.rescored(block.head.scores, block.head.hits) == block.head
            assert np.array_equal(payload, block.payload)
        there.append(head is not None)
    return there


def on_disk(path: Path) -> int:
    """Bytes of all files in the store's folder."""
    return sum(file.stat().st_size for file in path.parent.iterdir())


@contextmanager
def raw(path: Path) -> Iterator[sqlite3.Connection]:
    """The database as it is, past the store."""
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        yield connection
    finally:
        connection.close()


def other_process(
    script: str, *arguments: str, before: Sequence[str] = (), **environment: str
) -> subprocess.Popen[str]:
    """A Python process in which the tests' modules can be imported; it is ended with the test at the latest."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    process = subprocess.Popen(
        [*before, sys.executable, "-c", textwrap.dedent(script), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, **environment},
    )
    _running.append(process)
    return process


def close_processes() -> None:
    """End what still runs of the processes that were begun, and close their pipes."""
    while _running:
        process = _running.pop()
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


def said(process: subprocess.Popen[str], told: str = "") -> Any:
    """What it prints last, as JSON."""
    out, errors = process.communicate(told, timeout=60)
    assert process.returncode == 0, errors
    return json.loads(out.splitlines()[-1])


def goes_on(tier: SqliteStore, more: Sequence[StoredBlock] = ()) -> None:
    """Blocks can be stored and found, also after a restart."""
    more = more or NEW
    assert tier.put(more) == len(more)
    assert found(tier, more) == [True] * len(more)
    tier.close()
    assert found(tier, more) == [True] * len(more)
    assert tier.verify().damaged == ()
    tier.close()


BLOCKS = chain(40)
NEW = chain(8, 1)
