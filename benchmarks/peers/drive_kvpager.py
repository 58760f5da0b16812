"""kvpager's engine, for run.py: `kvpager bench engine` with the clock of driving.py, so that peers compare.

Its settings are those of EngineConfig and PagerOptions, `weights`, and `kv_bytes`, which is the pool's size.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import driving
import torch

from kvpager import __version__, build
from kvpager.engine.engine import EngineConfig
from kvpager.engine.params import SamplingParams

DEFAULT_BYTES = 2**30


class KVPager:
    """`kv_bytes` None leaves 1 GiB, which is more than any workload needs."""

    def __init__(self, model: str, settings: dict[str, Any]) -> None:
        self._token_bytes, kv_bytes = settings.pop("token_bytes"), settings.pop("kv_bytes") or DEFAULT_BYTES
        engine = {one.name: settings.pop(one.name) for one in fields(EngineConfig) if one.name in settings}
        self._weights = settings.pop("weights", "auto")
        options = build.PagerOptions(pool=f"{kv_bytes}B", **settings)
        config = EngineConfig(**engine)
        loaded = build.load_model(model, weights=self._weights, threads=torch.get_num_threads())
        self._engine = build.make_engine(loaded, options, config)
        self._settings = {**asdict(options), **asdict(config), "weights": self._weights}
        self._tokens: dict[str, int] = {}

    def facts(self) -> dict[str, Any]:
        pager = self._engine.stats().pager
        kv = {name: getattr(pager, name) for name in ("pool_bytes", "digest_bytes", "table_bytes", "swap_bytes")}
        return {
            "versions": {"kvpager": __version__, "torch": torch.__version__},
            "kv": {"tokens": pager.pool_bytes // self._token_bytes, **kv},
            "settings": self._settings,
        }

    def add(self, key: str, prompt: list[int], max_tokens: int) -> None:
        self._tokens[key] = 0
        self._engine.add(key, prompt, SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True))

    def step(self) -> list[tuple[str, int, bool]]:
        moved = []
        for output in self._engine.step():
            if output.error is not None:
                raise SystemExit(f"{output.request_id}: {output.error}")
            self._tokens[output.request_id] += len(output.token_ids)
            moved.append((output.request_id, self._tokens[output.request_id], output.finish_reason is not None))
        return moved

    def preemptions(self) -> int:
        return self._engine.stats().preemptions


if __name__ == "__main__":
    driving.run(KVPager)
