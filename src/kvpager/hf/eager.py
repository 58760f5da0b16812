"""Code that must run as it is written, also under torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

__all__ = ["eager"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def eager(function: _Function) -> _Function:
    """Keep torch.compile out of a function: a compiled model leaves its graph there and comes back after it.

    Traced, NumPy's calls would become tensor operations and the pager's books would be written at the wrong time.
    """
    disable: Callable[..., Any] = torch.compiler.disable
    return cast(_Function, disable(function))
