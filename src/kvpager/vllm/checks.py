"""What the connector can't serve, said when vLLM starts."""

from __future__ import annotations

import re
from typing import Any

from kvpager.errors import ConfigError

__all__ = ["OLDEST", "YOUNGER", "require_cache", "require_config", "require_version"]

OLDEST, YOUNGER = (0, 32, 0), (0, 33, 0)
"""vLLM's versions that it is tested with: from the first to before the second. Its interface changes between them."""

_NUMBERS = ("auto", "bfloat16", "float16", "float32")


def require_version(version: str) -> None:
    """Raises ConfigError for a vLLM that the connector was not tested with."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    found = tuple(int(part) for part in match.groups()) if match else ()
    if not OLDEST <= found < YOUNGER:
        allowed = f">={'.'.join(map(str, OLDEST))},<{'.'.join(map(str, YOUNGER))}"
        raise ConfigError(f"vLLM is {version}; this version of kvpager's connector works with {allowed}")


def require_config(config: Any) -> None:
    """Raises ConfigError for a setting of vLLM's (its VllmConfig) that the connector can't serve."""
    transfer, cache, parallel = config.kv_transfer_config, config.cache_config, config.parallel_config
    if transfer.kv_load_failure_policy != "recompute":
        raise ConfigError(
            f"kv_load_failure_policy: it is {transfer.kv_load_failure_policy!r}, and must be 'recompute': what can't "
            "be loaded is computed, and no request fails for it"
        )
    if transfer.kv_role != "kv_both":
        raise ConfigError(f"kv_role: {transfer.kv_role!r} is not 'kv_both'")
    if config.device_config.device_type != "cpu":
        raise ConfigError(f"device: {config.device_config.device_type!r}; the connector works with vLLM's CPU build")
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name) != 1:
            raise ConfigError(f"{name}: {getattr(parallel, name)} is not 1")
    if config.speculative_config is not None:
        raise ConfigError("speculative decoding: blocks would be saved with tokens that were not accepted")
    if cache.cache_dtype not in _NUMBERS:
        raise ConfigError(f"kv_cache_dtype: {cache.cache_dtype!r} is not one of {', '.join(_NUMBERS)}")
    if cache.kv_sharing_fast_prefill:
        raise ConfigError("kv_sharing_fast_prefill: it must be off")
    if config.load_config.load_format == "dummy":
        raise ConfigError("load_format: 'dummy' weights have no files by which they could be told")
    if getattr(config, "weight_transfer_config", None) is not None:
        raise ConfigError("weight_transfer_config: weights must not change while vLLM runs")


def require_cache(groups: Any) -> None:
    """Raises ConfigError for a cache (the groups of its KVCacheConfig) whose layers are not all of one plain kind."""
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    if kinds != ["FullAttentionSpec"]:
        raise ConfigError(
            f"the model's layers keep {', '.join(kinds) or 'nothing'}; FullAttentionSpec alone can be stored"
        )
