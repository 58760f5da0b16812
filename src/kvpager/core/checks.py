"""Checks of what callers pass in, made before anything changes (promise 6)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvpager.errors import InputError
from kvpager.ports import States

__all__ = ["STORED_MOST", "floats", "listed", "positive", "step_tokens", "token_list", "whole"]

# the largest finite number of each dtype that pages are held in
STORED_MOST = {
    "float32": float(np.finfo(np.float32).max),
    "float16": 65504.0,
    "bfloat16": 2.0**128 - 2.0**120,
    "int8": 2.0**127,
}
_TAKEN = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.uint16))


def floats(
    name: str,
    value: Any,
    shape: tuple[int | None, ...],
    layout: str,
    within: Callable[[States, float], bool],
    dtype: str = "float32",
    bits: bool = False,
) -> States:
    """`value` as states of `shape` (None: any size above zero); `layout` words the shape for the message.

    `bits` takes uint16 for bfloat16, too. Raises InputError for what is not an array of floating-point numbers in that
    shape, finite also in `dtype`, in which they will be held; `within` looks at the numbers.
    """
    if not isinstance(value, np.ndarray):
        raise InputError(f"{name}: expected a NumPy array {layout}, got {type(value).__name__}")
    if value.dtype.kind != "f" and not (bits and value.dtype == np.uint16):
        raise InputError(f"{name}: expected floating-point numbers, got {value.dtype}")
    if value.shape != shape and (len(value.shape) != len(shape) or not all(map(_fits, value.shape, shape))):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise InputError(f"{name}: shape {value.shape} is not {layout} = ({wanted})")
    states: States = value
    if value.dtype not in _TAKEN:
        with np.errstate(over="ignore"):
            states = np.asarray(value, np.float32)
    if states.strides[-1] != states.itemsize or not states.flags.aligned:
        states = np.ascontiguousarray(states)
    if not within(states, STORED_MOST[dtype]):
        raise InputError(
            f"{name}: holds NaN or infinity (or numbers beyond {dtype}, {STORED_MOST[dtype]:g}); "
            "every number must be finite"
        )
    return states


def _fits(have: int, want: int | None) -> bool:
    return have == want or (want is None and have > 0)


def whole(name: str, value: Any, low: int, high: int) -> int:
    """`value` as an int in low..high, else InputError."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise InputError(f"{name}: {value!r} is not a whole number")
    if not low <= value <= high:
        raise InputError(f"{name}: {value} is not in {low}..{high}")
    return int(value)


def positive(name: str, value: Any, default: float) -> float:
    """`value` as a float above zero, `default` for None, else InputError."""
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float, np.floating)) or not 0 < value < 1e9:
        raise InputError(f"{name}: {value!r} is not a number above zero")
    return float(value)


def listed(name: str, value: Any) -> list[Any]:
    """`value` as a list, else InputError."""
    try:
        return list(value)
    except TypeError:
        raise InputError(f"{name}: expected a list, got {type(value).__name__}") from None


def step_tokens(value: Any, counts: list[int]) -> list[list[int]]:
    """The token ids of a step, one list for each of its sequences and as long as its count, else InputError."""
    lists = [token_list("token_ids", ids) for ids in listed("token_ids", value)]
    if [len(ids) for ids in lists] != counts:
        raise InputError(f"token_ids: lengths {[len(ids) for ids in lists]} are not the counts {counts}")
    return lists


def token_list(name: str, value: Any) -> list[int]:
    """Token ids as a list of ints of 0 and above, else InputError."""
    if isinstance(value, (str, bytes)):
        raise InputError(f"{name}: expected token ids, got text")
    return [whole(name, item, 0, 2**63 - 1) for item in listed(name, value)]
