"""kvpager: demand paging for the attention of language models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpager.config import KVShape, PagerConfig
from kvpager.core.pager import Pager
from kvpager.errors import KVPagerError, PageLost, PoolExhausted

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kvpager.engine.params import SamplingParams
    from kvpager.llm import LLM

__all__ = [
    "LLM",
    "KVPagerError",
    "KVShape",
    "PageLost",
    "Pager",
    "PagerConfig",
    "PoolExhausted",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """LLM and SamplingParams when they are asked for first: the pager alone needs none of what is behind them."""
    if name == "LLM":
        from kvpager.llm import LLM

        return LLM
    if name == "SamplingParams":
        from kvpager.engine.params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
