"""A folder is checked before anything big is read: what is missing, truncated or pickled is said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kvpager.errors import ModelCorrupt, ModelNotFound
from kvpager.models.folder import read_folder, tensor_counts
from tests.small_llm import save_gguf


def test_a_whole_folder_gives_its_config_and_number_of_weights(folder: Path) -> None:
    info = read_folder(folder)
    assert info.config["model_type"] == "llama"
    assert set(info.parameters) == {"F32"}
    assert info.parameters["F32"] * 4 == pytest.approx((folder / "model.safetensors").stat().st_size, rel=0.05)


def test_a_missing_config_is_named(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ModelCorrupt, match=r"has no config\.json"):
        read_folder(folder)


@pytest.mark.parametrize("content", ["", "{", "[1]", "\x00\x01"])
def test_a_config_that_is_no_json_object_is_refused(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(ModelCorrupt, match=r"config\.json is not"):
        read_folder(folder)


@pytest.mark.parametrize("length", [0, 4, 8, 100, 5000, -1])
def test_truncated_weights_are_refused(folder: Path, length: int) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:length])
    with pytest.raises(ModelCorrupt, match="get it again"):
        read_folder(folder)


def test_weights_with_bytes_too_many_are_refused(folder: Path) -> None:
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(ModelCorrupt, match="should have"):
        read_folder(folder)


def test_a_damaged_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for header in (b"not json", b"[]", b'{"a": 1}', b'{"a": {"dtype": "F32", "shape": [1]}}'):
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(ModelCorrupt, match="damaged"):
            tensor_counts(path)


def test_a_git_lfs_pointer_is_named_as_one(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ModelCorrupt, match="git lfs pull"):
        read_folder(folder)


def test_pickled_weights_alone_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelCorrupt, match="pickles"):
        read_folder(folder)


def test_no_weights_at_all_is_said(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelCorrupt, match="no weights"):
        read_folder(folder)


def test_a_missing_shard_is_named(folder: Path) -> None:
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors").rename(folder / names["a"])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ModelCorrupt, match="lacks model-00002-of-00002"):
        read_folder(folder)
    shutil.copy(folder / names["a"], folder / names["b"])
    assert read_folder(folder).parameters["F32"] > 0


@pytest.mark.parametrize("weight_map", [None, {}, {"a": "../../secret.safetensors"}])
def test_an_index_that_names_nothing_or_another_place_is_refused(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelCorrupt, match=r"weight_map|outside the folder"):
        read_folder(folder)


def test_a_missing_tokenizer_is_said(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ModelCorrupt, match="no tokenizer"):
        read_folder(folder)


def test_a_folder_with_a_gguf_alone_points_to_the_file(tmp_path: Path) -> None:
    save_gguf(tmp_path / "m.gguf")
    with pytest.raises(ModelNotFound, match=r"give that file: .*m\.gguf"):
        read_folder(tmp_path)
