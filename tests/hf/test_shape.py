"""Which architectures can be paged, and the shape of their keys and values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf

from hf import tiny
from kvpager import KVShape
from kvpager.errors import ConfigError, UnsupportedModel
from kvpager.hf import kv_shape


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("llama", KVShape(2, 2, 4, 16)),
        ("llama-mqa", KVShape(2, 1, 4, 16)),
        ("llama-h24", KVShape(2, 2, 4, 24)),
        ("qwen2", KVShape(2, 2, 4, 16)),
        ("mistral", KVShape(2, 2, 4, 16, windows=(32, 32))),
        ("qwen3-sliding", KVShape(2, 2, 4, 16, windows=(32, None))),
        ("gemma2", KVShape(2, 2, 4, 16, windows=(32, None))),
        ("gemma3", KVShape(2, 2, 4, 16, windows=(32, None))),
        ("phi", KVShape(2, 2, 4, 16)),
        ("phi3", KVShape(2, 2, 4, 16, windows=(32, 32))),
    ],
)
def test_the_shape_is_the_models_own(name: str, shape: KVShape) -> None:
    assert kv_shape(tiny.CONFIGS[name](), "float32") == shape


@pytest.mark.parametrize("dim", [16, 24, 64, 80, 96, 128])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_bytes_a_token_count_the_explicit_head_dim(dim: int, heads: int) -> None:
    shape = kv_shape(tiny.llama(kv_heads=heads, dim=dim), "bfloat16")
    assert shape.token_bytes == 2 * 2 * heads * dim * 2


def test_pages_have_the_models_dtype_unless_another_is_given() -> None:
    config = tiny.llama()
    assert kv_shape(config).dtype == "float32"
    config.dtype = torch.bfloat16
    assert kv_shape(config).dtype == "bfloat16"
    assert kv_shape(config, "float16").dtype == "float16"


@pytest.mark.promise(6)
def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(ConfigError, match=r"int4.*float32, bfloat16, float16, int8"):
        kv_shape(tiny.llama(), "int4")


REFUSED: dict[str, tuple[Any, str]] = {
    "encoder-decoder": (tf.T5Config(num_layers=1), "encoder-decoder"),
    "MLA": (tf.DeepseekV3Config(num_hidden_layers=2), "MLA"),
    "state space": (tf.MambaConfig(num_hidden_layers=2), "attention heads|state-space"),
    "recurrent": (tf.RwkvConfig(num_hidden_layers=2), "attention heads"),
    "hybrid": (tf.JambaConfig(num_hidden_layers=2), "state-space"),
    "GPT-NeoX": (tf.GPTNeoXConfig(num_hidden_layers=2), "hand its arguments"),
    "sinks": (tf.GptOssConfig(num_hidden_layers=2), "sinks"),
    "shared": (tf.Gemma3nTextConfig(num_hidden_layers=30), "share keys and values"),
    "shared in Gemma 4": (tf.Gemma4TextConfig(num_kv_shared_layers=2), "share keys and values"),
    "chunked": (tf.Llama4TextConfig(num_hidden_layers=2), "chunks"),
    "linear": (tf.Qwen3NextConfig(num_hidden_layers=4), "state-space|linear_attention"),
}


@pytest.mark.promise(6)
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_paged_is_refused_by_name(kind: str) -> None:
    config, reason = REFUSED[kind]
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        kv_shape(config)
    assert str(caught.value).startswith(config.model_type)


def test_the_architecture_of_a_loaded_model_is_named_as_its_class() -> None:
    config = tf.GPTNeoXConfig(num_hidden_layers=2, architectures=["GPTNeoXForCausalLM"])
    with pytest.raises(UnsupportedModel, match=r"^GPTNeoXForCausalLM: "):
        kv_shape(config)
