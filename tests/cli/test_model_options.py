"""``--threads``, ``--weights``, ``--kv-dtype`` and ``--ignore-eos``: what they change, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvpager import _native
from kvpager.cli.main import main
from tests.small_llm import save_folder

PROMPT = "the cat sat on the mat, and then " * 4


@pytest.fixture(autouse=True)
def _threads_as_they_were() -> Iterator[None]:
    ours, pytorchs = _native.threads(), torch.get_num_threads()
    yield
    _native.set_threads(max(ours, 1))
    torch.set_num_threads(pytorchs)


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model in bfloat16."""
    return str(save_folder(tmp_path_factory.mktemp("bfloat16"), dtype="bfloat16"))


def figures(capsys: pytest.CaptureFixture[str], model: str, *arguments: str) -> dict[str, Any]:
    common = ["generate", PROMPT, "--raw", "--json", "--max-tokens", "8", "--threads", "1"]
    assert main([*common, "--model", model, *arguments]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_threads_reach_the_kernels_and_change_no_text(halves: str, capsys: pytest.CaptureFixture[str]) -> None:
    texts = set()
    for threads in (1, 2, 3):
        got = figures(capsys, halves, "--threads", str(threads))
        assert _native.threads() == got["settings"]["threads"] == threads
        assert torch.get_num_threads() == 1  # all that is large is the kernels'
        texts.add(tuple(got["token_ids"]))
    assert len(texts) == 1


def test_unpacked_weights_leave_the_model_to_pytorch(halves: str, capsys: pytest.CaptureFixture[str]) -> None:
    got = figures(capsys, halves, "--threads", "2", "--weights", "unpacked")
    assert torch.get_num_threads() == 2
    assert got["settings"]["weights"] == "unpacked"


def test_int8_weights_take_less_memory(halves: str, capsys: pytest.CaptureFixture[str]) -> None:
    whole, rounded = (figures(capsys, halves, "--weights", name)["weight_bytes"] for name in ("auto", "int8"))
    assert rounded < 0.75 * whole


@pytest.mark.promise(6)
def test_int8_weights_of_a_float32_model_are_refused(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hi", "--raw", "--model", model, "--weights", "int8"]) == 2
    assert f"weights: 'int8' are rounded from bfloat16, and {model} was loaded as float32" in capsys.readouterr().err


@pytest.mark.promise(6)
@pytest.mark.parametrize("option", ["--weights", "--kv-dtype"])
def test_unknown_formats_are_refused_with_those_that_are_known(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["generate", "hi", option, "int4"])
    assert stopped.value.code == 2
    err = capsys.readouterr().err
    assert "int4" in err
    assert "int8" in err


@pytest.mark.promise(7)
def test_pages_take_the_memory_of_their_format(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    bytes_of = {}
    for name in ("auto", "float32", "bfloat16", "float16", "int8"):
        got = figures(capsys, model, "--kv-dtype", name, "--pool", "1000")
        bytes_of[name] = got["pool_bytes"]
    assert bytes_of["auto"] == bytes_of["float32"] == 2 * bytes_of["bfloat16"] == 2 * bytes_of["float16"]
    assert bytes_of["int8"] < 0.75 * bytes_of["bfloat16"]


def test_pages_in_the_models_format_give_its_text(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    own, named = (figures(capsys, model, *more)["token_ids"] for more in ([], ["--kv-dtype", "float32"]))
    assert own == named


def test_an_end_mark_can_be_ignored(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    free = figures(capsys, model, "--ignore-eos")["token_ids"]
    assert len(free) == 8
    end = next(index for index in range(1, 8) if free[index] not in free[:index])
    folder = str(save_folder(tmp_path / "ends", eos_token_id=free[end]))
    stopped = figures(capsys, folder)
    assert (stopped["finish_reason"], stopped["token_ids"]) == ("stop", free[:end])
    ignored = figures(capsys, folder, "--ignore-eos")
    assert (ignored["finish_reason"], ignored["token_ids"]) == ("length", free)
