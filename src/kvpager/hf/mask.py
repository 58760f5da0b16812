"""The mask function: hands the two-dimensional padding mask on, and refuses what it can't express."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from kvpager.errors import InputError
from kvpager.hf.eager import eager

__all__ = ["pager_mask"]


@eager
def pager_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor | None:
    """What transformers hands to the attention as its mask: the padding mask itself.

    `attention_mask` is [batch, columns], true where a token is real; it comes back unchanged, or as None
    when every token is real. Causality and sliding windows need no mask here: the pager knows positions.
    Raises InputError for every other pattern (packed sequences, blocks, bidirectional or chunked attention,
    or_mask and and_mask functions).
    """
    if not _is_plain(mask_function):
        raise InputError(
            "attention_mask: kvpager attends causally, with or without a sliding window; packed sequences, "
            "bidirectional or chunked attention, and or_mask or and_mask functions are not supported"
        )
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return attention_mask


def _is_plain(mask_function: Callable[..., Any]) -> bool:
    """Whether a mask function is the causal one, alone or with a sliding window.

    transformers composes mask functions as closures: a sliding window is an intersection of exactly the
    window and the causal function, so a closure that holds anything else is another pattern.
    """
    if mask_function is causal_mask_function:
        return True
    sample = sliding_window_causal_mask_function(1)
    if getattr(mask_function, "__code__", None) is not sample.__code__:
        return False
    codes = [_codes(one) for one in (mask_function, sample)]
    return codes[0] == codes[1]


def _codes(mask_function: Any) -> list[Any]:
    """The code of each function that an intersection of masks holds."""
    return [getattr(part, "__code__", part) for cell in mask_function.__closure__ for part in cell.cell_contents]
