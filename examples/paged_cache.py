"""A paged KV cache without a model, in NumPy alone: ``python examples/paged_cache.py``."""

import numpy as np

from kvpager import KVShape, Pager, PagerConfig

SHAPE = KVShape(layers=1, kv_heads=1, query_heads=1, head_dim=32)
rng = np.random.default_rng(1)
KEYS, VALUES = rng.standard_normal((2, 1, 1_280, 32), dtype=np.float32)  # 80 pages of 16 tokens
QUERY = 2 * rng.standard_normal((1, 1, 32), dtype=np.float32)


def plain(tokens):
    """Ordinary attention over the first tokens: its output, and each token's share of the attention."""
    logits = KEYS[0, :tokens] @ QUERY[0, 0] / np.sqrt(32)
    share = np.exp(logits - logits.max())
    share /= share.sum()
    return share @ VALUES[0, :tokens], share


def grow(pager, seq, tokens):
    """Append keys and values, 20 tokens at a time, and attend to all of them each time."""
    for start in range(seq.length, tokens, 20):
        pager.append(seq, 0, KEYS[:, start : start + 20], VALUES[:, start : start + 20])
        result = pager.attend(seq, 0, QUERY)
    return result


def show_next(pager, seq):
    """Print the pages that would be evicted next."""
    leaving = [page for page in pager.scores(seq, 0) if page.evict_rank is not None][:4]
    print("  evicted next:", ", ".join(f"block {page.block} (policy {page.score:.4f})" for page in leaving))


SMALL, LARGE = (PagerConfig(pool=frames, grace=0) for frames in (64, 80))
with Pager(SHAPE, SMALL) as pager, Pager(SHAPE, LARGE) as roomy:
    seq = pager.open()
    result = grow(pager, seq, 20)
    print(f"A pool of {pager.stats().frames} frames of 16 tokens each. {seq.length} tokens written.")
    print("  read back unchanged:", np.array_equal(pager.read(seq, 0), [KEYS[:, :20], VALUES[:, :20]]))
    print("  page table:", ", ".join(f"block {b} in frame {f}" for b, f in enumerate(pager.page_table(seq)[:, 0, 0])))
    print("  token scores:", " ".join(f"{share:.3f}" for share in plain(20)[1]))
    print("  page scores (attention mass):", " ".join(f"{mass:.3f}" for mass in result.page_mass[0]))
    show_next(pager, seq)

    grow(pager, seq, 1_020)
    print(f"\n{seq.length} tokens: {pager.stats().frames_used} frames in use, the pool is full.")
    show_next(pager, seq)
    pager.append(seq, 0, KEYS[:, 1_020:1_040], VALUES[:, 1_020:1_040])
    print("20 more tokens need a frame. Evicted: block", *np.flatnonzero(pager.page_table(seq)[:, 0, 0] < 0))

    result, stats = grow(pager, seq, 1_280), pager.stats()
    print(f"\n{seq.length} tokens: {stats.evictions} evictions, {stats.recalls} recalls. In swap now: blocks", end=" ")
    print(*np.flatnonzero(pager.page_table(seq)[:, 0, 0] < 0))
    print(f"  largest difference to ordinary attention: {np.abs(result.output[0, 0] - plain(1_280)[0]).max():.1e}")
    same = np.array_equal(result.output, grow(roomy, roomy.open(), 1_280).output)
    print("  same bits as with a pool that never evicts:", same)
