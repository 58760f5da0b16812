"""``kvpager store``: what it tells of a store, what it finds damaged, what it carries elsewhere."""

from __future__ import annotations

import argparse
import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpager.bench.store import random_blocks
from kvpager.build import PagerOptions
from kvpager.cli.main import build_parser, main
from kvpager.cli.store_options import store_options
from kvpager.errors import ConfigError
from kvpager.stored import StoredBlock
from kvpager.stores import SqliteStore

TENANT = b"A" * 16
BLOCKS, PAGES, PAGE_BYTES = 12, 6, 1024
SESSION = b"s" * 32


def of(block: StoredBlock, tenant: bytes) -> StoredBlock:
    return StoredBlock(replace(block.head, tenant=tenant), block.payload)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store of 8 blocks that are nobody's in particular and 4 with a session of a tenant."""
    blocks = random_blocks(BLOCKS, PAGES, PAGE_BYTES)
    store = SqliteStore(tmp_path / "store.db", limit_bytes=2**30)
    store.put(blocks[:8])
    store.put([of(block, TENANT) for block in blocks[8:]])
    store.save_record(SESSION, TENANT, b"what a session was")
    store.close()
    return tmp_path / "store.db"


def told(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> dict[str, Any]:
    assert main(["store", *map(str, arguments), "--json"]) == code
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)
    return figures


def test_stats_tell_blocks_sessions_tenants_and_the_disk(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = told(capsys, "stats", path)
    assert (figures["blocks"], figures["sessions"]) == (12, 1)
    assert figures["payload_bytes"] == BLOCKS * PAGES * PAGE_BYTES
    assert figures["bytes"] == sum(figures["files"].values())
    assert {"store.db", "store.db.lock", "store.db.reserve"} <= set(figures["files"])
    assert {(one["tenant"], one["blocks"], one["records"]) for one in figures["tenants"]} == {
        ("none", 8, 0),
        (TENANT.hex(), 4, 1),
    }
    assert main(["store", "stats", str(path)]) == 0
    said = capsys.readouterr().out
    assert figures["reserve_bytes"] == figures["files"]["store.db.reserve"] > 2**20
    assert figures["overhead"] == (figures["bytes"] - figures["reserve_bytes"]) / figures["payload_bytes"] - 1
    assert "20.0 MiB of them kept free for a full disk (the reserve)" in said
    assert "12 blocks and 1 sessions" in said
    assert TENANT.hex() in said


def test_looking_at_a_store_changes_nothing(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = path.read_bytes()
    for task in ("stats", "verify"):
        told(capsys, task, path)
    assert path.read_bytes() == before


def test_a_whole_store_is_verified(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = told(capsys, "verify", path)
    assert (figures["blocks"], figures["pages"], figures["sessions"], figures["damaged"]) == (12, 72, 1, [])
    assert main(["store", "verify", str(path)]) == 0
    assert "nothing is damaged" in capsys.readouterr().out


def spoil(path: Path, needle: bytes) -> None:
    """Flip a bit of the first place in the file that holds these bytes."""
    content = path.read_bytes()
    place = content.index(needle)
    with path.open("r+b") as file:
        file.seek(place)
        file.write(bytes([content[place] ^ 1]))


@pytest.mark.promise(4)
def test_verify_finds_every_damaged_page_and_ends_with_1(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    block = random_blocks(BLOCKS, PAGES, PAGE_BYTES)[5]
    spoil(path, block.payload[1].tobytes()[:64])
    spoil(path, block.payload[4].tobytes()[:64])
    spoil(path, b"what a session was")
    damaged = told(capsys, "verify", path, code=1)["damaged"]
    assert [(one["kind"], one["key"], one["page"]) for one in damaged] == [
        ("page", block.head.key.hex(), 1),
        ("page", block.head.key.hex(), 4),
        ("record", SESSION.hex(), None),
    ]
    assert main(["store", "verify", str(path), "--drop"]) == 1
    said = capsys.readouterr().out
    assert f"page 4 of block {block.head.key[:6].hex()}" in said
    assert "forgotten: 1 blocks and 1 sessions" in said
    assert told(capsys, "verify", path)["blocks"] == 11


def test_verify_drops_what_has_no_key_to_be_asked_for_by(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("UPDATE blocks SET key = CAST(key AS TEXT) WHERE id = 2")
        connection.execute("UPDATE blocks SET hits = 'often' WHERE id = 3")
        connection.execute("UPDATE records SET key = 'a session'")
        connection.execute("UPDATE counters SET value = 'many'")
        connection.execute("UPDATE tenants SET bytes = 1e300, blocks = 'x'")
    assert told(capsys, "stats", path)["sessions"] == 1
    assert told(capsys, "export", path, path.with_name("archive"))["blocks"] == 10
    damaged = told(capsys, "verify", path, "--drop", code=1)["damaged"]
    assert [(one["kind"], one["row"]) for one in damaged] == [("block", 2), ("block", 3), ("record", 1)]
    assert bytes.fromhex(damaged[2]["key"]) == b"a session"
    figures = told(capsys, "verify", path)
    assert (figures["blocks"], figures["sessions"], figures["damaged"]) == (10, 0, [])
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM payloads").fetchone() == (10,)


@pytest.mark.promise(4)
@pytest.mark.parametrize("change", ["DROP TABLE records", "PRAGMA user_version = -1"])
@pytest.mark.parametrize("task", ["stats", "verify", "prune --unused 0", "export archive"])
def test_other_tables_are_told_and_left_as_they_are(
    path: Path, capsys: pytest.CaptureFixture[str], change: str, task: str
) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(change)
        connection.commit()
    before = path.read_bytes()
    name, *more = task.split()
    assert main(["store", name, str(path), *more]) == 1
    assert "its tables are not as kvpager makes them" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_verify_of_what_is_no_database_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "store.db"
    path.write_bytes(b"no database at all" * 1000)
    assert main(["store", "verify", str(path)]) == 1
    assert capsys.readouterr().err.startswith("kvpager: ")
    assert path.read_bytes() == b"no database at all" * 1000


def test_another_applications_database_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE notes (text)")
    connection.commit()
    connection.close()
    before = path.read_bytes()
    assert main(["store", "prune", str(path), "--unused", "0"]) == 1
    assert "other.db" in capsys.readouterr().err
    assert path.read_bytes() == before


@pytest.mark.parametrize("task", ["stats", "verify", "prune --unused 1", "export archive"])
def test_a_store_that_is_not_there_is_told_and_not_made(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *more = task.split()
    path = tmp_path / "nothing.db"
    assert main(["store", name, str(path), *more]) == 2
    assert f"there is none at {path}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_prune_forgets_what_is_old_and_all_of_a_tenant(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "prune", path, "--unused", 1)["forgotten"] == 0
    assert told(capsys, "prune", path, "--tenant", TENANT.hex())["forgotten"] == 5
    assert told(capsys, "prune", path, "--limit", "8MiB")["blocks"] == 8
    assert told(capsys, "prune", path, "--tenant", "none")["blocks"] == 0


def test_prune_makes_room_and_gives_it_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "store.db"
    with closing(SqliteStore(path, limit_bytes=64 * 2**20)) as store:
        store.put(random_blocks(40, 64, 4096))
    figures = told(capsys, "prune", path, "--limit", "8MiB")
    assert figures["bytes_before"] > 10 * 2**20
    assert figures["bytes"] <= 8 * 2**20
    assert figures["blocks"] + figures["forgotten"] == 40
    assert figures["blocks"] > 5
    assert told(capsys, "verify", path)["blocks"] == figures["blocks"]


def test_prune_gives_up_a_reserve_that_is_too_large_before_any_block(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "store.db"
    with closing(SqliteStore(path, limit_bytes=2**30)) as store:
        store.put(random_blocks(BLOCKS, PAGES, PAGE_BYTES))
        assert store.sizes().bytes > 20 * 2**20
    figures = told(capsys, "prune", path, "--limit", "6MiB")
    assert (figures["forgotten"], figures["blocks"]) == (0, BLOCKS)
    assert figures["bytes"] <= 6 * 2**20


@pytest.mark.parametrize("task", ["prune --unused 0", "verify --drop", f"prune --tenant {'41' * 16}"])
def test_a_small_store_stays_small_whoever_looks_at_it(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "store.db"
    with closing(SqliteStore(path, limit_bytes=5 * 2**20)) as store:
        store.put(random_blocks(BLOCKS, PAGES, PAGE_BYTES))
    name, *more = task.split()
    told(capsys, name, path, *more)
    assert told(capsys, "stats", path)["bytes"] <= 5 * 2**20


def test_prune_needs_to_know_what(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "prune", str(path)]) == 2
    assert "--limit, --unused or --tenant" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["store", "prune", str(path), "--tenant", "abc"])
    assert "32 hexadecimal digits" in capsys.readouterr().err


def test_what_is_exported_is_imported_elsewhere(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive, other = tmp_path / "blocks.kvpa", tmp_path / "elsewhere" / "store.db"
    assert told(capsys, "export", path, archive)["blocks"] == 12
    assert archive.stat().st_mode & 0o777 == 0o600
    first = told(capsys, "import", other, archive)
    assert (first["blocks"], first["sessions"], first["left_out"]) == (12, 1, 0)
    again = told(capsys, "import", other, archive)
    assert (again["blocks"], again["sessions"], again["left_out"], again["blocks_held"]) == (0, 0, 13, 12)
    with closing(SqliteStore(other, limit_bytes=2**30)) as store:
        for block in random_blocks(BLOCKS, PAGES, PAGE_BYTES):
            found = store.get([block.head.key])[0]
            assert found is not None
            assert (found == block.payload).all()
        assert store.load_record(SESSION) == b"what a session was"


def test_a_session_that_is_there_is_not_set_back_by_an_archive(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = tmp_path / "blocks.kvpa"
    told(capsys, "export", path, archive)
    with closing(SqliteStore(path, limit_bytes=2**30)) as store:
        store.save_record(SESSION, TENANT, b"what it came to")
    assert told(capsys, "import", path, archive)["left_out"] == 13
    with closing(SqliteStore(path, limit_bytes=2**30)) as store:
        assert store.load_record(SESSION) == b"what it came to"


def test_a_store_never_makes_way_for_an_archive(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = path.with_name("other.db")
    other.write_bytes(path.read_bytes())
    for archive in (path, other, path.with_name("store.db.lock")):
        before = archive.read_bytes()
        assert main(["store", "export", str(path), str(archive)]) == 1
        assert "is there and no archive" in capsys.readouterr().err
        assert archive.read_bytes() == before
    assert told(capsys, "stats", path)["blocks"] == BLOCKS


def test_one_tenants_blocks_are_exported_alone(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = told(capsys, "export", path, tmp_path / "a", "--tenant", TENANT.hex())
    assert (figures["blocks"], figures["sessions"]) == (4, 1)


@pytest.mark.promise(6)
def test_a_cut_off_archive_is_told(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive = tmp_path / "blocks.kvpa"
    told(capsys, "export", path, archive)
    archive.write_bytes(archive.read_bytes()[:-10])
    assert main(["store", "import", str(tmp_path / "other.db"), str(archive)]) == 1
    assert "blocks.kvpa" in capsys.readouterr().err
    assert main(["store", "import", str(tmp_path / "other.db"), str(tmp_path / "none")]) == 2


# -- options of the commands that store


def options(*arguments: str) -> argparse.Namespace:
    return build_parser().parse_args(["serve", *arguments])


GIVEN = ["--store-limit 1GiB", "--store-tenant-limit 1GiB", "--store-sync normal", "--store-compression none"]


@pytest.mark.promise(6)
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("command", ["serve", "chat", "bench engine"])
def test_what_is_said_of_a_store_without_one_is_refused(
    command: str, given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), *given.split()]) == 2
    assert f"{given.split()[0]} is of no use without --store PATH or URL" in capsys.readouterr().err


@pytest.mark.promise(6)
def test_a_chat_with_a_server_has_no_store_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:9", "--store", "s.db", "--store-sync", "full"]) == 2
    assert "--store, --store-sync are of no use with --url" in capsys.readouterr().err


def test_the_least_limit_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    for task in ("prune", "import"):
        with pytest.raises(SystemExit):
            main(["store", task, "--help"])
        assert "at least 4MiB" in " ".join(capsys.readouterr().out.split())


def test_nothing_is_stored_unless_asked() -> None:
    assert store_options(options(), PagerOptions()) is None
    assert store_options(options("--store", "none"), PagerOptions()) is None


def test_options_reach_the_store(tmp_path: Path) -> None:
    arguments = ["--store", str(tmp_path / "s.db"), "--store-limit", "1GiB", "--store-tenant-limit", "100MiB"]
    found = store_options(options(*arguments, "--store-sync", "full", "--store-compression", "zstd"), PagerOptions())
    assert found is not None
    assert (found.limit, found.tenant_limit, found.synchronous, found.compression) == (
        "1GiB",
        "100MiB",
        "full",
        "zstd",
    )


@pytest.mark.promise(6)
@pytest.mark.parametrize(
    ("arguments", "paging", "said"),
    [
        (["--store-limit", "1MiB"], PagerOptions(), "store_limit: 1MiB is less than 4 MiB"),
        (["--store-tenant-limit", "20GiB"], PagerOptions(), "store_tenant_limit: 20GiB is more than"),
        ([], PagerOptions(mode="discard", budget=512), "mode 'discard'"),
        (["--store", "http://here"], PagerOptions(), "neither the path of a file nor the URL of a Redis"),
        (["--store-ttl", "9"], PagerOptions(), "--store-ttl is of no use without a Redis"),
        (["--store", "redis://h", "--store-sync", "full"], PagerOptions(), "--store-sync is of no use without a file"),
        (["--store", "a", "--store", "b"], PagerOptions(), "at most one path"),
        (["--store", "redis://here:x"], PagerOptions(), "a port that is not 1 to 65535"),
        (["--store", "."], PagerOptions(), "'.' is not the path of a file"),
        (["--store", f"{__file__}/kv/s.db"], PagerOptions(), f"since {__file__} is a file and no folder"),
        (["--store", "/dev/null"], PagerOptions(), "'/dev/null' is not the path of a file"),
    ],
)
def test_what_can_not_be_is_refused_before_a_model_is_loaded(
    arguments: list[str], paging: PagerOptions, said: str, tmp_path: Path
) -> None:
    place = [] if "--store" in arguments else ["--store", str(tmp_path / "s.db")]
    with pytest.raises(ConfigError, match=said):
        store_options(options(*place, *arguments), paging)
