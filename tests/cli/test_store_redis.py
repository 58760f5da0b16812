"""``kvpager store`` with a Redis: the same figures, checks and archives as with a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpager.bench.store import random_blocks
from kvpager.cli.main import main
from kvpager.stored import StoredBlock
from kvpager.stores import RedisSettings, RedisStore, SqliteStore
from tests.redis_rig import RedisServer

TENANT = b"A" * 16
BLOCKS, PAGES, PAGE_BYTES = 12, 6, 1024
SESSION = b"s" * 32


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A Redis with 8 blocks that are nobody's in particular and 4 with a session of a tenant."""
    blocks = random_blocks(BLOCKS, PAGES, PAGE_BYTES)
    mine = [StoredBlock(replace(block.head, tenant=TENANT), block.payload) for block in blocks[8:]]
    with RedisServer(tmp_path / "redis", password="s3cret") as server:
        with closing(RedisStore(server.url, RedisSettings(timeout_s=5.0))) as store:
            assert store.put([*blocks[:8], *mine]) == BLOCKS
            store.save_record(SESSION, TENANT, b"what a session was")
        yield server.url


def told(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> dict[str, Any]:
    assert main(["store", *map(str, arguments), "--json"]) == code
    out = capsys.readouterr().out
    assert "s3cret" not in out
    figures: dict[str, Any] = json.loads(out)
    return figures


def test_stats(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    figures = told(capsys, "stats", url)
    assert (figures["blocks"], figures["sessions"]) == (12, 1)
    assert figures["payload_bytes"] == BLOCKS * PAGES * PAGE_BYTES
    assert {(one["tenant"], one["blocks"], one["records"]) for one in figures["tenants"]} == {
        ("none", 8, 0),
        (TENANT.hex(), 4, 1),
    }
    assert main(["store", "stats", url]) == 0
    out = capsys.readouterr().out
    assert "12 blocks and 1 sessions" in out
    assert "s3cret" not in out


def test_verify_finds_what_is_damaged_and_forgets_it(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "verify", url)["damaged"] == []
    with closing(RedisStore(url, RedisSettings(timeout_s=5.0))) as store:
        key = random_blocks(BLOCKS, PAGES, PAGE_BYTES)[0].head.key
        store.client.run([("SETRANGE", store.names.block(key), 2000, b"???")])
        store.client.run([("SETRANGE", store.names.record(SESSION), 30, b"?")])
    figures = told(capsys, "verify", url, "--drop", code=1)
    assert [one["kind"] for one in figures["damaged"]] == ["block", "record"]
    assert told(capsys, "verify", url)["blocks"] == BLOCKS - 1
    assert told(capsys, "stats", url)["sessions"] == 0


def test_prune_by_tenant_use_and_size(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "prune", url, "--unused", "1")["forgotten"] == 0
    assert told(capsys, "prune", url, "--tenant", TENANT.hex())["forgotten"] == 5
    assert told(capsys, "prune", url, "--limit", "32KiB")["blocks"] == 4
    assert main(["store", "prune", url, "--limit", "32KiB"]) == 0
    assert "on disk" not in capsys.readouterr().out
    assert told(capsys, "prune", url, "--unused", "0")["blocks"] == 0


def test_blocks_and_sessions_go_from_redis_to_a_file_and_back(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive, path = tmp_path / "blocks.kvpa", tmp_path / "store.db"
    assert told(capsys, "export", url, archive)["blocks"] == BLOCKS
    assert told(capsys, "import", path, archive)["sessions"] == 1
    with closing(SqliteStore(path, limit_bytes=2**30)) as store:
        for block in random_blocks(BLOCKS, PAGES, PAGE_BYTES):
            (payload,) = store.get([block.head.key])
            assert payload is not None
            assert (payload == block.payload).all()
        assert store.load_record(SESSION) == b"what a session was"
    other = f"{url}?prefix=other"
    figures = told(capsys, "import", other, archive)
    assert (figures["blocks"], figures["sessions"], figures["left_out"]) == (BLOCKS, 1, 0)
    assert told(capsys, "import", other, archive)["left_out"] == BLOCKS + 1
    assert told(capsys, "export", url, archive, "--tenant", TENANT.hex())["blocks"] == 4


def test_a_redis_that_is_not_there_is_told_without_its_password(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "stats", "redis://:s3cret@127.0.0.1:1"]) != 0
    told = capsys.readouterr()
    assert "redis://127.0.0.1:1" in told.err
    assert "s3cret" not in told.out + told.err


@pytest.mark.parametrize("place", ["http://u:s3cret@h", "redis:/u:s3cret@h", "redis://u:1?s3cret@h"])
@pytest.mark.parametrize("task", [["stats"], ["import"]])
def test_what_is_no_store_is_refused_without_being_shown(
    place: str, task: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    archive = tmp_path / "blocks.kvpa"
    archive.touch()
    assert main(["store", *task, place, *([str(archive)] if task == ["import"] else [])]) == 2
    assert "s3cret" not in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [archive]  # no file of that name was made
