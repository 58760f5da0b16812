"""A fingerprint says what a model computes, and nothing of where it lies."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kvpager.models import load
from kvpager.models.fingerprint import PIECE_BYTES, fingerprint
from tests.small_llm import save_folder


def of(folder: Path, **more: Any) -> str:
    return fingerprint(load(str(folder), attn_implementation="sdpa", **more).model)


@pytest.mark.promise(5)
def test_one_changed_weight_changes_it(folder: Path) -> None:
    model = load(str(folder), attn_implementation="sdpa").model
    before = fingerprint(model)
    assert fingerprint(model) == before
    for name, parameter in model.named_parameters():
        kept = parameter.data.clone()
        parameter.data.reshape(-1).view(torch.uint8)[-1] ^= 1
        assert fingerprint(model) != before, name
        parameter.data.copy_(kept)
    assert fingerprint(model) == before


@pytest.mark.promise(5)
def test_a_buffer_that_no_file_holds_changes_it(folder: Path) -> None:
    model: Any = load(str(folder), attn_implementation="sdpa").model
    before = fingerprint(model)
    model.model.rotary_emb.inv_freq *= 2
    assert fingerprint(model) != before


@pytest.mark.promise(5)
@pytest.mark.parametrize(
    "more",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}},
        {"rms_norm_eps": 1e-3},
        {"hidden_act": "gelu"},
        {"num_key_value_heads": 4},
    ],
    ids=lambda more: next(iter(more)),
)
def test_numbers_of_the_configuration_change_it(folder: Path, tmp_path: Path, more: dict[str, Any]) -> None:
    assert of(save_folder(tmp_path / "other", **more)) != of(folder)


def test_the_number_format_changes_it(folder: Path) -> None:
    assert of(folder) != of(folder, dtype="bfloat16")


def test_neither_the_place_nor_the_name_changes_it(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "renamed")
    assert of(tmp_path / "renamed") == of(folder)


def test_threads_and_pieces_do_not_change_it() -> None:
    class Model(torch.nn.Module):
        class config:
            to_dict = staticmethod(dict)

        def __init__(self) -> None:
            super().__init__()
            self.large = torch.nn.Parameter(torch.arange(PIECE_BYTES // 2 + 3, dtype=torch.float32))
            self.register_buffer("nothing", torch.empty(0))
            self.register_buffer("number", torch.tensor(3))
            self.register_buffer("turned", torch.arange(6.0).reshape(2, 3).T)

    model: Any = Model()
    assert fingerprint(model, threads=1) == fingerprint(model, threads=3)
    before = fingerprint(model)
    model.turned = model.turned.contiguous()  # the same numbers, laid out otherwise
    assert fingerprint(model) == before


def test_another_process_finds_the_same(folder: Path) -> None:
    code = (
        "import sys\nfrom kvpager.models import load\nfrom kvpager.models.fingerprint import fingerprint\n"
        "print(fingerprint(load(sys.argv[1], attn_implementation='sdpa').model))"
    )
    environment = {"PYTHONHASHSEED": "7", "PATH": "/usr/bin:/bin", "HOME": str(Path.home())}
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.strip() == of(folder)
