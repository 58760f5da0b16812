"""Time of one core to choose a batch's tokens, by setting: logits of the default model in the bundled text."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch

from kvpager.build import load_model
from kvpager.engine.params import SamplingParams
from kvpager.engine.sampler import Sampled, Sampler, SampleState
from kvpager.evaluation.forward import attention, forward, full_cache
from kvpager.evaluation.text import bundled_text

EXAMPLE = "example: python benchmarks/sampling.py --rows 16 --json"
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature 0": {"temperature": 0},
    "temperature 0, 5 log-probs": {"temperature": 0, "logprobs": 5},
    "temperature 0.8": {"temperature": 0.8},
    "temperature 0.8, top_p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "temperature 0.8, top_k 50, top_p 0.95": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "temperature 0.8, min_p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "temperature 2, top_p 0.95": {"temperature": 2.0, "top_p": 0.95},
    "temperature 0.8, top_p 0.95, all penalties": {
        "temperature": 0.8,
        "top_p": 0.95,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
    },
}


def model_logits(name: str, rows: int) -> tuple[torch.Tensor, list[int]]:
    """Logits at `rows` places of a text [rows, vocabulary], as the model computes them; and the text's tokens."""
    loaded = load_model(name)
    every = 25
    ids = loaded.tokenizer(bundled_text()[: 200 * rows], add_special_tokens=False)["input_ids"][: every * rows]
    with torch.inference_mode(), attention(loaded.model, "sdpa"):
        logits = forward(loaded.model, full_cache(loaded.model), ids)
    return logits[every - 1 :: every].clone(), ids


def least_ms(sampler: Sampler, logits: torch.Tensor, prompt: list[int], settings: dict[str, Any], runs: int) -> float:
    """The least time of the thread, since whatever else runs can only add to it; answers grow by a token a run."""
    params = SamplingParams(max_tokens=None, **settings)
    states = [SampleState(params, seed=row, prompt=prompt) for row in range(len(logits))]
    times = []
    for _ in range(runs + 1):  # the first is not counted
        start = time.thread_time()
        chosen = sampler.sample(logits, states)
        times.append(time.thread_time() - start)
        for state, one in zip(states, chosen, strict=True):
            assert isinstance(one, Sampled)
            state.accept(one.token)
    return min(times[1:]) * 1e3


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLE)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", type=int, default=16, help="rows of the batch (default: 16)")
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args(arguments)
    logits, prompt = model_logits(options.model, options.rows)
    torch.set_num_threads(1)
    sampler = Sampler(logits.shape[1], frozenset())
    figures = {name: least_ms(sampler, logits, prompt, settings, options.runs) for name, settings in SETTINGS.items()}
    if options.json:
        print(json.dumps({"rows": len(logits), "vocabulary": logits.shape[1], "ms": figures}))
        return
    for name, milliseconds in figures.items():
        print(f"{name:45} {milliseconds:6.2f} ms")


if __name__ == "__main__":
    main()
