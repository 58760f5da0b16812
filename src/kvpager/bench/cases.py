"""What is measured: shapes of heads, lengths, batches and tiles, and who computes them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvpager.config import DType, KVShape
from kvpager.errors import ConfigError

__all__ = ["PAGE_SIZE", "Case", "Heads"]

PAGE_SIZE = 16

_HEADS = re.compile(r"(\d+)/(\d+)x(\d+)")


@dataclass(frozen=True)
class Heads:
    """Query heads, KV heads, and channels of each, of one layer."""

    query_heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def parse(cls, text: str) -> Heads:
        """Heads from text such as ``9/3x64``: raises ConfigError that names the text."""
        match = _HEADS.fullmatch(text.strip())
        if match is None:
            raise ConfigError(f"shapes: {text!r} is not QUERY_HEADS/KV_HEADSxHEAD_DIM, as in 9/3x64")
        query_heads, kv_heads, head_dim = (int(number) for number in match.groups())
        heads = cls(query_heads, kv_heads, head_dim)
        heads.shape("float32")  # a ConfigError for numbers that can't be
        return heads

    def __str__(self) -> str:
        return f"{self.query_heads}/{self.kv_heads}x{self.head_dim}"

    def shape(self, dtype: DType) -> KVShape:
        """One layer's KV shape, with pages held as `dtype`."""
        return KVShape(1, self.kv_heads, self.query_heads, self.head_dim, dtype)


@dataclass(frozen=True)
class Case:
    """One point of a benchmark: `batch` sequences of `tokens` tokens, of which the last `tile` are the queries."""

    heads: Heads
    tokens: int
    batch: int = 1
    tile: int = 1

    def __post_init__(self) -> None:
        if self.tile > self.tokens:
            raise ConfigError(f"tile: {self.tile} queries are more than {self.tokens} tokens")

    @property
    def blocks(self) -> int:
        """Blocks of one sequence."""
        return -(-self.tokens // PAGE_SIZE)

    @property
    def pages(self) -> int:
        """Pages of all sequences together."""
        return self.batch * self.blocks * self.heads.kv_heads

    @property
    def numbers(self) -> int:
        """Numbers that keys and values of all sequences hold together."""
        return 2 * self.batch * self.tokens * self.heads.kv_heads * self.heads.head_dim
