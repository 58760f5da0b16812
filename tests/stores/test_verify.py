"""Looking for damage finds all of it, says where it is, and changes nothing."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpager.stores.verify import Damage
from tests.stores.fake import key_of
from tests.stores.sqlite_rig import MINE, chain, keys, raw, store

BLOCKS = chain(12)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "store.db"
    fill(path)
    return path


def fill(path: Path, compression: str = "none") -> None:
    tier = store(path, compression=compression)
    tier.put(BLOCKS)
    for number in range(3):
        tier.save_record(key_of(number), MINE, b"record %d" % number)
    tier.close()


def test_a_whole_store_is_whole(path: Path) -> None:
    seen: list[tuple[int, int]] = []
    tier = store(path)
    report = tier.verify(lambda done, total: seen.append((done, total)))
    assert (report.blocks, report.pages, report.records, report.damaged) == (12, 12 * 16, 3, ())
    assert report.nbytes > 12 * 16 * 4096
    assert seen[-1] == (15, 15)
    assert seen == sorted(seen)
    assert report.rows_damaged("blocks") == report.rows_damaged("records") == []
    tier.close()


def test_an_empty_store_is_whole(tmp_path: Path) -> None:
    tier = store(tmp_path / "store.db")
    assert tier.verify().damaged == ()
    tier.close()


@pytest.mark.parametrize("compression", ["none", "zstd"])
@given(pages=st.sets(st.tuples(st.integers(0, 11), st.integers(0, 15)), max_size=20))
@settings(max_examples=10, deadline=None, derandomize=True)
def test_every_damaged_page_is_found_and_no_other(
    tmp_path_factory: pytest.TempPathFactory, compression: str, pages: set[tuple[int, int]]
) -> None:
    path = tmp_path_factory.mktemp("verify") / "store.db"
    fill(path, compression)
    with raw(path) as connection:
        for block, page in pages:
            (number, blob) = connection.execute(
                "SELECT id, payload FROM payloads JOIN blocks USING (id) WHERE key = ?", (BLOCKS[block].head.key,)
            ).fetchone()
            data = bytearray(blob)
            header = len(data) - 16 * 4096
            if compression == "zstd":
                from kvpager.stores.header import Header

                begin, _ = Header.parse(blob).page_range(page)
            else:
                begin = header + page * 4096
            data[begin + 7 * page] ^= 1 << (page % 8)
            connection.execute("UPDATE payloads SET payload = ? WHERE id = ?", (bytes(data), number))
    tier = store(path)
    report = tier.verify()
    found = {(one.key, one.page) for one in report.damaged}
    assert found == {(BLOCKS[block].head.key, page) for block, page in pages}
    assert all(one.kind == "page" for one in report.damaged)
    assert len(report.rows_damaged("blocks")) == len({block for block, _ in pages})
    tier.drop_damaged(report)
    assert tier.verify().damaged == ()
    tier.close()


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ("UPDATE heads SET head = substr(head, 1, 50) WHERE id = :id", "head"),
        ("DELETE FROM heads WHERE id = :id", "head"),
        ("DELETE FROM scores WHERE id = :id", "head"),
        ("UPDATE scores SET scores = x'00' WHERE id = :id", "head"),
        ("UPDATE heads SET head = (SELECT head FROM heads WHERE id = :id + 1) WHERE id = :id", "head"),
        ("DELETE FROM payloads WHERE id = :id", "block"),
        ("UPDATE payloads SET payload = x'' WHERE id = :id", "block"),
        ("UPDATE payloads SET payload = substr(payload, 1, 100) WHERE id = :id", "block"),
        ("UPDATE payloads SET payload = CAST(payload || x'00' AS BLOB) WHERE id = :id", "block"),
        ("UPDATE payloads SET payload = (SELECT payload FROM payloads WHERE id = :id + 1) WHERE id = :id", "block"),
        ("UPDATE payloads SET payload = (SELECT head FROM heads WHERE id = :id) WHERE id = :id", "block"),
    ],
)
def test_other_damage_is_told_by_its_kind(path: Path, change: str, kind: str) -> None:
    key = BLOCKS[4].head.key
    with raw(path) as connection:
        (number,) = connection.execute("SELECT id FROM blocks WHERE key = ?", (key,)).fetchone()
        assert connection.execute(change, {"id": number}).rowcount == 1
    tier = store(path)
    report = tier.verify()
    assert [(one.kind, one.key, one.page, one.row) for one in report.damaged] == [(kind, key, None, number)]
    assert report.rows_damaged("blocks") == [number]
    tier.close()


def test_pages_that_were_cut_off_are_each_found(path: Path) -> None:
    key = BLOCKS[4].head.key
    with raw(path) as connection:
        connection.execute(
            "UPDATE payloads SET payload = substr(payload, 1, length(payload) - 5000)"
            " WHERE id = (SELECT id FROM blocks WHERE key = ?)",
            (key,),
        )
    tier = store(path)
    assert [(one.kind, one.page) for one in tier.verify().damaged] == [("page", 14), ("page", 15)]
    tier.close()


def test_a_damaged_record_is_found(path: Path) -> None:
    with raw(path) as connection:
        connection.execute("UPDATE records SET record = CAST(record || x'00' AS BLOB) WHERE key = ?", (key_of(1),))
    tier = store(path)
    report = tier.verify()
    assert [(one.kind, one.key) for one in report.damaged] == [("record", key_of(1))]
    assert report.rows_damaged("blocks") == []
    tier.drop_damaged(report)
    assert tier.verify().damaged == ()
    tier.close()


def test_a_malformed_database_is_told_and_left_as_it_is(path: Path) -> None:
    data = bytearray(path.read_bytes())
    at = data.index(BLOCKS[3].payload[2].tobytes()) // 2**15 * 2**15
    data[at : at + 4] = b"\xff" * 4
    path.write_bytes(data)
    tier = store(path)
    report = tier.verify()
    assert {one.kind for one in report.damaged} == {"file", "block"}
    assert {one.key for one in report.damaged if one.kind == "block"} == {BLOCKS[3].head.key}
    assert report.blocks == 11
    tier.close()
    assert path.read_bytes() == data


def test_what_is_taken_away_meanwhile_is_no_damage(path: Path) -> None:
    tier, other = store(path), store(path)
    tier.open()

    def take_away(done: int, total: int) -> None:
        other.drop(keys(BLOCKS))
        for number in range(3):
            other.drop_record(key_of(number))

    more = [replace(block, head=replace(block.head, parent=b"")) for block in chain(20, 1)]
    tier.put(more)
    report = tier.verify(take_away)
    assert report.damaged == ()
    assert report.records == 0
    tier.close()
    other.close()


def test_a_report_says_what_it_saw_once() -> None:
    one = Damage("page", b"a", 1, "", 7)
    from kvpager.stores.verify import Report

    report = Report(1, 2, 0, 3, (one, Damage("page", b"a", 2, "", 7), Damage("head", b"b", None, "", 9)))
    assert report.rows_damaged("blocks") == [7, 9]
