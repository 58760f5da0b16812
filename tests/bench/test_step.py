"""What a decode step is split into when its linear layers are packed."""

from __future__ import annotations

import pytest

pytest.importorskip("kvpager._native")

import torch
from tests.small_llm import config

from kvpager.bench.step import weight_bytes, weight_modules
from kvpager.hf.accelerate import accelerate


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
