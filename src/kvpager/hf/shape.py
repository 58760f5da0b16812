"""The shape of a transformers model's KV cache, and which architectures can be paged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast, get_args

import torch
from transformers import PreTrainedConfig

from kvpager.config import DType, KVShape
from kvpager.errors import ConfigError, UnsupportedModel

__all__ = ["architecture", "kv_shape", "page_dtype"]

# Architectures whose attention code can't be reached, although their configuration looks like any other.
_REFUSED = {
    "gpt_neox": "its attention doesn't hand its arguments to the cache",
    "gpt_neox_japanese": "its attention doesn't hand its arguments to the cache",
    "gpt_oss": "its softmax has learned sinks, which kvpager's attention doesn't compute",
}

# What an attribute of the configuration, when set, says about a model.
_REFUSED_IF_SET: dict[str, str] = {
    "is_encoder_decoder": "it is an encoder-decoder, and kvpager pages decoders alone",
    "kv_lora_rank": "it has multi-head latent attention (MLA), which keeps compressed keys",
    "num_kv_shared_layers": "its layers share keys and values with other layers",
    "attention_chunk_size": "it attends in chunks",
    "alibi": "its attention adds position biases (ALiBi)",
    "global_head_dim": "its layers differ in head_dim",
}

_STATE_SPACE = ("mamba_d_state", "ssm_cfg", "state_size", "block_types", "linear_num_value_heads")


def architecture(config: PreTrainedConfig) -> str:
    """The name of the architecture, for messages."""
    names = getattr(config, "architectures", None)
    return names[0] if names else str(getattr(config, "model_type", "") or type(config).__name__)


def kv_shape(model_config: PreTrainedConfig, dtype: str | None = None) -> KVShape:
    """The KV shape of a model, one entry a layer for sliding windows.

    `dtype` says how pages are held: "float32", "bfloat16" or "float16"; None takes the model's own.
    Raises UnsupportedModel, naming the architecture and the reason, for what can't be paged
    (encoder-decoders, MLA, state spaces and hybrids, GPT-NeoX, attention sinks, KV sharing, chunked
    attention), and ConfigError for an unknown dtype.
    """
    name = architecture(model_config)
    if getattr(model_config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name}: {_REFUSED_IF_SET['is_encoder_decoder']}")
    text = model_config.get_text_config(decoder=True)
    _refuse(text, name)
    layers = _same(text, name, lambda one: one.num_hidden_layers, "num_hidden_layers")
    heads = _same(text, name, lambda one: getattr(one, "num_attention_heads", None), "num_attention_heads")
    if not heads:
        raise UnsupportedModel(f"{name}: its configuration names no attention heads")
    kv_heads = _same(text, name, lambda one: getattr(one, "num_key_value_heads", None), "num_key_value_heads")
    head_dim = _same(text, name, lambda one: getattr(one, "head_dim", None), "head_dim")
    if head_dim is None:
        head_dim = text.hidden_size // heads
    value_dim = getattr(text, "v_head_dim", None)
    if value_dim is not None and value_dim != head_dim:
        raise UnsupportedModel(f"{name}: its values have {value_dim} channels and its keys {head_dim}")
    return KVShape(
        layers=layers,
        kv_heads=kv_heads if kv_heads is not None else heads,
        query_heads=heads,
        head_dim=head_dim,
        dtype=page_dtype(dtype if dtype is not None else getattr(text, "dtype", None)),
        windows=_windows(text, name),
    )


def page_dtype(dtype: str | torch.dtype | None) -> DType:
    """The name of a page's dtype, from a name, a torch dtype or None (float32, PyTorch's own default)."""
    text = "float32" if dtype is None else str(dtype).removeprefix("torch.")
    if text not in get_args(DType):
        raise ConfigError(f"dtype: {text!r} is not one of {', '.join(get_args(DType))}")
    return cast(DType, text)


def _refuse(text: PreTrainedConfig, name: str) -> None:
    kind = getattr(text, "model_type", "")
    if kind in _REFUSED:
        raise UnsupportedModel(f"{name}: {_REFUSED[kind]}")
    for attribute, reason in _REFUSED_IF_SET.items():
        if getattr(text, attribute, None):
            raise UnsupportedModel(f"{name}: {reason} ({attribute} is {getattr(text, attribute)!r})")
    if "reuse" in (getattr(text, "kv_sharing_modes", None) or ()):
        raise UnsupportedModel(f"{name}: {_REFUSED_IF_SET['num_kv_shared_layers']}")
    if not getattr(text, "is_causal", True):
        raise UnsupportedModel(f"{name}: its attention is not causal (is_causal is False)")
    if any(getattr(text, attribute, None) is not None for attribute in _STATE_SPACE):
        raise UnsupportedModel(f"{name}: it has state-space or recurrent layers, which keep no keys and values")
    for kind in getattr(text, "layer_types", None) or ():
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModel(
                f"{name}: it has layers of the kind {kind!r}; kvpager pages full_attention and sliding_attention"
            )


def _same(text: PreTrainedConfig, name: str, read: Callable[[Any], Any], field: str) -> Any:
    """A field of the configuration that must be the same in every layer."""
    if not getattr(text, "is_heterogeneous", False) or field == "num_hidden_layers":
        return read(text)
    values = {read(layer) for layer in text.per_layer_config}
    if len(values) > 1:
        raise UnsupportedModel(f"{name}: its layers differ in {field}: {sorted(values, key=str)}")
    return values.pop()


def _windows(text: PreTrainedConfig, name: str) -> tuple[int | None, ...] | None:
    """Each layer's sliding window, or None when every layer sees everything."""
    kinds = getattr(text, "layer_types", None)
    size = _same(text, name, lambda one: getattr(one, "sliding_window", None), "sliding_window")
    if size is None or (kinds is not None and "sliding_attention" not in kinds):
        return None
    layers: int = text.num_hidden_layers
    if kinds is None:
        return (int(size),) * layers
    return tuple(int(size) if kind == "sliding_attention" else None for kind in kinds[:layers])
