"""OpenVINO GenAI's continuous batching in this process, for run.py. Its settings are those of `SchedulerConfig`,
besides `kv_bytes` and `properties` (of the device)."""

from __future__ import annotations

from typing import Any

import driving
import numpy as np
import openvino
import openvino_genai

BLOCK = 32  # tokens in a block of its cache on a CPU
DEFAULT_BYTES = 2**30


class OpenVINO:
    """`kv_bytes`: the most that its blocks may take; None leaves 1 GiB. Keys and values are float16 by default."""

    def __init__(self, model: str, settings: dict[str, Any]) -> None:
        token_bytes, kv_bytes = settings.pop("token_bytes"), settings.pop("kv_bytes") or DEFAULT_BYTES
        properties = settings.pop("properties", {"KV_CACHE_PRECISION": "f16"})
        self._settings = {
            "num_kv_blocks": kv_bytes // (BLOCK * token_bytes),
            "enable_prefix_caching": False,
            **settings,
        }
        scheduler = openvino_genai.SchedulerConfig()
        for name, value in self._settings.items():
            setattr(scheduler, name, value)
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties, {})
        tokens = scheduler.num_kv_blocks * BLOCK
        self._kv = {"bytes": tokens * token_bytes, "tokens": tokens, **properties}
        self._settings["max_num_batched_tokens"] = scheduler.max_num_batched_tokens
        self._settings["max_num_seqs"] = scheduler.max_num_seqs
        self._handles: dict[str, Any] = {}
        self._tokens: dict[str, int] = {}

    def facts(self) -> dict[str, Any]:
        versions = {"openvino": openvino.get_version(), "openvino_genai": openvino_genai.__version__}
        return {"versions": versions, "kv": self._kv, "settings": self._settings}

    def add(self, key: str, prompt: list[int], max_tokens: int) -> None:
        wanted = openvino_genai.GenerationConfig()
        wanted.max_new_tokens, wanted.ignore_eos, wanted.do_sample = max_tokens, True, False
        tensor = openvino.Tensor(np.array([prompt], dtype=np.int64))
        self._tokens[key] = 0
        self._handles[key] = self._pipeline.add_request(len(self._handles), tensor, wanted)

    def step(self) -> list[tuple[str, int, bool]]:
        self._pipeline.step()
        moved = []
        for key in list(self._tokens):
            handle, before = self._handles[key], self._tokens[key]
            while handle.can_read():
                self._tokens[key] += sum(len(one.generated_ids) for one in handle.read().values())
            ended = handle.get_status() != openvino_genai.GenerationStatus.RUNNING
            if self._tokens[key] > before or ended:
                moved.append((key, self._tokens[key], ended))
            if ended:
                del self._tokens[key]
        return moved

    def preemptions(self) -> None:
        """Its metrics do not count them."""


if __name__ == "__main__":
    driving.run(OpenVINO)
