"""Eviction policies: which page leaves first."""

from __future__ import annotations

from kvpager.core.policies.attention import Attention
from kvpager.core.policies.base import Policy
from kvpager.core.policies.fifo import FIFO
from kvpager.core.policies.h2o import H2O
from kvpager.core.policies.lru import LRU
from kvpager.core.policies.random import Random
from kvpager.core.policies.snapkv import SnapKV
from kvpager.core.policies.streaming import Streaming
from kvpager.core.policies.tova import TOVA
from kvpager.errors import ConfigError

__all__ = ["FIFO", "H2O", "LRU", "POLICY_TYPES", "TOVA", "Attention", "Policy", "Random", "SnapKV", "Streaming", "make"]

POLICY_TYPES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (Attention, H2O, TOVA, SnapKV, Streaming, LRU, FIFO, Random)
}


def make(name: str) -> Policy:
    """The policy of that name; ConfigError names the ones there are."""
    if name not in POLICY_TYPES:
        raise ConfigError(f"policy: {name!r} is not one of {', '.join(POLICY_TYPES)}")
    return POLICY_TYPES[name]()
