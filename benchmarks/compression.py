"""What lossless compression of stored blocks saves and costs: real keys and values, and random ones.

    python benchmarks/compression.py [--tokens 1024] [--model smollm2-135m] [--dtypes bfloat16,int8] [--runs 5] [--json]

The model reads the bundled text once; its keys and values are written into frames as a pager does, and what the
frames hold is stored as blocks of one page a layer and head. Random ones are normally distributed, of the same shape.
`ratio` is bytes of the blobs, headers included, over bytes of the pages. Speeds are MB of pages a second with one
thread, the quickest of several runs: `write` makes blobs, `read` gives their pages, checked, and `few` reads 8
pages of each block by the header and their slices alone. The model computes in bfloat16 unless --model-dtype says
otherwise: the last bits of float16 and float32 are zeros then, which flatters them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np
import torch

from kvpager import KVShape, PagerConfig
from kvpager.evaluation.text import bundled_ids
from kvpager.kernels.choose import open_kernel
from kvpager.models import load
from kvpager.models.packages import quiet
from kvpager.stored import BlockHead, StoredBlock
from kvpager.stores.codec import decode, encode
from kvpager.stores.header import COMPRESSIONS, Compression, Header

PAGE_SIZE = 16
FEW = tuple(range(0, 40, 5))  # pages of a block that are read alone


def real_states(model: str, tokens: int, dtype: str) -> np.ndarray:
    """Keys and values of the bundled text, float32 [2, layers, heads, tokens, head_dim]."""
    loaded = load(model, dtype=dtype, attn_implementation="sdpa")
    ids = bundled_ids(loaded.tokenizer, 8 * tokens)[:tokens]
    with torch.no_grad(), quiet():
        layers = loaded.model(torch.tensor([ids]), use_cache=True, logits_to_keep=1).past_key_values.layers
    pairs = [(layer.keys[0].float().numpy(), layer.values[0].float().numpy()) for layer in layers]
    return np.stack([np.stack(states) for states in zip(*pairs, strict=True)])


def as_blocks(states: np.ndarray, dtype: str) -> tuple[list[StoredBlock], int]:
    """Whole blocks, as frames of this dtype hold them, and the bytes of one number."""
    _, layers, heads, tokens, width = states.shape
    blocks = tokens // PAGE_SIZE
    paged = states[:, :, :, : blocks * PAGE_SIZE].reshape(2, layers, heads, blocks, PAGE_SIZE, width)
    paged = np.ascontiguousarray(np.moveaxis(paged, 3, 1)).reshape(2, -1, PAGE_SIZE, width)
    shape = KVShape(layers=layers, kv_heads=heads, query_heads=heads, head_dim=width, dtype=dtype)
    frames = np.arange(paged.shape[1])
    storage = open_kernel(shape, PagerConfig(pool=len(frames), page_size=PAGE_SIZE)).storage(
        len(frames), shape, PAGE_SIZE
    )
    storage.write(frames, 0, paged[0], paged[1])
    storage.finish(frames)
    payload = storage.dump(frames).reshape(blocks, layers * heads, storage.page_bytes)
    head = BlockHead(
        key=bytes(32),
        parent=b"",
        tenant=bytes(16),
        depth=0,
        tokens=bytes(8 * PAGE_SIZE),
        approximate=False,
        layout=dtype,
        pages=layers * heads,
        page_bytes=storage.page_bytes,
    )
    return [StoredBlock(head, pages) for pages in payload], shape.itemsize


def best(run: Callable[[], object], runs: int) -> float:
    """Seconds of the quickest run."""
    times = []
    for _ in range(runs):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


def measure(blocks: list[StoredBlock], compression: Compression, itemsize: int, runs: int) -> dict[str, float]:
    """Ratio and speeds; every page is compared with what it was."""
    blobs = [encode(block, compression, itemsize) for block in blocks]
    for block, blob in zip(blocks, blobs, strict=True):
        assert np.array_equal(decode(blob, block.head.key).payload, block.payload)
    headers = [Header.parse(blob) for blob in blobs]

    def read_pages() -> None:
        for header, blob in zip(headers, blobs, strict=True):
            view = memoryview(blob)
            ranges = [header.page_range(page) for page in FEW]
            header.pages(FEW, [view[begin : begin + size] for begin, size in ranges])

    held = sum(block.payload.nbytes for block in blocks)
    write = best(lambda: [encode(block, compression, itemsize) for block in blocks], runs)
    read = best(lambda: [decode(blob, block.head.key) for block, blob in zip(blocks, blobs, strict=True)], runs)
    return {
        "ratio": sum(map(len, blobs)) / held,
        "write_mb_s": held / write / 1e6,
        "read_mb_s": held / read / 1e6,
        "read_us_a_page": read / sum(block.head.pages for block in blocks) * 1e6,
        "few_us_a_page": best(read_pages, runs) / len(blobs) / len(FEW) * 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--model-dtype", default="bfloat16", help="what the model computes in")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--dtypes", default="bfloat16,float16,float32,int8", help="of the pages")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args = parser.parse_args()
    torch.set_num_threads(1)
    real = real_states(args.model, args.tokens, args.model_dtype)
    drawn = np.random.default_rng(0).standard_normal(real.shape).astype(np.float32)
    found = []
    for dtype in args.dtypes.split(","):
        for source, states in (("real", real), ("random", drawn)):
            blocks, itemsize = as_blocks(states, dtype)
            for compression in COMPRESSIONS:
                figures = measure(blocks, compression, itemsize, args.runs)
                found.append({"dtype": dtype, "states": source, "compression": compression, **figures})
    if args.json:
        print(json.dumps({"model": args.model, "model_dtype": args.model_dtype, "cases": found}, indent=1))
        return
    names = list(found[0])
    print(f"| {' | '.join(names)} |")
    print("|" + "---|" * len(names))
    for one in found:
        cells = (f"{value:.4g}" if isinstance(value, float) else str(value) for value in one.values())
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
