"""A tiny random Llama with a byte-level tokenizer and a chat template, on disk as folder or GGUF; no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CONTEXT = 512
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())  # one token a byte, so that é is two tokens and 😀 four
SPECIAL = ["<s>", "</s>", "<unk>"]
BEGIN, END = 0, 1
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %} a: {% endif %}"
)


def tokenizer(chat_template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Bytes as tokens, and "th" as one; no start token of its own, the chat template writes it."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *BYTES, "th"])}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[("t", "h")]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=chat_template
    )


def config(**more: Any) -> LlamaConfig:
    settings: dict[str, Any] = {
        "vocab_size": 260,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": BEGIN,
        "eos_token_id": END,
        "initializer_range": 0.25,
    }
    return LlamaConfig(**{**settings, **more})


def save_folder(path: Path, *, chat_template: str | None = TEMPLATE, dtype: str = "float32", **more: Any) -> Path:
    """Save model and tokenizer as a Hugging Face folder; the same seed gives the same weights."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(config(**more)).to(getattr(torch, dtype))
    model.save_pretrained(path)
    tokenizer(chat_template).save_pretrained(path)
    return path


def save_gguf(path: Path) -> Path:
    """Save the same kind of model as a GGUF file in float32 (weights differ from the folder's)."""
    hidden, layers, heads, kv_heads, inner = 64, 2, 4, 2, 96
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*SPECIAL, *BYTES, "th"])
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(BYTES) + 1))
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(BEGIN)
    writer.add_eos_token_id(END)
    writer.add_unk_token_id(2)
    writer.add_chat_template(TEMPLATE)
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (260, hidden),
        "output": (260, hidden),
        "output_norm": (hidden,),
    }
    for layer in range(layers):
        parts = {
            "attn_norm": (hidden,),
            "ffn_norm": (hidden,),
            "attn_q": (hidden, hidden),
            "attn_k": (hidden // 2, hidden),
            "attn_v": (hidden // 2, hidden),
            "attn_output": (hidden, hidden),
            "ffn_gate": (inner, hidden),
            "ffn_up": (inner, hidden),
            "ffn_down": (hidden, inner),
        }
        shapes |= {f"blk.{layer}.{part}": shape for part, shape in parts.items()}
    for name, shape in shapes.items():
        values = np.ones(shape) if len(shape) == 1 else rng.standard_normal(shape) * 0.2
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
