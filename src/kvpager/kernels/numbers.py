"""Numbers in the dtypes that come in and are stored, and partial attention joined: what kernels in NumPy share."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvpager.ports import FloatArray, Partial

__all__ = ["OPEN_DTYPES", "merge", "narrowed", "token_numbers", "widened"]

# what open pages hold, by the pages' dtype; uint16 stands for bfloat16
OPEN_DTYPES: dict[str, npt.DTypeLike] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "int8": np.float32,
}


def widened(numbers: npt.NDArray[Any]) -> FloatArray:
    """float16, float32, or bfloat16 (which uint16 stands for), as float32."""
    if numbers.dtype != np.uint16:
        return numbers.astype(np.float32, copy=False)
    wide = numbers.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def narrowed(plain: FloatArray, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """float32 in another of these dtypes; to bfloat16 it is rounded to nearest even."""
    if dtype != np.uint16:
        return plain.astype(dtype, copy=False)
    bits = np.ascontiguousarray(plain, np.float32).view(np.uint32)
    rounded = bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))
    return (rounded >> 16).astype(np.uint16)


def token_numbers(tokens: npt.NDArray[np.uint8], dtype: npt.DTypeLike) -> tuple[FloatArray, FloatArray]:
    """Keys and values, float32 [n, tokens, D] each, of what FrameStorage.tokens gave: uint8 [n, tokens, bytes]."""
    numbers = widened(np.ascontiguousarray(tokens).view(dtype))
    dim = numbers.shape[2] // 2
    return numbers[..., :dim], numbers[..., dim:]


def merge(parts: list[Partial]) -> tuple[FloatArray, FloatArray]:
    """Join the attention of several groups of pages by their log-sum-exp, in the order given.

    Returns the output, float32 [H * G, T, D], and the log-sum-exp over all groups, float32 [H * G, T]
    (-inf and zeros where no key was visible).
    """
    if len(parts) == 1:
        return parts[0].output, parts[0].lse
    stacked = np.stack([part.lse for part in parts])
    top = stacked.max(axis=0)
    safe = np.where(np.isfinite(top), top, np.float32(0))
    weights = np.exp(stacked - safe)
    total = weights.sum(axis=0)
    with np.errstate(divide="ignore"):
        lse = safe + np.log(total)
    weights /= np.where(total > 0, total, np.float32(1))
    output = parts[0].output * weights[0][..., None]
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        output += part.output * weight[..., None]
    return output, lse
