"""An engine's settings, and what they come to with a model and a pager."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvpager.config import DEFAULT_POOL_BYTES, KVShape, PagerConfig, parse_size
from kvpager.errors import ConfigError
from kvpager.hf.ragged import batch_length
from kvpager.models import LoadedModel

__all__ = ["EngineConfig", "model_length", "pager_settings", "step_tokens"]


@dataclass(frozen=True)
class EngineConfig:
    """How an engine serves.

    max_num_seqs            sequences that run at once; a request with n answers counts n
    max_num_batched_tokens  the most tokens of one step: decodes first, then chunks of prompts in whole tiles
    max_model_len           the most tokens of prompt and answer together; None for the model's own limit
    max_queue               requests that may wait
    enable_prefix_caching   share what was computed for the same beginning of a prompt; where the pager's prefix_tokens
                            is 0, as many tokens of closed sequences are kept for it as the pool holds
    seed                    of the seeds that requests without one are given
    """

    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    max_queue: int = 1024
    enable_prefix_caching: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("max_num_seqs", 1), ("max_num_batched_tokens", 1), ("max_model_len", 2), ("max_queue", 0)):
            value = getattr(self, name)
            if name == "max_model_len" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ConfigError(f"{name}: {value!r} is not a whole number from {low} on")


def pager_settings(config: EngineConfig, pager: PagerConfig, shape: KVShape) -> PagerConfig:
    """The pager's settings, with what is kept of closed sequences as `enable_prefix_caching` says."""
    if not config.enable_prefix_caching:
        return replace(pager, prefix_tokens=0)
    if pager.prefix_tokens or pager.mode == "discard":
        return pager
    if isinstance(pager.pool, int):
        size = pager.pool * shape.page_bytes(pager.page_size)
    else:
        size = parse_size(pager.memory or pager.pool or DEFAULT_POOL_BYTES)
    return replace(pager, prefix_tokens=size // shape.token_bytes)


def model_length(config: EngineConfig, loaded: LoadedModel) -> int:
    """The most tokens of prompt and answer together. Raises ConfigError where the model can't read as many."""
    asked = config.max_model_len
    limits = (loaded.context_length, batch_length(loaded.model.config))
    own = min((limit for limit in limits if limit is not None), default=None)
    if own is None and asked is None:
        raise ConfigError("max_model_len: the model doesn't say how many tokens it can read; give a number")
    if own is not None and asked is not None and asked > own:
        raise ConfigError(f"max_model_len: {asked} is more than the model's own limit, {own}")
    return asked or own or 0


def step_tokens(config: EngineConfig, tile: int) -> int:
    """The token budget of a step. Raises ConfigError when a prompt could never get a tile of it."""
    least = tile + config.max_num_seqs
    if config.max_num_batched_tokens < least:
        raise ConfigError(
            f"max_num_batched_tokens: {config.max_num_batched_tokens} is less than {least}: a tile ({tile}) and a "
            f"token for each of max_num_seqs ({config.max_num_seqs})"
        )
    return config.max_num_batched_tokens
