"""Who a worker of vLLM's is, as far as the bytes of its blocks depend on it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

from kvpager.errors import ModelNotFound
from kvpager.models.fingerprint import fingerprint_files, settings_of
from kvpager.vllm.keys import Identity

__all__ = ["identify", "itemsize"]


def identify(config: Any, caches: Mapping[str, Any]) -> Identity:
    """From vLLM's VllmConfig and its tensors of keys and values, by layer. Reads all weights' files once.

    Raises ModelNotFound where there are none.
    """
    model = config.model_config
    rank = (get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size())
    return Identity(
        weights=fingerprint_files(_path(model.model, model.revision, config.load_config.download_dir)),
        model=settings_of(model.hf_text_config.to_dict()) | {"whole": settings_of(model.hf_config.to_dict())},
        numbers=_numbers(config, caches),
        layout=_layout(config, caches),
        rank=rank,
    )


def itemsize(cache_config: Any) -> int:
    """Bytes of a number in the blocks, of a KVCacheConfig."""
    size: int = cache_config.kv_cache_groups[0].kv_cache_spec.dtype.itemsize
    return size


def _numbers(config: Any, caches: Mapping[str, Any]) -> dict[str, object]:
    layers = config.compilation_config.static_forward_context
    return {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "instructions": sorted({str(getattr(layers.get(name), "isa", None)) for name in caches}),
        "dtype": str(config.model_config.dtype),
        "quantization": str(config.model_config.quantization),
        "compilation": str(config.compilation_config.mode),
    }


def _layout(config: Any, caches: Mapping[str, Any]) -> dict[str, object]:
    blocks = {name: cache[0] for name, cache in caches.items()}
    return {
        "order": str(config.cache_config.kv_cache_layout),
        "block_size": config.cache_config.block_size,
        "cache_dtype": str(config.cache_config.cache_dtype),
        "layers": [[name, str(one.dtype), list(one.shape)] for name, one in blocks.items()],
    }


def _path(name: str, revision: str | None, download_dir: str | None) -> Path:
    """Where the weights lie: a folder or file, or what vLLM has just loaded from the Hub."""
    path = Path(name)
    if path.exists():
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, cache_dir=download_dir, local_files_only=True))
    except Exception as error:  # of many kinds; each means that it is not there
        raise ModelNotFound(
            f"{name}: its weights are not found on this machine, and so can't be told: {error}"
        ) from error
