"""Names lead to models, or to an error that says what was looked for; local names never touch the network."""

from __future__ import annotations

import importlib.util
import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import kvpager.models.loading as loading
from kvpager.errors import (
    ConfigError,
    MissingDependency,
    ModelCorrupt,
    ModelError,
    ModelNotFound,
    ModelTooLarge,
    UnsupportedModel,
)
from kvpager.models import load, require_packages
from tests.small_llm import CONTEXT, END, save_folder, save_gguf


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """No network; the list tells what was tried."""
    tried: list[Any] = []

    def refuse(*arguments: Any, **_: Any) -> Any:
        tried.append(arguments)
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return tried


def test_a_folder_loads_with_what_callers_need(folder: Path, offline: list[Any]) -> None:
    loaded = load(str(folder), attn_implementation="sdpa")
    assert loaded.context_length == CONTEXT
    assert loaded.dtype == "float32"
    assert loaded.end_ids == {END}
    assert loaded.weight_bytes == pytest.approx((folder / "model.safetensors").stat().st_size, rel=0.05)
    assert not loaded.model.training
    assert offline == []


def test_a_gguf_file_loads_as_a_plain_model_in_bfloat16(tmp_path: Path, offline: list[Any]) -> None:
    loaded = load(str(save_gguf(tmp_path / "m.gguf")), attn_implementation="sdpa")
    assert loaded.dtype == "bfloat16"
    assert loaded.context_length == CONTEXT
    assert loaded.end_ids == {END}
    assert not hasattr(loaded.model.config, "quantization_config")
    ids = loaded.tokenizer("the é")["input_ids"]
    assert loaded.tokenizer.decode(ids) == "the é"
    with torch.inference_mode():
        assert torch.isfinite(loaded.model(input_ids=torch.tensor([ids])).logits).all()
    assert offline == []


def test_dtype_is_the_checkpoints_own_unless_asked(folder: Path, tmp_path: Path) -> None:
    assert load(str(folder), dtype="bfloat16", attn_implementation="sdpa").dtype == "bfloat16"
    half = save_folder(tmp_path / "half", dtype="float16")
    assert load(str(half), attn_implementation="sdpa").dtype == "bfloat16"
    with pytest.raises(ConfigError, match="dtype: 'int8' is not one of auto"):
        load(str(folder), dtype="int8", attn_implementation="sdpa")


@pytest.mark.parametrize(
    "name", ["no-such-model", "./nothing", "/no/such/folder", "missing.gguf", "a/b/c", "dir/x.gguf"]
)
def test_a_name_that_is_nothing_says_where_it_was_looked_for(name: str, offline: list[Any]) -> None:
    with pytest.raises(ModelNotFound) as caught:
        load(name, attn_implementation="sdpa")
    assert name in str(caught.value)
    assert "smollm2-135m" in str(caught.value)
    assert offline == []


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    with pytest.raises(ModelCorrupt, match="neither a folder nor a GGUF file"):
        load(str(path), attn_implementation="sdpa")


def test_a_hub_id_without_network_is_refused_quickly_and_clearly(
    offline: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        ModelNotFound, match=r"^nobody/nothing: no file or folder here, no local copy .* can't be reached"
    ):
        load("nobody/nothing", attn_implementation="sdpa")


def test_what_does_not_fit_is_refused_before_it_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "free_memory", lambda: 1000)
    monkeypatch.setattr(loading, "from_folder", lambda *_, **__: pytest.fail("it was read"))
    with pytest.raises(ModelTooLarge, match=r"needs 0\.00 GB of memory; 0\.00 GB are free"):
        load(str(folder), attn_implementation="sdpa")


def test_missing_weights_are_never_made_up(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ModelCorrupt, match=r"lacks weights, model\.layers\.2"):
        load(str(folder), attn_implementation="sdpa")


def test_weights_of_another_shape_are_an_error_that_names_the_model(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 100}))
    with pytest.raises(ModelError, match="copy can't be loaded"):
        load(str(folder), attn_implementation="sdpa")


@pytest.mark.parametrize("kind", ["t5", "bert-unknown-kind"])
def test_other_kinds_of_models_are_refused_by_name(folder: Path, kind: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": kind, "vocab_size": config["vocab_size"]}))
    with pytest.raises((UnsupportedModel, ModelError), match=kind):
        load(str(folder), attn_implementation="sdpa")


def test_code_that_comes_with_a_model_is_not_run(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    extra = {"model_type": "own", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    (folder / "config.json").write_text(json.dumps(config | extra))
    (folder / "evil.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(ModelError, match="can't be loaded"):
        load(str(folder), attn_implementation="sdpa")


def test_loading_writes_nothing_to_the_terminal(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    load(str(folder), attn_implementation="sdpa")
    load(str(save_gguf(tmp_path / "m.gguf")), attn_implementation="sdpa")
    assert capfd.readouterr() == ("", "")


def test_missing_packages_are_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else real(name))
    with pytest.raises(MissingDependency, match=r"gguf, not installed; run: pip install 'kvpager\[hf\]'"):
        require_packages()


def test_importing_the_package_loads_nothing_heavy() -> None:
    import subprocess

    code = "import kvpager.models, kvpager.build, sys; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
