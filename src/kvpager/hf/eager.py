"""Code that must run as it is written, also under torch.compile."""

from __future__ import annotations

import functools
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
    disabled = disable(function)

    @functools.wraps(function)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        # disabled functions cost some microseconds a call, which a decode step pays twice a layer
        return disabled(*args, **kwargs) if torch.compiler.is_compiling() else function(*args, **kwargs)

    return cast(_Function, chosen)
