"""What a user sets: frozen dataclasses, validated when they are made.

Each raises :class:`~kvpager.errors.ConfigError` (a ``ValueError``) that names the field, its value and
what is allowed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from kvpager.errors import ConfigError

__all__ = [
    "DIGESTS",
    "DTYPES",
    "KERNELS",
    "MODES",
    "POLICIES",
    "DType",
    "DigestKind",
    "KVShape",
    "KernelName",
    "Mode",
    "PagerConfig",
    "PolicyName",
    "parse_size",
]

DType = Literal["float32", "bfloat16", "float16", "int8"]
Mode = Literal["recall", "discard"]
KernelName = Literal["auto", "native", "reference"]
PolicyName = Literal["attention", "h2o", "tova", "snapkv", "streaming", "lru", "fifo", "random"]
DigestKind = Literal["2bit", "4bit", "mean-dev", "submeans", "minmax"]

KERNELS: tuple[str, ...] = get_args(KernelName)
MODES: tuple[str, ...] = get_args(Mode)
POLICIES: tuple[str, ...] = get_args(PolicyName)
DIGESTS: tuple[str, ...] = get_args(DigestKind)
DTYPES: tuple[str, ...] = get_args(DType)
DEFAULT_POOL_BYTES = 256 * 2**20  # frames, where neither pool nor memory is given
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}  # of models; pages know int8 too

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str | int, field: str = "size") -> int:
    """Bytes from ``"64MiB"``, ``"1.5GB"`` or a plain number of bytes.

    Raises ConfigError that names `field` when the text is not a size, or not above zero.
    """
    match = _SIZE.fullmatch(str(text))
    unit = match.group(2).upper() if match else ""
    if match is None or unit not in _UNITS:
        raise ConfigError(f"{field}: {text!r} is not a size; write for example 64MiB, 1.5GB or 1048576")
    size = int(float(match.group(1)) * _UNITS[unit])
    if size <= 0:
        raise ConfigError(f"{field}: {text!r} is not above zero")
    return size


def _whole(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}: {value!r} is not a whole number")
    if not low <= value <= high:
        raise ConfigError(f"{name}: {value} is not in {low}..{high}")


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}: {value!r} is not one of {', '.join(allowed)}")


@dataclass(frozen=True)
class KVShape:
    """The shape of a model's KV cache, for one token of one sequence.

    ``query_heads`` must be a multiple of ``kv_heads`` (grouped heads). ``dtype`` is how pages are held; "int8" has
    bfloat16 scales beside it, one a page and channel for keys and one a page and token for values.
    ``windows`` gives each layer's sliding window in tokens (a query at position p sees keys above
    p - window), or None for full attention; None alone means that every layer is full. ``scale``
    multiplies query-key products; by default ``head_dim ** -0.5``.
    """

    layers: int
    kv_heads: int
    query_heads: int
    head_dim: int
    dtype: DType = "float32"
    windows: tuple[int | None, ...] | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        _whole("layers", self.layers, 1, 4096)
        _whole("kv_heads", self.kv_heads, 1, 4096)
        _whole("query_heads", self.query_heads, 1, 4096)
        _whole("head_dim", self.head_dim, 1, 1024)
        _one_of("dtype", self.dtype, get_args(DType))
        if self.query_heads % self.kv_heads:
            raise ConfigError(f"query_heads: {self.query_heads} is not a multiple of kv_heads, {self.kv_heads}")
        if self.windows is not None:
            if not isinstance(self.windows, tuple) or len(self.windows) != self.layers:
                raise ConfigError(f"windows: {self.windows!r} is not a tuple of one entry a layer ({self.layers})")
            for window in self.windows:
                if window is not None:
                    _whole("windows", window, 1, 2**31 - 1)
        if self.scale is not None and not (isinstance(self.scale, (int, float)) and 0 < self.scale < 1e6):
            raise ConfigError(f"scale: {self.scale!r} is not a number above zero")

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.query_heads // self.kv_heads

    @property
    def itemsize(self) -> int:
        """Bytes of one stored number (int8: without its share of the scales)."""
        return 1 if self.dtype == "int8" else ITEMSIZE[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of one token: layers x 2 x KV heads x head_dim x item size."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.itemsize

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page: keys and values (and their scales) of `page_size` tokens of one KV head of one layer."""
        numbers = 2 * page_size * self.head_dim * self.itemsize
        if self.dtype == "int8":
            # in whole lines of 64 bytes, as the compiled kernels want them (native/layout.h)
            return -(-(numbers + 2 * self.head_dim + 2 * page_size) // 64) * 64
        return numbers

    def window(self, layer: int) -> int | None:
        """The sliding window of `layer` in tokens, or None."""
        return self.windows[layer] if self.windows is not None else None


@dataclass(frozen=True)
class PagerConfig:
    """How a pager works. Sizes are bytes, or text such as ``"64MiB"``.

    pool           frames alone: a number of frames, or a size. None takes 256 MiB, or what `memory` leaves.
    memory         a bound on frames, digests and tables together; needs `max_tokens`; excludes `pool`.
    max_tokens     the most tokens that all live sequences may hold together; None for no bound.
    budget         past tokens a KV head attends to, on average over a layer's KV heads; None for all.
    mode           "recall" keeps evicted pages readable in swap; "discard" drops them for good.
    policy         which page leaves first (see kvpager.core.policies).
    digest         the summary that selection reads (see kvpager.core.digest).
    page_size      tokens a page: 8, 16 or 32.
    tile           queries that share one selection: 1, or a multiple of page_size up to 1,024.
    sample         of each query head every so many-th query of a tile takes part in choosing its pages.
    group_pages    pages that one partial attention covers; part of the arithmetic, hence of the result, and of the
                   smallest pool. None takes 4 blocks' pages, at least 8 and at most 256.
    sink_pages     leading pages of a sequence that are always selected and never discarded.
    recent_pages   pages just before the tile that are always selected and never discarded.
    decay          what is left of a page's mass in its score after each further query that attended to it.
    grace          tiles that must have seen a new page before its attention is compared; it is kept until then.
    swap           "memory", or a path of a file (made if missing, removed at close); None is "memory".
    swap_limit     the most bytes that swap may hold.
    prefix_tokens  the most tokens of closed sequences' full blocks kept for reuse; 0 keeps none.
    namespace      goes into every block key; whatever else the bytes depend on (weights, tenant).
    seed           of the `random` policy.
    kernel         who computes attention: "native" (compiled), "reference" (NumPy), or "auto", the compiled one where
                   it is built and fits the shape.
    """

    pool: int | str | None = None
    memory: int | str | None = None
    max_tokens: int | None = None
    budget: int | None = None
    mode: Mode = "recall"
    policy: PolicyName = "attention"
    digest: DigestKind = "2bit"
    page_size: int = 16
    tile: int = 64
    sample: int = 2
    group_pages: int | None = None
    sink_pages: int = 1
    recent_pages: int = 2
    decay: float = 0.9
    grace: int = 2
    swap: str | Path | None = None
    swap_limit: int | str = "64GiB"
    prefix_tokens: int = 0
    namespace: str = ""
    seed: int = 0
    kernel: KernelName = "auto"

    def __post_init__(self) -> None:
        _one_of("mode", self.mode, MODES)
        _one_of("policy", self.policy, POLICIES)
        _one_of("digest", self.digest, DIGESTS)
        _one_of("kernel", self.kernel, KERNELS)
        if not isinstance(self.page_size, int) or self.page_size not in (8, 16, 32):
            raise ConfigError(f"page_size: {self.page_size!r} is not 8, 16 or 32")
        _whole("tile", self.tile, 1, 1024)
        if self.tile != 1 and self.tile % self.page_size:
            raise ConfigError(f"tile: {self.tile} is neither 1 nor a multiple of page_size, {self.page_size}")
        _whole("sample", self.sample, 1, 1024)
        if self.group_pages is not None:
            _whole("group_pages", self.group_pages, 1, 65536)
        _whole("sink_pages", self.sink_pages, 0, 65536)
        _whole("recent_pages", self.recent_pages, 0, 65536)
        _whole("grace", self.grace, 0, 2**31 - 1)
        _whole("seed", self.seed, 0, 2**63 - 1)
        _whole("prefix_tokens", self.prefix_tokens, 0, 2**40)
        if not isinstance(self.decay, (int, float)) or not 0 < self.decay <= 1:
            raise ConfigError(f"decay: {self.decay!r} is not above 0 and at most 1")
        if not isinstance(self.namespace, str):
            raise ConfigError(f"namespace: {self.namespace!r} is not text")
        self._check_sizes()
        self._check_budget()

    def _check_sizes(self) -> None:
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, 2**40)
        parse_size(self.swap_limit, "swap_limit")
        if self.swap is not None and not isinstance(self.swap, (str, Path)):
            raise ConfigError(f"swap: {self.swap!r} is neither 'memory' nor a path")
        if isinstance(self.pool, str):
            parse_size(self.pool, "pool")
        elif self.pool is not None:
            _whole("pool", self.pool, 1, 2**31 - 1)
        if self.memory is not None:
            parse_size(self.memory, "memory")
            if self.pool is not None:
                raise ConfigError("memory: give either memory or pool, not both")
            if self.max_tokens is None:
                raise ConfigError("memory: needs max_tokens, since digests and tables grow with the tokens held")

    def _check_budget(self) -> None:
        if self.budget is None:
            if self.mode == "discard":
                raise ConfigError("budget: mode 'discard' needs a budget, in tokens")
            return
        least = (self.sink_pages + self.recent_pages + 1) * self.page_size
        _whole("budget", self.budget, 1, 2**40)
        if self.budget < least:
            raise ConfigError(
                f"budget: {self.budget} is less than {least}, what the protected pages and one more hold "
                f"({self.sink_pages} first, {self.recent_pages} recent, {self.page_size} tokens each)"
            )

    @property
    def budget_pages(self) -> int | None:
        """The budget in whole pages a KV head, or None."""
        return None if self.budget is None else self.budget // self.page_size
