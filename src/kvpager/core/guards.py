"""When a pager's methods may be called: from the owning thread, not by an observer where they change something, and
with sequences that are its own and as the call needs them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

from kvpager.core.sequence import Sequence
from kvpager.core.state import State
from kvpager.errors import InputError, SequenceError, StepError, ThreadError

__all__ = ["Guarded", "changes", "owned"]


class Guarded:
    """Checks that a pager's calls make first.

    _thread     who owns it; `_down` whether it was shut down; `_attending` whether `attend` is in the middle
    """

    _state: State
    _thread: int
    _down: bool
    _attending: bool

    def _check_thread(self, call: str) -> None:
        if threading.get_ident() != self._thread:
            raise ThreadError(f"{call}: this pager belongs to another thread; call adopt() from this one first")

    def _check_up(self) -> None:
        if self._down:
            raise SequenceError("this pager was shut down")

    def _check_sequence(self, sequence: Sequence) -> None:
        self._check_up()
        self._check_own(sequence)

    def _check_own(self, sequence: Sequence) -> None:
        if not isinstance(sequence, Sequence):
            raise SequenceError(f"sequence: expected one that this pager opened, got {type(sequence).__name__}")
        if sequence.owner is not self._state:
            raise SequenceError(f"sequence {sequence.id} belongs to another pager")
        if sequence.closed:
            raise SequenceError(f"sequence {sequence.id} is closed")

    def _check_even(self, sequence: Sequence, call: str) -> None:
        if (sequence.filled != sequence.length).any():
            raise StepError(
                f"{call}: layers of sequence {sequence.id} hold {sequence.filled.tolist()} tokens; "
                "append to every layer first"
            )

    def _check_running(self, sequence: Sequence, call: str) -> None:
        self._check_sequence(sequence)
        if sequence.parked:
            raise SequenceError(f"{call}: sequence {sequence.id} is parked; unpark it first")

    def _check_in_step(self, sequence: Sequence, call: str, tokens: int) -> None:
        step = self._state.step
        assert step is not None
        assert step.counts is not None
        if step.failed:
            raise StepError(f"{call}: a call of this step failed; roll it back")
        count = step.counts.get(sequence.id)
        if count is None:
            raise StepError(f"{call}: sequence {sequence.id} is not part of the open step")
        if count != tokens:
            raise InputError(f"{call}: {tokens} tokens, but the step was begun with {count} for sequence {sequence.id}")


_Method = TypeVar("_Method", bound=Callable[..., Any])


def owned(method: _Method) -> _Method:
    """Refuse calls from a thread that doesn't own the pager."""

    @functools.wraps(method)
    def checked(self: Guarded, *args: Any, **kwargs: Any) -> Any:
        self._check_thread(method.__name__)
        return method(self, *args, **kwargs)

    return cast(_Method, checked)


def changes(method: _Method) -> _Method:
    """As `owned`, for what changes sequences: refused also while `attend` is in the middle, hence to observers."""

    @functools.wraps(method)
    def checked(self: Guarded, *args: Any, **kwargs: Any) -> Any:
        self._check_thread(method.__name__)
        if self._attending:
            raise StepError(
                f"{method.__name__}: called by an observer while the pager attends; there it may only be looked at "
                "(read, page_table, scores, stats)"
            )
        return method(self, *args, **kwargs)

    return cast(_Method, checked)
