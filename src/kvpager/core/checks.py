"""Checks of what callers pass in, made before anything changes (promise 6)."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvpager.errors import InputError
from kvpager.ports import FloatArray

__all__ = ["floats", "token_list", "whole"]


def floats(name: str, value: Any, shape: tuple[int | None, ...], layout: str) -> FloatArray:
    """`value` as float32 of `shape` (None: any size above zero); `layout` words the shape for the message.

    Raises InputError for what is not an array of finite floating-point numbers in that shape.
    """
    if not isinstance(value, np.ndarray):
        raise InputError(f"{name}: expected a NumPy array {layout}, got {type(value).__name__}")
    if value.dtype.kind != "f":
        raise InputError(f"{name}: expected floating-point numbers, got {value.dtype}")
    wrong = len(value.shape) != len(shape) or any(
        have == 0 or (want is not None and have != want) for have, want in zip(value.shape, shape, strict=False)
    )
    if wrong:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise InputError(f"{name}: shape {value.shape} is not {layout} = ({wanted})")
    with np.errstate(over="ignore"):
        plain = value.astype(np.float32, copy=False)
    if not np.isfinite(plain).all():
        raise InputError(f"{name}: holds NaN or infinity (or numbers beyond float32); every number must be finite")
    return plain


def whole(name: str, value: Any, low: int, high: int) -> int:
    """`value` as an int in low..high, else InputError."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise InputError(f"{name}: {value!r} is not a whole number")
    if not low <= value <= high:
        raise InputError(f"{name}: {value} is not in {low}..{high}")
    return int(value)


def token_list(name: str, value: Any) -> list[int]:
    """Token ids as a list of ints of 0 and above, else InputError."""
    if isinstance(value, (str, bytes)):
        raise InputError(f"{name}: expected token ids, got text")
    try:
        items = list(value)
    except TypeError:
        raise InputError(f"{name}: expected a list of token ids, got {type(value).__name__}") from None
    return [whole(name, item, 0, 2**63 - 1) for item in items]
