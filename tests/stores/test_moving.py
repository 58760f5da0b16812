"""Blocks and records move from one store to another one by an archive, whole or not at all."""

import shutil
import stat
from pathlib import Path

import pytest

from kvpager.errors import StoreDamaged, StoreForeign, StoreUnavailable
from kvpager.stored import Scores
from kvpager.stores.archive import Entry, export_blocks
from kvpager.stores.codec import encode
from kvpager.stores.moving import Moved
from tests.stores.fake import key_of
from tests.stores.sqlite_rig import MIB, MINE, YOURS, chain, found, keys, raw, store

ONE, TWO = chain(20, 0, tenant=MINE), chain(5, 1, tenant=YOURS)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "store.db"
    tier = store(path)
    tier.put(list(reversed(ONE)))
    tier.put(TWO)
    tier.update([Scores(ONE[3].head.key, b"told", 5)], tick=9)
    tier.save_record(key_of(1), MINE, b"one")
    tier.save_record(key_of(2), YOURS, b"two")
    tier.close()
    return path


@pytest.mark.parametrize("compressions", [("none", "none"), ("zstd", "none"), ("none", "zstd")])
def test_what_is_exported_is_there_after_the_import(path: Path, tmp_path: Path, compressions: tuple[str, str]) -> None:
    archive = tmp_path / "all.kvpager"
    seen: list[tuple[int, int]] = []
    out, back = (
        store(path, compression=compressions[0]),
        store(tmp_path / "other" / "store.db", compression=compressions[1]),
    )
    assert out.export(archive, progress=lambda done, total: seen.append((done, total))) == Moved(25, 2, 0)
    assert seen[-1] == (27, 27)
    assert stat.S_IMODE(archive.stat().st_mode) == 0o600
    assert back.import_(archive, progress=lambda done, total: seen.append((done, total))) == Moved(25, 2, 0)
    assert seen[-1] == (archive.stat().st_size,) * 2
    assert back.heads(keys([*ONE, *TWO])) == out.heads(keys([*ONE, *TWO]))
    (head,) = back.heads([ONE[3].head.key])
    assert head is not None
    assert (head.scores, head.hits) == (b"told", 5)
    assert all((a == b).all() for a, b in zip(back.get(keys(ONE)), out.get(keys(ONE)), strict=True))
    assert [back.load_record(key_of(number)) for number in (1, 2)] == [b"one", b"two"]
    assert back.import_(archive) == Moved(0, 0, 27)
    assert back.erase(MINE) == 21
    out.close()
    back.close()


def test_one_tenant_can_be_exported(path: Path, tmp_path: Path) -> None:
    archive = tmp_path / "mine"
    out, back = store(path), store(tmp_path / "other.db")
    assert out.export(archive, tenant=MINE) == Moved(20, 1, 0)
    assert back.import_(archive) == Moved(20, 1, 0)
    assert back.load_record(key_of(2)) is None
    assert back.contains(keys(TWO)) == [False] * 5
    out.close()
    back.close()


def test_what_is_damaged_is_left_out(path: Path, tmp_path: Path) -> None:
    with raw(path) as connection:
        connection.execute("UPDATE payloads SET payload = x'' WHERE id = 3")
        connection.execute("UPDATE scores SET scores = x'' WHERE id = 5")
        connection.execute("UPDATE records SET record = x'' WHERE key = ?", (key_of(1),))
    tier = store(path)
    assert tier.export(tmp_path / "all") == Moved(23, 1, 3)
    assert tier.damaged == 3
    tier.close()


def test_a_smaller_store_takes_what_it_has_room_for(path: Path, tmp_path: Path) -> None:
    out, back = store(path), store(tmp_path / "small" / "store.db", 4 * MIB)
    big = chain(60, 3)
    for at in range(0, 60, 4):
        out.put(big[at : at + 4])
    out.export(tmp_path / "all")
    moved = back.import_(tmp_path / "all")
    assert 20 < moved.blocks < 85
    assert moved.blocks + moved.left_out == 85
    for one in (ONE, TWO, big):
        there = found(back, one) if one is not ONE else back.contains(keys(one))
        assert there == sorted(there, reverse=True)
    out.close()
    back.close()


def test_an_archive_that_is_cut_off_leaves_what_came_before_it(path: Path, tmp_path: Path) -> None:
    archive = tmp_path / "all"
    out, back = store(path), store(tmp_path / "other.db")
    out.export(archive)
    with archive.open("r+b") as file:
        file.truncate(archive.stat().st_size // 2)
    with pytest.raises(StoreDamaged):
        back.import_(archive)
    there = back.contains(keys(ONE))
    assert there == sorted(there, reverse=True)
    assert back.verify().damaged == ()
    out.close()
    back.close()


def test_an_entry_that_lies_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "all"
    for entry in (
        Entry("block", ONE[1].head.key, MINE, encode(ONE[0])),
        Entry("block", ONE[0].head.key, YOURS, encode(ONE[0])),
    ):
        export_blocks(archive, [entry])
        back = store(tmp_path / "other.db")
        with pytest.raises(StoreDamaged):
            back.import_(archive)
        assert back.contains(keys(ONE)) == [False] * 20
        back.close()


def test_what_is_no_archive_and_what_is_not_there_are_told(path: Path, tmp_path: Path) -> None:
    tier = store(tmp_path / "other.db")
    with pytest.raises(StoreForeign):
        tier.import_(path)
    with pytest.raises(StoreUnavailable):
        tier.import_(tmp_path / "nothing")
    with pytest.raises(StoreUnavailable):
        tier.import_(tmp_path)
    with pytest.raises(StoreUnavailable):
        tier.export(tmp_path / "nowhere" / "all")
    tier.close()


def test_a_copied_database_is_a_store(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "copy" / "copied.db"
    other.parent.mkdir()
    shutil.copy(path, other)
    tier = store(other)
    assert found(tier, TWO) == [True] * 5
    tier.close()


def test_a_record_that_is_too_large_is_left_out_and_what_follows_it_comes(tmp_path: Path) -> None:
    out, back = store(tmp_path / "out" / "store.db"), store(tmp_path / "back" / "store.db", 8 * MIB)
    out.save_record(key_of(1), MINE, bytes(12 * MIB))
    out.save_record(key_of(2), YOURS, b"small")
    out.export(tmp_path / "all")
    assert back.import_(tmp_path / "all") == Moved(0, 1, 1)
    assert [back.load_record(key_of(number)) for number in (1, 2)] == [None, b"small"]
    out.close()
    back.close()
