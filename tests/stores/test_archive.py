"""Archives: what was exported is imported, or it is told what is wrong."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpager.errors import InputError, StoreDamaged, StoreForeign, StoreFull, StoreNewer, StoreUnavailable
from kvpager.stores import archive
from kvpager.stores.archive import Entry, export_blocks, import_blocks
from kvpager.stores.codec import decode, encode
from tests.stores.made import flipped, made_block

ENTRIES = st.lists(
    st.builds(
        Entry,
        kind=st.sampled_from(["block", "record"]),
        key=st.binary(min_size=32, max_size=32),
        tenant=st.binary(min_size=16, max_size=16),
        data=st.binary(max_size=60),
    ),
    max_size=5,
)
SOME = [Entry("block", b"k" * 32, b"t" * 16, b"pages"), Entry("record", b"r" * 32, bytes(16), b"")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "blocks.kvpager"


@given(entries=ENTRIES)
def test_entries_come_back_in_order(tmp_path_factory: pytest.TempPathFactory, entries: list[Entry]) -> None:
    path = tmp_path_factory.mktemp("archive") / "a"
    assert export_blocks(path, iter(entries)) == len(entries)
    assert list(import_blocks(path)) == entries


def test_blocks_come_back_bit_for_bit(path: Path) -> None:
    blocks = [made_block(seed) for seed in range(4)]
    export_blocks(path, (Entry("block", b.head.key, b.head.tenant, encode(b, "zstd")) for b in blocks))
    for block, entry in zip(blocks, import_blocks(path), strict=True):
        found = decode(entry.data, entry.key)
        assert found.head == block.head
        assert found.payload.tobytes() == block.payload.tobytes()


def test_only_the_owner_may_read_it_and_nothing_else_is_left(path: Path) -> None:
    export_blocks(path, SOME)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_any_flipped_bit_and_any_other_length_is_told(path: Path) -> None:
    export_blocks(path, SOME)
    whole = path.read_bytes()
    changed = [flipped(whole, bit) for bit in range(8 * len(whole))]
    changed += [whole[:length] for length in range(len(whole))] + [whole + b"\0", whole + whole[8:]]
    for data in changed:
        path.write_bytes(data)
        found: list[Entry] = []
        with pytest.raises((StoreDamaged, StoreForeign, StoreNewer)):
            found.extend(import_blocks(path))
        assert found == SOME[: len(found)]


def test_entries_that_changed_places_or_are_gone_are_told(path: Path) -> None:
    export_blocks(path, SOME)
    whole = path.read_bytes()
    second = whole.index(b"pages") + 5
    path.write_bytes(whole[:8] + whole[second:])
    with pytest.raises(StoreDamaged, match="ends after 1 entries and says 2"):
        list(import_blocks(path))


def test_other_files_and_later_versions_are_told(path: Path) -> None:
    for data in (b"", b"SQLite format 3\0", b"KVPB" + bytes(100)):
        path.write_bytes(data)
        with pytest.raises(StoreForeign, match="is no archive"):
            list(import_blocks(path))
    path.write_bytes(b"KVPA\x02\x00\x00\x00")
    with pytest.raises(StoreNewer, match="format version 2, and this kvpager reads 1"):
        list(import_blocks(path))
    path.unlink()
    with pytest.raises(StoreUnavailable, match="No such file"):
        list(import_blocks(path))


def test_an_older_archive_stays_as_it_was_when_a_new_one_fails(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_blocks(path, SOME)

    def failing() -> Iterator[Entry]:
        yield SOME[0]
        raise StoreDamaged("a block can't be read")

    with pytest.raises(StoreDamaged, match="a block can't be read"):
        export_blocks(path, failing())
    with pytest.raises(InputError, match="5 bytes of a key"):
        export_blocks(path, [Entry("block", b"short", bytes(16), b"")])

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(archive.os, "fsync", full)
    with pytest.raises(StoreFull, match="the disk is full"):
        export_blocks(path, SOME[:1])
    assert list(import_blocks(path)) == SOME
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="No such file") as caught:
        export_blocks(tmp_path / "none" / "a", SOME)
    assert caught.value.kind == "io"
