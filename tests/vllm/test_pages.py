"""vLLM's tensors as bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvpager.errors import ConfigError
from kvpager.vllm.pages import Pages, views


def caches(count: int = 2, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {f"layer {layer}": torch.randn(5, 2, 4, 6).to(dtype) for layer in range(count)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_block_is_copied_out_and_back_bit_by_bit(dtype: torch.dtype) -> None:
    held = caches(dtype=dtype)
    pages = Pages(views(held), "layout")
    assert (pages.count, pages.nbytes) == (2, 2 * held["layer 0"][0].nbytes)
    payload = pages.read(3)
    assert payload.shape == (2, pages.page_bytes)
    before = {name: cache.clone() for name, cache in held.items()}
    pages.write(1, payload)
    for name, cache in held.items():
        assert torch.equal(cache[1], before[name][3])
        for block in (0, 2, 3, 4):
            assert torch.equal(cache[block], before[name][block])


def test_what_was_read_is_a_copy() -> None:
    held = caches()
    pages = Pages(views(held), "layout")
    payload = pages.read(0)
    kept = payload.copy()
    held["layer 0"][0] = 0
    assert np.array_equal(payload, kept)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"a": torch.zeros(4, 2, 6).transpose(0, 1)}, "no single pieces"),
        ({"a": torch.zeros(2, 4, 6).transpose(1, 2)}, "no single pieces"),
        ({"a": torch.zeros(4, 8)[::2]}, "no single pieces"),
        ({"a": torch.zeros(4, 8), "b": torch.zeros(4, 9)}, "unequal sizes"),
        ({"a": [torch.zeros(4, 8)]}, "one tensor is needed"),
        ({"a": torch.zeros(4, 8, device="meta")}, "lie on meta"),
    ],
)
def test_other_layouts_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        views(wrong)
