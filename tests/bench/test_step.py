"""What a decode step is split into when its linear layers are packed and its layers run in compiled calls."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("kvpager._native")

import torch
from tests.small_llm import config

from kvpager import PagerConfig
from kvpager._native import PackedLayer
from kvpager.bench import stream
from kvpager.bench.step import PARTS, split, weight_bytes, weight_modules
from kvpager.hf import PagerCache, register
from kvpager.hf.accelerate import accelerate
from kvpager.hf.layer import fused
from kvpager.hf.packed import PackedGated
from kvpager.kernels.native import NativeKernel


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_packed_weights_are_found_and_each_is_counted_once(weights: str) -> None:
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(config(tie_word_embeddings=True)).to(torch.bfloat16).eval()
    before = weight_bytes(weight_modules(model))
    numbers = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96) + 64 * 260
    assert before == 2 * numbers
    report = accelerate(model, weights)
    assert report.replaced
    after = weight_bytes(weight_modules(model))
    assert report.packed_bytes <= after < 1.1 * report.packed_bytes  # int8 has scales beside it
    assert (after >= before) if weights == "bfloat16" else (after < 0.75 * before)


def packed_model() -> Any:
    from transformers import LlamaForCausalLM

    register()
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(config(), attn_implementation="kvpager").to(torch.bfloat16).eval()
    assert accelerate(model).replaced
    return model


@pytest.mark.parametrize("budget", [None, 64])
def test_every_part_is_seen_in_the_calls_that_users_get(budget: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "LEAST_BYTES", 2**20)
    monkeypatch.setattr(stream, "CACHES", 0)
    model = packed_model()

    def elsewhere(*_: Any) -> None:
        raise AssertionError("not in the compiled calls")

    monkeypatch.setattr(PackedGated, "forward", elsewhere)
    monkeypatch.setattr(NativeKernel, "attend", elsewhere)
    with PagerCache(model.config, PagerConfig(pool="4MiB", budget=budget), dtype="bfloat16") as cache:
        state = cache.pager._state
        watched = [model, cache, state.kernel, *model.modules(), *filter(None, map(fused, model.modules()))]
        assert len(watched) > len([*model.modules()]) + 3
        before = [vars(one).copy() for one in watched[2:]]
        prompt = torch.arange(160)[None] % 250 + 1
        with torch.inference_mode():
            logits = model(input_ids=prompt, cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
        found = split(model, cache, logits, lambda last: int(last.argmax()), stream.Stream(1), steps=2)
        assert [vars(one).keys() for one in watched[2:]] == [one.keys() for one in before]
        assert all(type(run.calls) is PackedLayer for run in filter(None, map(fused, model.modules())))
    for part in PARTS:
        assert (found.parts_ms[part] > 0) == (part != "selection" or budget is not None), part
    assert found.overhead_ms == pytest.approx(found.parts_ms["paging"] + found.parts_ms["model"])
