"""What vLLM is refused for when it starts, and that importing needs no vLLM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvpager.vllm
from kvpager.errors import ConfigError, MissingDependency
from kvpager.vllm.checks import require_cache, require_config, require_version
from kvpager.vllm.settings import Settings


def config() -> Any:
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy="recompute", kv_role="kv_both"),
        cache_config=SimpleNamespace(cache_dtype="auto", kv_sharing_fast_prefill=False),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1, decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
        device_config=SimpleNamespace(device_type="cpu"),
        load_config=SimpleNamespace(load_format="auto"),
        speculative_config=None,
        weight_transfer_config=None,
    )


def test_without_vllm_the_connector_says_what_is_missing() -> None:
    with pytest.raises(MissingDependency, match=r"needs vLLM >=0.32.0,<0.33.0.*pip install"):
        _ = kvpager.vllm.KVPagerConnector
    with pytest.raises(AttributeError, match="NoSuchThing"):
        _ = kvpager.vllm.NoSuchThing


def test_importing_loads_neither_vllm_nor_torch() -> None:
    code = (
        "import sys, kvpager, kvpager.vllm, kvpager.vllm.books, kvpager.vllm.transfers, kvpager.vllm.settings;"
        "assert not {'vllm', 'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.32.7.dev3"])
def test_versions_that_it_is_tested_with(version: str) -> None:
    require_version(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0.0", "dev", "0.32"])
def test_other_versions_are_refused_with_the_range(version: str) -> None:
    with pytest.raises(ConfigError, match=rf"vLLM is {version}.*>=0.32.0,<0.33.0"):
        require_version(version)


def test_what_can_be_served_starts() -> None:
    require_config(config())


@pytest.mark.promise(6)
@pytest.mark.parametrize(
    ("part", "name", "value", "message"),
    [
        ("kv_transfer_config", "kv_load_failure_policy", "fail", "'fail', and must be 'recompute'"),
        ("kv_transfer_config", "kv_role", "kv_producer", "'kv_producer' is not 'kv_both'"),
        ("device_config", "device_type", "cuda", "'cuda'"),
        ("parallel_config", "pipeline_parallel_size", 2, "pipeline_parallel_size: 2"),
        ("parallel_config", "decode_context_parallel_size", 2, "decode_context_parallel_size: 2"),
        ("cache_config", "cache_dtype", "fp8_e4m3", "kv_cache_dtype: 'fp8_e4m3' is not one of auto"),
        ("cache_config", "kv_sharing_fast_prefill", True, "kv_sharing_fast_prefill"),
        ("load_config", "load_format", "dummy", "load_format: 'dummy'"),
        (None, "speculative_config", object(), "speculative"),
        (None, "weight_transfer_config", object(), "weight_transfer_config"),
    ],
)
def test_what_cannot_be_served_is_said(part: str | None, name: str, value: object, message: str) -> None:
    wrong = config()
    setattr(wrong if part is None else getattr(wrong, part), name, value)
    with pytest.raises(ConfigError, match=message):
        require_config(wrong)


def test_layers_of_other_kinds_are_refused() -> None:
    class FullAttentionSpec: ...

    class MambaSpec: ...

    groups = [SimpleNamespace(kv_cache_spec=kind()) for kind in (FullAttentionSpec, MambaSpec)]
    require_cache(groups[:1])
    for wrong in (groups, groups[1:], []):
        with pytest.raises(ConfigError, match="FullAttentionSpec alone"):
            require_cache(wrong)


def test_settings_as_they_are_given(tmp_path: Path) -> None:
    path = tmp_path / "new" / "store.db"
    settings = Settings.of({"store": str(path), "store_limit": "1GiB", "store_waiting": "8MiB"})
    store = settings.open(itemsize=2)
    try:
        assert store.room == 8 * 2**20
        assert store.stats().limit_bytes == 2**30
        assert path.exists()
    finally:
        store.close()


@pytest.mark.promise(6)
@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "a path is needed"),
        ({"store": ""}, "is not the path of a file"),
        ({"store": "/"}, "is not the path of a file"),
        ({"store": 3}, "3 is not the path"),
        ({"store": "a", "limit": "1GiB"}, "'limit' is not one of store, store_limit"),
        ({"store": "a", "store_limit": "much"}, "store_limit: 'much'"),
        ({"store": "a", "store_limit": "1KiB"}, "store_limit: 1KiB is less"),
        ({"store": "a", "store_sync": "often"}, "store_sync: 'often' is not one of normal, full"),
        ({"store": "a", "store_compression": "lz4"}, "store_compression: 'lz4' is not one of none, zstd"),
        ({"store": "a", "store_waiting": "0"}, "store_waiting"),
    ],
)
def test_wrong_settings_name_the_field(extra: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Settings.of(extra)
