"""What the scheduler tells the worker for one step. It is sent from process to process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Keys", "Load", "Plan", "Save"]

Keys = Sequence[bytes]
"""The 32-byte keys of one block, one for each rank of the worker's group."""


@dataclass(frozen=True)
class Load:
    """Blocks of a request to be read from the store: keys by block and rank, and vLLM's numbers of the blocks."""

    request: str
    keys: Sequence[Keys]
    blocks: Sequence[int]


@dataclass(frozen=True)
class Save:
    """A block that is full after this step.

    keys, parents  by rank; parents are what stands before a first block, 0 or 32 bytes
    block          vLLM's number of it
    depth          which block of its sequence it is, from 0
    tokens         its token ids, little-endian int64
    tenant         16 bytes that tell whose it is
    """

    request: str
    keys: Keys
    parents: Keys
    block: int
    depth: int
    tokens: bytes
    tenant: bytes


@dataclass(frozen=True)
class Plan:
    """All that the worker does in a step beside computing.

    loads, saves  what to begin to read, and what to copy out after the forward pass
    ended         requests that have finished or were preempted: their blocks may be filled anew in this step
    idle          whether nothing is computed in this step
    prompts       whether parts of prompts are: it takes long, and all processors
    """

    loads: Sequence[Load] = field(default=())
    saves: Sequence[Save] = field(default=())
    ended: Sequence[str] = field(default=())
    idle: bool = False
    prompts: bool = False
