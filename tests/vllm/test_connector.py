"""What vLLM's connector says when it can't start, over a vLLM of which only the names are there."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from tests.vllm.test_checks import config

from kvpager.errors import ConfigError, ModelNotFound
from kvpager.models.fingerprint import fingerprint_files

V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
HUB_ID, COMMIT = "somebody/model", "0" * 40


class Base:
    """As much of vLLM's base class as the connector leans on."""

    def __init__(self, vllm_config: Any, role: object, kv_cache_config: object) -> None:
        self._vllm_config = vllm_config
        self._kv_transfer_config = vllm_config.kv_transfer_config


class Role(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module `vllm`, for as long as a test runs; what of kvpager was imported over it is forgotten then."""

    def module(name: str, **contents: object) -> ModuleType:
        made = ModuleType(name)
        vars(made).update(contents)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    root = module("vllm", __version__="0.32.0+cpu")
    module(
        "vllm.distributed",
        get_tensor_model_parallel_rank=lambda: 0,
        get_tensor_model_parallel_world_size=lambda: 1,
    )
    module(f"{V1}.base", KVConnectorBase_V1=Base, KVConnectorRole=Role, **nothing("HandshakeMetadata", "Metadata"))
    module(f"{V1}.metrics", **nothing("PromMetrics", "Stats"))
    module("vllm.v1.metrics.cache_hit_source", CacheHitSource=SimpleNamespace(DISK="disk"))
    module("vllm.v1.metrics.utils", create_metric_per_engine=None)
    yield root
    for name in ("connector", "identity", "metrics"):
        sys.modules.pop(f"kvpager.vllm.{name}", None)


def nothing(*names: str) -> dict[str, object]:
    return {f"KVConnector{name}": type(name, (), {}) for name in names}


Make = Callable[[Any, Role], Any]


@pytest.fixture
def make(vllm: ModuleType) -> Iterator[Make]:
    """Makes connectors as vLLM does."""
    made = []

    class FullAttentionSpec:
        block_size, dtype = 32, torch.bfloat16

    def build(wanted: Any, role: Role) -> Any:
        from kvpager.vllm import KVPagerConnector

        groups = [SimpleNamespace(kv_cache_spec=FullAttentionSpec())]
        connector = KVPagerConnector(wanted, role, SimpleNamespace(kv_cache_groups=groups))
        made.append(connector)
        return connector

    yield build
    for connector in made:
        connector.shutdown()


@pytest.fixture
def wanted(tmp_path: Path) -> Any:
    """vLLM's configuration, of a model that was loaded from the Hub."""
    found = config()
    found.kv_transfer_config.kv_connector_extra_config = {"store": str(tmp_path / "kv" / "store.db")}
    settings = SimpleNamespace(to_dict=lambda: {"hidden_size": 64})
    found.model_config = SimpleNamespace(
        model=HUB_ID, revision=None, dtype="bfloat16", quantization=None, hf_text_config=settings, hf_config=settings
    )
    found.load_config.download_dir = str(tmp_path / "hub")
    found.cache_config.kv_cache_layout, found.cache_config.block_size = "NHD", 32
    found.compilation_config = SimpleNamespace(static_forward_context={}, mode=0)
    return found


def caches() -> dict[str, torch.Tensor]:
    return {"layer 0": torch.zeros(4, 2, 8, dtype=torch.bfloat16)}


def downloaded(hub: Path) -> Path:
    """The folder that the Hub's client makes of a model."""
    kept = hub / f"models--{HUB_ID.replace('/', '--')}"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text(COMMIT)
    folder = kept / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    return folder


@pytest.mark.promise(6)
@pytest.mark.parametrize("role", Role)
def test_another_version_of_vllm_is_refused_and_no_store_is_made(
    vllm: ModuleType, make: Make, wanted: Any, role: Role, tmp_path: Path
) -> None:
    vars(vllm)["__version__"] = "0.33.1"
    with pytest.raises(ConfigError, match=r"vLLM is 0.33.1; .* works with >=0.32.0,<0.33.0"):
        make(wanted, role)
    assert not (tmp_path / "kv").exists()


@pytest.mark.promise(6)
@pytest.mark.parametrize("role", Role)
def test_a_policy_that_fails_requests_is_refused_and_no_store_is_made(
    make: Make, wanted: Any, role: Role, tmp_path: Path
) -> None:
    wanted.kv_transfer_config.kv_load_failure_policy = "fail"  # vLLM's default
    with pytest.raises(ConfigError, match="kv_load_failure_policy: it is 'fail', and must be 'recompute'"):
        make(wanted, role)
    assert not (tmp_path / "kv").exists()


@pytest.mark.promise(6)
@pytest.mark.parametrize("there", [False, True])
def test_a_hub_id_whose_weights_are_not_here_is_refused_by_name(
    make: Make, wanted: Any, tmp_path: Path, there: bool
) -> None:
    if there:
        downloaded(tmp_path / "hub")
    connector = make(wanted, Role.WORKER)
    with pytest.raises(ModelNotFound, match="has no weights" if there else rf"{HUB_ID}: its weights are not found"):
        connector.register_kv_caches(caches())
    assert connector.get_handshake_metadata() is None


def test_a_hub_id_is_told_by_the_weights_that_were_downloaded(make: Make, wanted: Any, tmp_path: Path) -> None:
    folder = downloaded(tmp_path / "hub")
    save_file({"one": np.arange(5, dtype=np.float32)}, folder / "model.safetensors")
    connector = make(wanted, Role.WORKER)
    connector.register_kv_caches(caches())
    assert fingerprint_files(folder) in connector.get_handshake_metadata().text
    assert HUB_ID not in connector.get_handshake_metadata().text, "a copy of the same weights finds the same blocks"
