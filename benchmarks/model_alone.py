"""A model's forward without its attention: what linear layers, norms, rotary embedding and Python take.

    python benchmarks/model_alone.py [--rows 1,8,16] [--chunks 464,512] [--rounds 15] [--weights bfloat16]
                                     [--threads 2] [--cpu]

The model is SmolLM2-135M by its shape, with random weights. Attention is a function that returns zeros, and its cache
keeps nothing. Rows are a decode step of as many sequences, with logits for all; a chunk is a piece of a prompt, with
logits for its last token. A round takes each chunk once and each step eight times; medians and least times are shown.
With --cpu it is the time of one thread on its core, which other programs disturb less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig
from transformers.masking_utils import AttentionMaskInterface

from kvpager import _native
from kvpager.hf.accelerate import accelerate

CHUNK = 64  # from so many tokens on a case is a chunk of a prompt


class Nothing:
    """A cache that keeps nothing."""

    is_compileable = False

    def __init__(self, past: int) -> None:
        self._past = past

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._past

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._past

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._past + query_length, 0

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return keys, values


def zeros(module: Any, query: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
    """Attention that attends to nothing."""
    batch, heads, tokens, width = query.shape
    return query.new_zeros((batch, tokens, heads, width)), None


def build(weights: str) -> Any:
    AttentionInterface.register("nothing", zeros)
    AttentionMaskInterface.register("nothing", lambda *_, **__: None)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
    )
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="nothing", dtype=torch.bfloat16).eval()
    if weights != "unpacked":
        accelerate(model, weights)
    return model


def forward(model: Any, tokens: int, clock: Callable[[], float]) -> float:
    """Seconds of one forward of `tokens` tokens at positions of different sequences."""
    ids = torch.randint(0, 49152, (1, tokens))
    positions = torch.arange(tokens) * (1 if tokens >= CHUNK else 100)
    cache: Any = Nothing(100)
    start = clock()
    model(
        input_ids=ids,
        position_ids=positions[None],
        cache=cache,
        use_cache=True,
        logits_to_keep=1 if tokens >= CHUNK else 0,
    )
    return clock() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8,16")
    parser.add_argument("--chunks", default="464,512")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--weights", default="bfloat16", choices=("bfloat16", "int8", "unpacked"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu", action="store_true")
    settings = parser.parse_args()
    clock, threads = (time.thread_time, 1) if settings.cpu else (time.perf_counter, settings.threads)
    _native.set_threads(threads)
    torch.set_num_threads(1 if settings.weights != "unpacked" else threads)
    cases = [int(one) for one in (settings.rows + "," + settings.chunks).split(",") if one]
    model = build(settings.weights)
    times: dict[int, list[float]] = {tokens: [] for tokens in cases}
    with torch.inference_mode():
        for tokens in cases:
            forward(model, tokens, clock)
        for _ in range(settings.rounds):
            for tokens in cases:
                again = 1 if tokens >= CHUNK else 8
                times[tokens].extend(forward(model, tokens, clock) for _ in range(again))
    for tokens, some in times.items():
        seconds = statistics.median(some)
        print(
            json.dumps(
                {
                    "tokens": tokens,
                    "ms": round(1e3 * seconds, 2),
                    "least_ms": round(1e3 * min(some), 2),
                    "tokens_s": round(tokens / seconds),
                }
            )
        )


if __name__ == "__main__":
    main()
