"""How long a decode step takes to choose pages by their digests, beside attending to all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvpager.bench.cases import PAGE_SIZE, Case, Heads
from kvpager.bench.contenders import Paged
from kvpager.bench.rounds import Runner, play
from kvpager.config import DType
from kvpager.core.digest import make_digest
from kvpager.ports import Digest, Kernel, Room, TileQuery

__all__ = ["Selected", "measure_selection"]

HEADS = Heads(9, 3, 64)
TOKENS = 8192
LAYERS = 30
BUDGET = 1024


@dataclass(frozen=True)
class Selected:
    """One decode step's selection over all layers. `share` is its time over that of attending to all pages.

    digest_bytes and kv_bytes are those of all pages; `digest_share` is the one over the other
    """

    kernel: str
    digest: str
    dtype: DType
    query_heads: int
    kv_heads: int
    head_dim: int
    tokens: int
    layers: int
    budget: int
    select_ms: float
    attend_ms: float
    digest_bytes: int
    kv_bytes: int

    @property
    def share(self) -> float:
        """Time of selecting over time of attending to all pages."""
        return self.select_ms / self.attend_ms

    @property
    def digest_share(self) -> float:
        """Bytes of digests over bytes of keys and values."""
        return self.digest_bytes / self.kv_bytes

    def as_dict(self) -> dict[str, Any]:
        """All figures, for ``--json``."""
        return {**asdict(self), "share": self.share, "digest_share": self.digest_share}


def measure_selection(
    kernel: Kernel,
    dtype: DType,
    rounds: int,
    between: Callable[[], object],
    *,
    heads: Heads = HEADS,
    tokens: int = TOKENS,
    layers: int = LAYERS,
    budget: int = BUDGET,
    kind: str = "2bit",
) -> Selected:
    """Time the choice of pages in all layers of a model, in turns with attention to all pages of all layers.

    `between` is called before, between and after the rounds. Raises ConfigError for a digest that is not there.
    """
    rng = np.random.default_rng(0)
    blocks = tokens // PAGE_SIZE
    settings = (kind, layers, heads.kv_heads, heads.head_dim, PAGE_SIZE, 1)
    digest: Digest = kernel.digest(*settings) or make_digest(*settings)
    digest.grow(blocks)
    rows, starts = np.arange(blocks), np.arange(blocks) * PAGE_SIZE
    for layer in range(layers):
        keys = rng.standard_normal((blocks, heads.kv_heads, PAGE_SIZE, heads.head_dim), np.float32)
        digest.build(layer, rows, keys)
    queries = rng.standard_normal((heads.query_heads, 1, heads.head_dim), np.float32)
    tile = TileQuery(queries, tokens, heads.head_dim**-0.5, None, None)
    own_lse = rng.standard_normal((heads.query_heads, 1), np.float32)
    room = Room(budget // PAGE_SIZE, 1, 2)

    def select() -> None:
        for layer in range(layers):
            digest.choose(layer, rows, tile, starts, own_lse, room)

    case = Case(heads, tokens)
    paged = Paged(kernel, kernel.name, heads, dtype)
    paged.fill(layers * paged.case_bytes(case))
    places = paged.places(case, layers)

    def attend() -> None:
        for place in places:
            place()

    # the digests would fit a cache: each time attention's pages, or the stream, push them out
    selecting, attending = Runner([select], most_runs=1), Runner([attend], most_runs=1)
    play([selecting, attending], rounds, between)
    pages = layers * heads.kv_heads * blocks
    return Selected(
        kernel.name,
        kind,
        dtype,
        heads.query_heads,
        heads.kv_heads,
        heads.head_dim,
        tokens,
        layers,
        budget,
        selecting.median * 1e3,
        attending.median * 1e3,
        pages * digest.page_bytes,
        pages * paged.page_bytes,
    )
