"""Who is measured: kernels over scattered pages, and PyTorch's attention over a contiguous cache.

Each holds keys and values of its own for one shape of heads, several times what the caches hold. A case is laid out in
as many places of that memory as fit; `Place` after place is attended to in turn, as a model goes from layer to layer,
so that keys and values come from memory and not from a cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpager.bench.cases import PAGE_SIZE, Case, Heads
from kvpager.config import ITEMSIZE, DType
from kvpager.errors import ConfigError, KVPagerError
from kvpager.kernels.choose import native_module
from kvpager.kernels.reference import ReferenceKernel, merge
from kvpager.ports import FloatArray, IntArray, Kernel, PageList, Partial, TileQuery

__all__ = [
    "GROUP_PAGES",
    "KERNELS",
    "Contender",
    "Paged",
    "Place",
    "Sdpa",
    "SdpaMemory",
    "attend",
    "groups",
    "open_kernel",
]

KERNELS = ("native-layer", "native", "native-massless", "reference", "sdpa-fp32", "sdpa-bf16")
Place = Callable[[], object]
"""Attends once to one place of a contender's memory."""
GROUP_PAGES = 256  # as a pager groups them: PagerConfig.group_pages
FILL_PAGES = 1024
MOST_PLACES = 1024
BANK = 2**20  # different random numbers; memory is filled with copies of them


class Contender(ABC):
    """One way to compute attention, with memory for one shape of heads.

    name, dtype  as in rows; `mass` tells whether it also gives each page's share
    """

    name: str
    dtype: DType

    def __init__(self, heads: Heads) -> None:
        self.heads = heads

    def case_bytes(self, case: Case) -> int:
        """Bytes of keys and values that one run of a case reads."""
        return case.numbers * ITEMSIZE[self.dtype]

    @abstractmethod
    def fill(self, nbytes: int) -> None:
        """Take so many bytes and fill them with random keys and values."""

    @abstractmethod
    def places(self, case: Case, most: int) -> list[Place]:
        """Lay a case out in as many places as the memory holds, `most` at most."""


def open_kernel(name: str) -> Kernel:
    """The kernel of a name that is not PyTorch's; raises ConfigError where it can't be had."""
    if name == "reference":
        return ReferenceKernel()
    try:
        from kvpager.bench.massless import MasslessKernel
        from kvpager.kernels.native import NativeKernel
    except ImportError as error:
        raise ConfigError(f"kernels: {name} is not built here ({error}); choose others") from None
    made: Any = MasslessKernel() if name == "native-massless" else NativeKernel()
    kernel: Kernel = made
    return kernel


def groups(case: Case, frames: IntArray, most: int = GROUP_PAGES) -> list[PageList]:
    """The pages of one sequence as a pager gives them to a kernel: the tile's own first, then by head and position.

    frames  int64 [H, blocks]; `most` pages a group
    """
    heads, blocks = (index.ravel() for index in np.indices(frames.shape))
    starts = blocks * PAGE_SIZE
    counts = np.minimum(case.tokens - starts, PAGE_SIZE)
    own = blocks >= (case.tokens - case.tile) // PAGE_SIZE
    found = []
    for part in (np.flatnonzero(own), np.flatnonzero(~own)):
        for low in range(0, len(part), most):
            at = part[low : low + most]
            found.append(PageList(frames.ravel()[at], heads[at], starts[at], counts[at], len(frames)))
    return found


def attend(kernel: Kernel, storage: Any, tile: TileQuery, pages: list[PageList], heads: IntArray) -> object:
    """One tile's attention, as a pager computes it: a call for each group, then one that joins them."""
    parts: list[Partial] = [kernel.attend(storage, tile, group) for group in pages]
    return kernel.settle(parts, heads)


class Paged(Contender):
    """A kernel over pages that lie in random frames, `group_pages` of them a call at most."""

    def __init__(
        self, kernel: Kernel, name: str, heads: Heads, dtype: DType, group_pages: int = GROUP_PAGES, seed: int = 0
    ) -> None:
        super().__init__(heads)
        self.name, self.dtype = name, dtype
        self._kernel, self._group_pages = kernel, group_pages
        self._rng = np.random.default_rng(seed)
        self.page_bytes = kernel.storage(1, heads.shape(dtype), PAGE_SIZE).page_bytes
        self._storage: Any = None
        self._frames = 0

    def case_bytes(self, case: Case) -> int:
        """Bytes of whole pages, scales included, that one run of a case reads."""
        return case.pages * self.page_bytes

    def fill(self, nbytes: int) -> None:
        """Take so many bytes of frames and fill them with random keys and values."""
        self._frames = max(1, nbytes // self.page_bytes)
        self._storage = self._kernel.storage(self._frames, self.heads.shape(self.dtype), PAGE_SIZE)
        first = np.arange(min(FILL_PAGES, self._frames))
        shape = (len(first), PAGE_SIZE, self.heads.head_dim)
        keys, values = (self._rng.standard_normal(shape, np.float32) for _ in range(2))
        self._storage.write(first, 0, keys, values)
        self._storage.finish(first)
        pages = self._storage.dump(first)
        for low in range(FILL_PAGES, self._frames, FILL_PAGES):
            frames = np.arange(low, min(low + FILL_PAGES, self._frames))
            self._storage.load(frames, pages[: len(frames)])

    def places(self, case: Case, most: int) -> list[Place]:
        """Lay a case out over random frames, in as many places as the memory holds."""
        count = min(self._frames // case.pages, most)
        scattered = self._rng.permutation(self._frames)[: count * case.pages]
        by_place = scattered.reshape(count, case.batch, case.heads.kv_heads, case.blocks)
        return [self._place(case, frames) for frames in by_place]

    def _place(self, case: Case, frames: IntArray) -> Place:
        kernel, storage = self._kernel, self._storage
        start = case.tokens - case.tile
        shape = (case.heads.query_heads, case.tile, case.heads.head_dim)
        rows = []
        for row in frames:
            pages = groups(case, row, self._group_pages)
            tile = TileQuery(self._rng.standard_normal(shape, np.float32), start, shape[2] ** -0.5, None, None)
            rows.append((tile, pages, np.concatenate([group.heads for group in pages])))

        def run() -> None:
            for tile, pages, heads in rows:
                attend(kernel, storage, tile, pages, heads)

        return run

    def check(self, tokens: int = 100) -> float:
        """The largest difference from the reference kernel on the same pages; raises KVPagerError above 0.05.

        A kernel that is fast and wrong should not get a row.
        """
        case = Case(self.heads, tokens, tile=min(5, tokens))
        shape = self.heads.shape(self.dtype)
        frames = self._rng.permutation(case.pages).reshape(self.heads.kv_heads, case.blocks)
        size = (case.pages, PAGE_SIZE, self.heads.head_dim)
        keys, values = (self._rng.standard_normal(size, np.float32) for _ in range(2))
        queries = self._rng.standard_normal((self.heads.query_heads, case.tile, self.heads.head_dim), np.float32)
        tile = TileQuery(queries, tokens - case.tile, self.heads.head_dim**-0.5, None, None)
        storage = self._kernel.storage(case.pages, shape, PAGE_SIZE)
        storage.write(frames.ravel(), 0, keys, values)
        output = self._output(case, storage, frames, tile)
        # what the kernel itself stored, so that rounding of the pages is no difference
        keys, values = storage.read(frames.ravel())
        reference = ReferenceKernel()
        exact = reference.storage(case.pages, self.heads.shape("float32"), PAGE_SIZE)
        exact.write(frames.ravel(), 0, keys, values)
        expected = merge([reference.attend(exact, tile, group) for group in groups(case, frames)])[0]
        error = float(np.abs(output - expected).max())
        if not error < 0.05:
            raise KVPagerError(f"{self.name} ({self.dtype}, {self.heads}) differs from the reference by {error:.3g}")
        return error

    def _output(self, case: Case, storage: Any, frames: IntArray, tile: TileQuery) -> FloatArray:
        """The attention of one sequence, whose pages lie in frames [H, blocks]: [query heads, T, D]."""
        pages = groups(case, frames)
        parts = [self._kernel.attend(storage, tile, group) for group in pages]
        return self._kernel.settle(parts, np.concatenate([group.heads for group in pages])).output


class SdpaMemory:
    """Bytes that both number formats of PyTorch's attention share, in huge pages where the extension gives them.

    They are filled as bfloat16. Read as float32, two neighbours make one number of about the second's size.
    """

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self.data: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)

    def fill(self, nbytes: int) -> None:
        """Hold at least so many bytes."""
        if len(self.data) >= nbytes:
            return
        native = native_module()
        self.data = np.zeros(nbytes, np.uint8) if native is None else native.allocate(nbytes)
        high = self._rng.standard_normal(BANK, np.float32).view(np.uint32) >> 16
        bank = high.astype(np.uint16).view(np.uint8)
        for low in range(0, nbytes, len(bank)):
            part = self.data[low : low + len(bank)]
            part[:] = bank[: len(part)]


class Sdpa(Contender):
    """PyTorch's scaled_dot_product_attention over contiguous keys and values, [batch, H, tokens, D]."""

    def __init__(self, memory: SdpaMemory, heads: Heads, dtype: DType, seed: int = 0) -> None:
        super().__init__(heads)
        self.name = "sdpa-fp32" if dtype == "float32" else "sdpa-bf16"
        self.dtype = dtype
        self._memory, self._seed = memory, seed

    def fill(self, nbytes: int) -> None:
        """Have so many bytes of keys and values."""
        self._memory.fill(nbytes)

    def places(self, case: Case, most: int) -> list[Place]:
        """Lay a case out, one place after the other."""
        import torch

        kind = getattr(torch, self.dtype)
        size = self.case_bytes(case)
        count = min(len(self._memory.data) // size, most)
        generator = torch.Generator().manual_seed(self._seed)
        shape = (case.batch, case.heads.query_heads, case.tile, case.heads.head_dim)
        query = torch.randn(shape, generator=generator).to(kind)
        mask = None
        if case.tile > 1:
            mask = torch.ones(case.tile, case.tokens, dtype=torch.bool).tril(case.tokens - case.tile)
        found: list[Place] = []
        for index in range(count):
            flat = torch.from_numpy(self._memory.data[index * size : (index + 1) * size]).view(kind)
            keys, values = flat.view(2, case.batch, case.heads.kv_heads, case.tokens, case.heads.head_dim)
            found.append(self._place(query, keys, values, mask))
        return found

    def _place(self, query: Any, keys: Any, values: Any, mask: Any) -> Place:
        import torch

        grouped = self.heads.query_heads != self.heads.kv_heads
        function = torch.nn.functional.scaled_dot_product_attention

        def run() -> None:
            function(query, keys, values, attn_mask=mask, enable_gqa=grouped)

        return run
