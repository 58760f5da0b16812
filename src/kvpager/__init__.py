"""kvpager: demand paging for the attention of language models."""

from __future__ import annotations

from kvpager.config import KVShape, PagerConfig
from kvpager.core.pager import Pager
from kvpager.errors import KVPagerError, PageLost, PoolExhausted

__version__ = "0.1.0"

__all__ = ["KVPagerError", "KVShape", "PageLost", "Pager", "PagerConfig", "PoolExhausted", "__version__"]
