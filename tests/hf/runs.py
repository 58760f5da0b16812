"""Running a model in forwards of chosen sizes, and pools of chosen sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from transformers import DynamicCache

from kvpager import KVShape, Pager, PagerConfig
from kvpager.hf import PagerCache, kv_shape

SMALL = PagerConfig(group_pages=4)  # groups so small that a short sequence takes several


def minimum(shape: KVShape, config: PagerConfig, rows: int = 1) -> int:
    """The smallest pool for `rows` sequences, in frames."""
    with Pager(shape, config) as pager:
        return pager.minimum_frames(rows)


def smallest(model_config: Any, config: PagerConfig, rows: int = 1) -> PagerConfig:
    """`config` with the smallest pool that a model takes."""
    return replace(config, pool=minimum(kv_shape(model_config), config, rows))


@contextmanager
def paged(
    model: Any, config: PagerConfig = SMALL, *, rows: int = 1, least: bool = True, pager: Pager | None = None
) -> Iterator[PagerCache]:
    """A PagerCache (with the smallest pool unless `least` is off), whose books balance at the end."""
    if pager is None and least:
        config = smallest(model.config, config, rows)
    cache = PagerCache(model.config, None if pager is not None else config, pager=pager)
    try:
        yield cache
        cache.pager.check()
        cache.reset()
        cache.pager.check()
        if config.prefix_tokens == 0 and pager is None:
            assert cache.stats().frames_used == 0
        assert cache.stats().sequences == 0 or pager is not None
    finally:
        cache.close()


def forwards(model: Any, ids: torch.Tensor, cache: Any, chunks: list[int], **more: Any) -> torch.Tensor:
    """Logits of all columns, [rows, columns, vocabulary], from forwards of the given sizes in order."""
    assert sum(chunks) == ids.shape[1]
    parts, start = [], 0
    for size in chunks:
        parts.append(model(ids[:, start : start + size], cache=cache, **more).logits)
        start += size
    return torch.cat(parts, dim=1)


def cut(total: int, chunk: int, decode: int = 0) -> list[int]:
    """Sizes of the forwards of a prefill in chunks, then `decode` tokens one at a time."""
    prefill = total - decode
    sizes = [chunk] * (prefill // chunk) + ([prefill % chunk] if prefill % chunk else [])
    return sizes + [1] * decode


def own_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The model's own answer in one forward: [rows, columns, vocabulary]."""
    logits: torch.Tensor = model(ids, cache=DynamicCache(config=model.config)).logits
    return logits


def watch(cache: PagerCache, observer: Callable[[Any], None]) -> None:
    """Have every tile of a cache's pager observed."""
    cache.pager.observers.append(observer)
