"""How large a pool is: from what a user asked for, a request and a model's shape to the pager's configuration."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvpager.config import (
    DEFAULT_POOL_BYTES,
    DigestKind,
    DType,
    KernelName,
    KVShape,
    Mode,
    PagerConfig,
    PolicyName,
    parse_size,
)
from kvpager.errors import ConfigError
from kvpager.models.cache import cache_directory

if TYPE_CHECKING:
    from kvpager.engine.engine import EngineConfig

__all__ = [
    "PagerOptions",
    "engine_pager_config",
    "full_frames",
    "least_frames",
    "pager_config",
    "pool_frames",
    "require_frames",
]

PREFILL_CHUNK = 512  # tokens of a prompt that one forward reads, where there is room for them
MEMORY_SHARE = 1.5  # of the full KV: more than all frames with their digests and tables can take
FREE_SHARE = 0.4  # of the memory that is free once the model is there: an engine's pool by default
HELD_SHARE = 4  # times the KV that `memory` would hold: what an engine's requests may hold together, in swap too
MOST_POOL_BYTES = 4 * 2**30  # that an engine takes by default, however much is free

_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")


@dataclass(frozen=True)
class PagerOptions:
    """What a user says about paging, before the request and the model are known.

    pool        text: frames ("512"), a size ("64MiB"), or a share of the request's full KV ("25%"); None: see
                `pager_config`.
    memory      text: a size that bounds frames, digests and tables together; excludes `pool`.
    budget      past tokens a KV head attends to; None for all.
    swap        "memory", a path (a new file, or a folder), or None for a file of its own under the cache directory.
    kv_dtype    how pages are held; None for the model's own number format.
    The others are as in :class:`~kvpager.config.PagerConfig`.
    """

    pool: str | None = None
    memory: str | None = None
    budget: int | None = None
    mode: Mode = "recall"
    policy: PolicyName = "attention"
    digest: DigestKind = "2bit"
    page_size: int = 16
    tile: int = 64
    swap: str | None = None
    swap_limit: str = "64GiB"
    kernel: KernelName = "auto"
    kv_dtype: DType | None = None
    seed: int = 0

    def settings(self, tokens: int | None = None) -> PagerConfig:
        """All but the pool's size, checked; raises ConfigError. `tokens` is the most that will be held."""
        return PagerConfig(
            max_tokens=tokens,
            budget=self.budget,
            mode=self.mode,
            policy=self.policy,
            digest=self.digest,
            page_size=self.page_size,
            tile=self.tile,
            swap=_swap(self),
            swap_limit=self.swap_limit,
            seed=self.seed,
            kernel=self.kernel,
        )


def full_frames(tokens: int, shape: KVShape, page_size: int) -> int:
    """Frames that hold every page of `tokens` tokens of one sequence."""
    return -(-tokens // page_size) * shape.layers * shape.kv_heads


def pool_frames(pool: str, tokens: int, shape: KVShape, page_size: int) -> int:
    """The frames that `pool` names: frames, a size, or a share of the full KV of `tokens` tokens.

    Raises ConfigError that names the value and the three forms.
    """
    percent = _PERCENT.fullmatch(pool)
    if percent is not None:
        share = float(percent.group(1)) / 100
        if not 0 < share <= 1:
            raise ConfigError(f"pool: {pool!r} is not above 0% and at most 100%")
        return max(1, int(full_frames(tokens, shape, page_size) * share))
    if pool.strip().isdigit():
        frames = int(pool)
        if frames < 1:
            raise ConfigError(f"pool: {pool!r} is not above zero")
        return frames
    try:
        size = parse_size(pool, "pool")
    except ConfigError as error:
        raise ConfigError(f"{error}, or frames as in 512, or a share of the full KV as in 25%") from None
    frames = size // shape.page_bytes(page_size)
    if frames < 1:
        raise ConfigError(f"pool: {pool!r} holds no page; one is {shape.page_bytes(page_size)} bytes")
    return frames


def pager_config(options: PagerOptions, tokens: int, shape: KVShape) -> PagerConfig:
    """The pager's configuration for a request of `tokens` tokens (prompt and answer together).

    Without `pool` and `memory` the pool holds the request's full KV, up to 256 MiB (in mode "discard": the budget
    and a prefill's chunk); `memory` above all that the request can use gives the same pool. Raises ConfigError when
    a value is out of its range, when both `pool` and `memory` are given, or when the pool is less than the pager can
    work with.
    """
    if options.pool is not None and options.memory is not None:
        raise ConfigError("memory: give either --memory or --pool, not both")
    config = options.settings(tokens)
    page_bytes = shape.page_bytes(options.page_size)
    least = least_frames(config, shape, tokens)
    whole = max(full_frames(tokens, shape, options.page_size), least)
    if options.pool is not None:
        frames = pool_frames(options.pool, tokens, shape, options.page_size)
        require_frames(f"pool: {options.pool}", frames, least, shape.page_bytes(options.page_size))
        return replace(config, pool=frames)
    if options.memory is not None and parse_size(options.memory, "memory") < MEMORY_SHARE * whole * page_bytes:
        return replace(config, memory=options.memory)
    if options.mode == "discard":  # never holds more than its budget, and one layer's new tokens on top
        return replace(config, pool=least + -(-min(tokens, PREFILL_CHUNK) // options.page_size) * shape.kv_heads)
    limit = whole if options.memory is not None else max(DEFAULT_POOL_BYTES // page_bytes, least)
    return replace(config, pool=min(whole, limit))


def least_frames(config: PagerConfig, shape: KVShape, tokens: int) -> int:
    """The smallest pool, in frames, with which a pager of this configuration can serve one request of `tokens`."""
    from kvpager.core.pager import Pager

    with Pager(shape, replace(config, pool=1, memory=None, max_tokens=None, swap="memory")) as pager:
        return pager.minimum_frames(tokens=tokens)


def require_frames(what: str, frames: int, least: int, page_bytes: int) -> None:
    """Raise ConfigError, with the number needed, when `frames` are fewer than `least`; `what` names the setting."""
    if frames < least:
        raise ConfigError(
            f"{what} gives {frames} frame{'s' * (frames != 1)}, but this model and request need at least {least} "
            f"({least * page_bytes / 2**20:.2f} MiB of frames)"
        )


def _swap(options: PagerOptions) -> str | Path:
    if options.swap == "memory" or options.mode == "discard":
        return "memory"
    # In a folder every pager makes a file of its own, which is gone when the pager closes or the process ends.
    return Path(options.swap) if options.swap is not None else cache_directory() / "swap"


def engine_pager_config(
    options: PagerOptions, config: EngineConfig, shape: KVShape, max_model_len: int, free: int | None
) -> PagerConfig:
    """The pager's configuration for an engine that serves sequences of up to `max_model_len` tokens.

    Without `pool` and `memory` the pool holds the full KV of all sequences at their longest, but no more than 40 % of
    `free` (bytes that the process may still take; None where that is not known) and 4 GiB, and no less than one
    sequence needs. As a share in per cent, `pool` is of that full KV. Raises ConfigError as `pager_config` does.
    """
    if options.pool is not None and options.memory is not None:
        raise ConfigError("memory: give either --memory or --pool, not both")
    tokens = max_model_len * config.max_num_seqs
    page_bytes = shape.page_bytes(options.page_size)
    least = least_frames(options.settings(max_model_len), shape, max_model_len)
    if options.memory is not None:
        # digests and tables grow with the tokens held, in swap too: so many that they leave most of it to frames
        held = HELD_SHARE * parse_size(options.memory, "memory") // shape.token_bytes
        return replace(options.settings(min(tokens, max(held, max_model_len))), memory=options.memory)
    settings = options.settings()
    if options.pool is not None:
        frames = pool_frames(options.pool, tokens, shape, options.page_size)
        require_frames(f"pool: {options.pool}", frames, least, page_bytes)
        return replace(settings, pool=frames)
    most = MOST_POOL_BYTES if free is None else min(MOST_POOL_BYTES, int(free * FREE_SHARE))
    return replace(settings, pool=max(least, min(full_frames(tokens, shape, options.page_size), most // page_bytes)))
