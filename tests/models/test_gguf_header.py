"""A GGUF file's header is read alone, and tells whether the file is whole."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import pytest

from kvpager.errors import ModelCorrupt
from kvpager.models.gguf import read_gguf
from tests.small_llm import save_gguf


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf")


def test_a_whole_file_gives_architecture_and_number_of_weights(whole: Path) -> None:
    info = read_gguf(whole)
    assert info.architecture == "llama"
    assert info.file_bytes == whole.stat().st_size
    assert 0.8 * info.file_bytes < 4 * info.parameters < info.file_bytes


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.001, 0.01, 0.02, 0.5, 0.95])
def test_a_truncated_file_is_refused_wherever_it_ends(whole: Path, tmp_path: Path, share: float) -> None:
    data = whole.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ModelCorrupt, match="get it again"):
        read_gguf(path)


def test_another_kind_of_file_is_named_as_such(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelCorrupt, match="is not a GGUF file"):
        read_gguf(path)


@pytest.mark.parametrize("version", [0, 1, 99, 3 << 24])
def test_an_unknown_version_is_named(whole: Path, tmp_path: Path, version: int) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", version) + whole.read_bytes()[8:])
    with pytest.raises(ModelCorrupt, match=f"version {version} "):
        read_gguf(path)


@pytest.mark.parametrize("at", range(8, 200, 3))
def test_a_damaged_header_is_refused_and_never_crashes(whole: Path, tmp_path: Path, at: int) -> None:
    data = bytearray(whole.read_bytes())
    data[at] ^= 0xFF
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with contextlib.suppress(ModelCorrupt):  # or none: a byte of a text may be anything
        read_gguf(path)


def test_one_part_of_several_is_refused(tmp_path: Path) -> None:
    key = b"split.count"
    pair = struct.pack("<Q", len(key)) + key + struct.pack("<IH", 2, 3)
    path = tmp_path / "m-00001-of-00003.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair)
    with pytest.raises(ModelCorrupt, match="one part of 3"):
        read_gguf(path)
