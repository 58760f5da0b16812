"""What weights in other formats change: predictions of a text against the same model in float32.

Full attention of transformers' own throughout; only the linear layers differ.
"""

from __future__ import annotations

import argparse
import json

import torch

from kvpager.evaluation.figures import Divergence, token_losses
from kvpager.evaluation.text import bundled_text, read_text
from kvpager.hf.accelerate import accelerate
from kvpager.models import load

FORMATS = {"bfloat16, PyTorch": None, "bfloat16, packed": "bfloat16", "int8, packed": "int8"}


def main() -> None:
    """Print a row for each format."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog="example: python benchmarks/weight_formats.py --tokens 1024"
    )
    parser.add_argument("--model", default="smollm2-135m", help="default: %(default)s")
    parser.add_argument("--text", metavar="FILE", help="UTF-8 text (default: the bundled excerpt of a book)")
    parser.add_argument("--tokens", type=int, default=1024, help="from the text's start (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args = parser.parse_args()
    exact = load(args.model, dtype="float32", attn_implementation="sdpa")
    text = bundled_text() if args.text is None else read_text(args.text)
    ids = exact.tokenizer(text, return_tensors="pt")["input_ids"][:, : args.tokens]
    figures = {}
    with torch.no_grad():
        expected = exact.model(ids).logits[0]
        figures["float32"] = {"loss": float(token_losses(expected[:-1], ids[0, 1:]).mean())}
        for name, weights in FORMATS.items():
            model = load(args.model, dtype="bfloat16", attn_implementation="sdpa").model
            if weights is not None:
                accelerate(model, weights)
            got = model(ids).logits[0]
            found = Divergence()
            found.add(expected, got)
            loss = float(token_losses(got[:-1], ids[0, 1:]).mean())
            figures[name] = {"loss": loss, "kl_mean": found.kl_mean, "kl_p99": found.kl_p99, "top1": found.top1}
    if args.json:
        print(json.dumps(figures))
        return
    for name, row in figures.items():
        print(f"{name:18} " + "  ".join(f"{key} {value:.4f}" for key, value in row.items()))


if __name__ == "__main__":
    main()
