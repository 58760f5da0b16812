"""vLLM's engine in this process, for run.py. Its settings are arguments of `LLM`, besides `kv_bytes`."""

from __future__ import annotations

import os
from typing import Any

import driving

# The engine in a process of its own would hand every token through a socket.
os.environ.update(HF_HUB_OFFLINE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import torch
import vllm
from vllm import LLM, SamplingParams


class VLLM:
    """`kv_bytes`: the most that its blocks may take; None leaves 1 GiB. `block_size` must then be given."""

    def __init__(self, model: str, settings: dict[str, Any]) -> None:
        options = {"dtype": "bfloat16", "max_model_len": 8192, "enable_prefix_caching": False, **settings}
        self._bytes = options.pop("kv_bytes", None)
        token_bytes = options.pop("token_bytes")  # in 16 bits
        if options.get("kv_cache_dtype", "auto").startswith("fp8"):
            token_bytes //= 2
        if self._bytes is not None:
            options["num_gpu_blocks_override"] = self._bytes // (options["block_size"] * token_bytes)
        self._engine = LLM(model, disable_log_stats=False, **options).llm_engine
        cache = self._engine.vllm_config.cache_config
        tokens = cache.block_size * cache.num_gpu_blocks
        self._kv = {"bytes": tokens * token_bytes, "tokens": tokens, "dtype": cache.cache_dtype}
        self._settings = {
            **options,
            "block_size": cache.block_size,
            "blocks": cache.num_gpu_blocks,
            "max_num_batched_tokens": self._engine.vllm_config.scheduler_config.max_num_batched_tokens,
            "max_num_seqs": self._engine.vllm_config.scheduler_config.max_num_seqs,
            "threads": torch.get_num_threads(),
            "preloaded": os.environ.get("LD_PRELOAD", ""),
        }

    def facts(self) -> dict[str, Any]:
        return {
            "versions": {"vllm": vllm.__version__, "torch": torch.__version__},
            "kv": self._kv,
            "settings": self._settings,
        }

    def add(self, key: str, prompt: list[int], max_tokens: int) -> None:
        wanted = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self._engine.add_request(key, {"prompt_token_ids": prompt}, wanted)

    def step(self) -> list[tuple[str, int, bool]]:
        return [(one.request_id, len(one.outputs[0].token_ids), one.finished) for one in self._engine.step()]

    def preemptions(self) -> int:
        return sum(one.value for one in self._engine.get_metrics() if one.name == "vllm:num_preemptions")


if __name__ == "__main__":
    driving.run(VLLM)
