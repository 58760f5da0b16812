"""When a pager's methods may be called: from the owning thread, and not by an observer where they change something."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

from kvpager.errors import StepError

__all__ = ["changes", "owned"]


class _Guarded(Protocol):
    """What the guards ask of an object: whether `attend` is in the middle, and a check of the calling thread."""

    _attending: bool

    def _check_thread(self, call: str) -> None: ...


_Method = TypeVar("_Method", bound=Callable[..., Any])


def owned(method: _Method) -> _Method:
    """Refuse calls from a thread that doesn't own the pager."""

    @functools.wraps(method)
    def checked(self: _Guarded, *args: Any, **kwargs: Any) -> Any:
        self._check_thread(method.__name__)
        return method(self, *args, **kwargs)

    return cast(_Method, checked)


def changes(method: _Method) -> _Method:
    """As `owned`, for what changes sequences: refused also while `attend` is in the middle, hence to observers."""

    @functools.wraps(method)
    def checked(self: _Guarded, *args: Any, **kwargs: Any) -> Any:
        self._check_thread(method.__name__)
        if self._attending:
            raise StepError(
                f"{method.__name__}: called by an observer while the pager attends; there it may only be looked at "
                "(read, page_table, scores, stats)"
            )
        return method(self, *args, **kwargs)

    return cast(_Method, checked)
