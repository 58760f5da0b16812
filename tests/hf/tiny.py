"""Tiny random models of each architecture: float32, fixed seeds, made from configurations (no network, no files)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

VOCABULARY = 128
WINDOW = 32
FULL, SLIDING = "full_attention", "sliding_attention"

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.25,  # large enough for attention that is not flat
}


def _config(kind: type[PreTrainedConfig], heads: int = 4, kv_heads: int = 2, dim: int = 16, **more: Any) -> Any:
    settings = {**_COMMON, "hidden_size": heads * dim, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return kind(**{**settings, **more})


def llama(kv_heads: int = 2, dim: int = 16, hidden: int = 64, **more: Any) -> Any:
    """Llama with its head_dim set explicitly, so that hidden size / heads may be something else."""
    return _config(LlamaConfig, kv_heads=kv_heads, head_dim=dim, hidden_size=hidden, **more)


# L, M, S and H are the models that BUGS.md's inputs were written for.
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": llama,  # L
    "llama-mqa": lambda: llama(kv_heads=1),  # M
    "llama-h24": lambda: llama(dim=24),  # H
    "qwen2": lambda: _config(Qwen2Config),
    "qwen3": lambda: _config(Qwen3Config, head_dim=16),
    "mistral": lambda: _config(MistralConfig, head_dim=16, sliding_window=WINDOW),
    "qwen3-sliding": lambda: _config(  # S
        Qwen3Config,
        head_dim=16,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=[SLIDING, FULL],
    ),
    "gemma2": lambda: _config(
        Gemma2Config,
        head_dim=16,
        sliding_window=WINDOW,
        layer_types=[SLIDING, FULL],
        query_pre_attn_scalar=24,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=30.0,
    ),
    "gemma3": lambda: _config(
        Gemma3TextConfig,
        head_dim=16,
        sliding_window=WINDOW,
        layer_types=[SLIDING, FULL],
        query_pre_attn_scalar=24,
    ),
    "phi": lambda: _config(PhiConfig, kv_heads=2),
    "phi3": lambda: _config(Phi3Config, sliding_window=WINDOW, rope_parameters=None),
}
ARCHITECTURES = tuple(CONFIGS)


def build(config: Any, attention: str = "kvpager", seed: int = 0) -> Any:
    """A model with random weights in evaluation mode; the same seed gives the same weights."""
    torch.manual_seed(seed)
    make: Callable[..., Any] = AutoModelForCausalLM.from_config
    model = make(config, attn_implementation=attention, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


@cache
def pair(name: str, oracle: str = "eager") -> tuple[Any, Any]:
    """A model under kvpager, and the same weights under an attention of transformers' own. Don't change them."""
    return build(CONFIGS[name]()), build(CONFIGS[name](), oracle)


def tokens(count: int, seed: int = 0, rows: int = 1) -> torch.Tensor:
    """Random ids [rows, count], none of them the padding id."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (rows, count), generator=generator)


def padded(prompts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts [1, n] side by side with padding on the left: ids and attention mask [rows, longest]."""
    longest = max(prompt.shape[1] for prompt in prompts)
    ids = torch.zeros((len(prompts), longest), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - prompt.shape[1] :] = prompt[0]
        mask[row, longest - prompt.shape[1] :] = 1
    return ids, mask
