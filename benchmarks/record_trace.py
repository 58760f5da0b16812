"""Record the queries and keys of one run of the echo task, for digest_quality.py and eviction_policies.py.

Writes an .npz with ids [N], q [layers, query_heads, N, D] and k, v [layers, kv_heads, N, D], float32, rotated.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvpager.models import load


def main() -> None:
    """Read the text twice and keep what attention saw."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python benchmarks/record_trace.py --text book.txt --passage-at 0 --between-at 2000 trace.npz",
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--passage-at", type=int, default=0, metavar="TOKEN")
    parser.add_argument("--between-at", type=int, default=2000, metavar="TOKEN")
    parser.add_argument("--passage", type=int, default=384, metavar="TOKENS")
    parser.add_argument("--between", type=int, default=1152, metavar="TOKENS")
    args = parser.parse_args()
    seen: dict[str, dict[int, np.ndarray]] = {"q": {}, "k": {}, "v": {}}

    def recording(module, query, key, value, mask, **options):  # type: ignore[no-untyped-def]
        for name, states in (("q", query), ("k", key), ("v", value)):
            seen[name][module.layer_idx] = states[0].float().numpy().copy()
        return sdpa_attention_forward(module, query, key, value, mask, is_causal=True, **options)

    ALL_ATTENTION_FUNCTIONS.register("recording", recording)
    loaded = load(args.model, dtype="float32", attn_implementation="recording")
    ids = loaded.tokenizer(args.text.read_text(), add_special_tokens=False)["input_ids"]
    passage = ids[args.passage_at : args.passage_at + args.passage]
    between = ids[args.between_at : args.between_at + args.between]
    if len(passage) < args.passage or len(between) < args.between:
        parser.error(f"the text has {len(ids)} tokens, too few for that")
    tokens = passage + between + passage
    with torch.no_grad():
        loaded.model(torch.tensor([tokens]), use_cache=False, logits_to_keep=1)
    layers = sorted(seen["q"])
    stacked = {name: np.stack([arrays[layer] for layer in layers]) for name, arrays in seen.items()}
    np.savez(args.output, ids=np.array(tokens), **stacked)


if __name__ == "__main__":
    main()
