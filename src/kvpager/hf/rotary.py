"""Rotary position embedding in one call."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvpager import _native

__all__ = ["rotate"]


def rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """What Llama's apply_rotary_pos_emb gives, bit for bit (Su et al., RoFormer, 2021): queries and keys turned.

    q and k [batch, heads, tokens, width], cos and sin [batch or 1, tokens, width]. The compiled kernel serves
    bfloat16 on the CPU as attentions make it (a transposed [batch, tokens, heads, width]) without gradients;
    transformers' own function all else, and what torch.compile traces.
    """
    if (
        is_compiling()
        or unsqueeze_dim != 1
        or not (_fits(q, cos) and _fits(k, cos) and _angles(cos, q) and _angles(sin, q))
    ):
        return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)  # type: ignore[no-any-return]
    batch, _, tokens, width = q.shape
    to_q, to_k = torch.empty_like(q), torch.empty_like(k)
    _native.rotate(
        q.data_ptr(),
        q.numel(),
        k.data_ptr(),
        k.numel(),
        cos.data_ptr(),
        sin.data_ptr(),
        cos.numel(),
        batch * tokens,
        width,
        to_q.data_ptr(),
        to_k.data_ptr(),
    )
    return to_q, to_k


def _fits(x: torch.Tensor, cos: torch.Tensor) -> bool:
    if x.dtype is not torch.bfloat16 or x.requires_grad or x.ndim != 4 or not x.is_cpu or x.numel() == 0:
        return False
    _, heads, tokens, width = x.shape
    return x.stride() == (tokens * heads * width, width, heads * width, 1) and cos.shape[-1] == width


def _angles(angles: torch.Tensor, q: torch.Tensor) -> bool:
    if angles.dtype is not torch.bfloat16 or angles.ndim != 3 or not angles.is_contiguous() or not angles.is_cpu:
        return False
    batch, _, tokens, width = q.shape
    shape = angles.shape
    return shape[1] == tokens and shape[2] == width and shape[0] in (1, batch) and width % 2 == 0
