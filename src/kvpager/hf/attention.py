"""The attention function that transformers calls, and its registration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from kvpager.errors import CacheMismatch, InputError, UnsupportedModel
from kvpager.hf.eager import eager
from kvpager.hf.handle import Forward
from kvpager.hf.mask import pager_mask

__all__ = ["HANDLE", "NAME", "pager_attention", "register"]

NAME = "kvpager"
HANDLE = "kvpager_step"  # where PagerCache.update leaves the step in the arguments of the attention

# Arguments that some models hand to their attention and that change its result: none is computed here.
_REFUSED = {
    "s_aux": "attention sinks",
    "position_bias": "position biases",
    "head_mask": "head masks",
    "indices": "sparse attention",
    "cu_seq_lens_q": "packed sequences",
    "cu_seq_lens_k": "packed sequences",
}


def register() -> None:
    """Make ``attn_implementation="kvpager"`` known to transformers: its attention and its mask. Idempotent."""
    AttentionInterface.register(NAME, pager_attention)
    AttentionMaskInterface.register(NAME, pager_mask)


@eager
def pager_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend through the pager of the PagerCache that took this layer's keys and values.

    query [B, Hq, T, D], key and value [B, H, T, D] (the new tokens alone), attention_mask [B, columns] or None;
    returns [B, T, Hq, D] in the query's dtype, zeros where a column is padding, and no weights. It has no gradient:
    where one is asked for, the backward pass raises InputError.
    Raises CacheMismatch without a PagerCache, InputError for dropout, training, weights asked for or a mask that
    is not two-dimensional, UnsupportedModel for arguments that kvpager doesn't compute.
    """
    step = kwargs.get(HANDLE)
    if not isinstance(step, Forward):
        raise CacheMismatch(
            "attn_implementation='kvpager' attends through a PagerCache, and this forward has none: pass "
            "cache=kvpager.hf.PagerCache(model.config, ...) and leave use_cache on, or load the model with "
            "attn_implementation='sdpa'"
        )
    if not step.pending:
        raise UnsupportedModel(
            f"{type(module).__name__}: it attends more than once with the keys and values of layer {step.layer}"
        )
    step.pending = False
    _check(module, step, dropout, sliding_window, kwargs)
    output = step.attend(query, key, value, attention_mask, scaling, softcap)
    if torch.is_grad_enabled() and any(states.requires_grad for states in (query, key, value)):
        refuse: Callable[..., torch.Tensor] = _NoGradient.apply
        output = refuse(output, query, key, value)
    return output, None


class _NoGradient(torch.autograd.Function):
    """Passes `output` on, and refuses a gradient that would go round the pager and be wrong in silence."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise InputError("backward: kvpager's attention has no gradient, it serves inference; train with 'sdpa'")


def _check(
    module: torch.nn.Module, step: Forward, dropout: float, sliding_window: int | None, kwargs: dict[str, Any]
) -> None:
    if module.training or dropout:
        raise InputError(
            f"the model is in training mode (dropout {dropout}): kvpager serves inference; call model.eval() first"
        )
    if kwargs.get("output_attentions"):
        raise InputError("output_attentions: True; kvpager keeps no attention weights, load with 'eager' to see them")
    name = type(module).__name__
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModel(f"{name}: its attention is not causal")
    window = step.pager.shape.window(step.layer)
    if window != sliding_window:
        raise UnsupportedModel(
            f"{name}: layer {step.layer} attends with a sliding window of {sliding_window}, "
            f"but its configuration says {window}"
        )
    for argument, what in _REFUSED.items():
        if kwargs.get(argument) is not None:
            raise UnsupportedModel(f"{name}: it hands {argument} to its attention ({what}), which kvpager can't do")
