"""Keys of vLLM's blocks: what they depend on, and the chain of a request's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvpager.core.blocks import KeyMaker, packed, tenant_of

__all__ = ["Chain", "Identity"]

FORMAT = "kvpager-vllm-1"  # goes up when the bytes of a stored block come to mean another thing


@dataclass(frozen=True)
class Identity:
    """All that the bytes of a worker's blocks depend on beside tokens and tenant; equal for equal bytes only.

    weights   fingerprint of the weights' files, as they lie on disk (see models.fingerprint)
    model     the model's configuration as vLLM uses it, with what overrides it: RoPE, scales, windows, activations
    numbers   who computes and in what: versions, number formats, quantization, instruction set, compilation
    layout    how a block lies in memory: number format, order of its axes, tokens a block, shape by layer
    rank      which part of the model this worker computes, and of how many
    """

    weights: str
    model: Mapping[str, object]
    numbers: Mapping[str, object]
    layout: Mapping[str, object]
    rank: tuple[int, int] = (0, 1)

    @property
    def namespace(self) -> str:
        """The same as text, for keys."""
        parts = [FORMAT, self.weights, self.model, self.numbers, self.layout, list(self.rank)]
        return json.dumps(parts, sort_keys=True, separators=(",", ":"), default=str)


@dataclass
class Chain:
    """The keys of one sequence's full blocks, made as far as they are asked for.

    makers  one for each rank
    size    tokens a block
    salt    the tenant's; b"" for nobody's in particular
    """

    makers: Sequence[KeyMaker]
    size: int
    salt: bytes
    _keys: list[tuple[bytes, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.root = KeyMaker.root(self.salt)
        self.tenant = tenant_of(self.root)

    def keys(self, tokens: Sequence[int], count: int) -> Sequence[tuple[bytes, ...]]:
        """Keys of the first `count` blocks of `tokens`, by rank; the tokens of blocks asked for before don't change."""
        for depth in range(len(self._keys), count):
            packed_tokens = self.tokens(tokens, depth)
            parents = self.parents(depth)
            self._keys.append(
                tuple(
                    maker.key(parent, packed_tokens, False) for maker, parent in zip(self.makers, parents, strict=True)
                )
            )
        return self._keys[:count]

    def parents(self, depth: int) -> tuple[bytes, ...]:
        """What stands before a block, by rank; the keys of the blocks before it have been made."""
        return self._keys[depth - 1] if depth else (self.root,) * len(self.makers)

    def tokens(self, tokens: Sequence[int], depth: int) -> bytes:
        """The token ids of a block as keys are made of them."""
        return packed(list(tokens[depth * self.size : (depth + 1) * self.size]))
