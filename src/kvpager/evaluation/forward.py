"""Forwards in chunks, with one model and either attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from kvpager.errors import ConfigError
from kvpager.hf import PagerCache

__all__ = ["attention", "chunk_bounds", "forward", "full_cache", "full_cache_bytes"]


def chunk_bounds(tokens: int, chunk: int, tile: int) -> list[tuple[int, int]]:
    """(start, stop) of each forward. Raises ConfigError when `chunk` is not a multiple of `tile`."""
    if chunk < 1 or chunk % tile:
        raise ConfigError(f"chunk: {chunk} is not a multiple of tile, {tile}")
    return [(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk)]


@contextmanager
def attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Let the model attend with transformers' `name` inside the block, and as before after it."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def full_cache(model: PreTrainedModel) -> DynamicCache:
    """An empty cache that keeps everything: transformers' own."""
    return DynamicCache(config=model.config)


def full_cache_bytes(cache: DynamicCache) -> int:
    """Bytes of the keys and values that the cache holds."""
    layers: list[Any] = list(cache.layers)
    return sum(int(layer.keys.nbytes + layer.values.nbytes) for layer in layers if layer.keys is not None)


def forward(
    model: PreTrainedModel, cache: DynamicCache | PagerCache, token_ids: Sequence[int], last: bool = False
) -> torch.Tensor:
    """Logits [T, vocabulary] of one forward, or [1, vocabulary] of its last position."""
    inputs = torch.tensor([list(token_ids)], device=model.device)
    module: Any = model
    output = module(input_ids=inputs, cache=cache, use_cache=True, logits_to_keep=1 if last else 0)
    logits: torch.Tensor = output.logits[0]
    return logits
