"""A decoder layer around its attention in two compiled calls, where all that it is made of was packed.

What such a layer does is Llama's: a norm, an attention of packed projections, norms of heads (Qwen 3) and the rotary
embedding, the sum with what came in, a norm, a gated multilayer perceptron, and the sum again. Qwen 2 and Mistral share
it. The attention itself stays where transformers looks for it, and each step rounds as the modules one after the other
do, so results are the same bits. A layer whose modules were replaced, or have hooks, since then runs its own forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.nn.modules.module import _global_forward_hooks as _HOOKS
from torch.nn.modules.module import _global_forward_pre_hooks as _PRE_HOOKS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvpager._native import PackedLayer
from kvpager.hf.packed import PackedGated, PackedLinear, PackedNorm, PackedProjection, unusable
from kvpager.hf.recognise import AttentionForm, attention_form, is_plain, layer_forward

__all__ = ["fuse", "fused"]

_BF16 = torch.bfloat16
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm")
_HEAD_NORMS = ("q_norm", "k_norm")


def fuse(layer: nn.Module, rotary: Callable[..., Any]) -> bool:
    """Give a decoder layer of packed modules a forward of two compiled calls; whether it was one.

    `rotary` is the function that packed attentions turn queries and keys with.
    """
    own = layer_forward(type(layer))
    if own is None or not is_plain(layer):
        return False
    attention = cast(nn.Module, layer.self_attn)
    form = attention_form(type(attention), rotary)
    norms = [getattr(layer, name, None) for name in _NORMS]
    if form is None or type(layer.mlp) is not PackedGated or not all(map(_is_norm, norms)):
        return False
    parts = [getattr(attention, name, None) for name in _PROJECTIONS]
    heads = [getattr(attention, name, None) for name in _HEAD_NORMS[: 2 * form.norms]]
    if not (all(type(one) is PackedProjection for one in parts) and type(attention.o_proj) is PackedLinear):
        return False
    projections = cast(list[PackedProjection], parts)
    if not all(one.shared is projections[0].shared and one.part == part for part, one in enumerate(projections)):
        return False
    if not all(map(_is_norm, heads)) or len({cast(PackedNorm, one).epsilon for one in heads}) > 1:
        return False
    try:
        made = _Fused(layer, attention, form)
    except ValueError:  # sizes that don't fit together: the modules say what is wrong when they are called
        return False
    kind = type(layer)
    vars(layer)["_fused"] = made
    layer.__class__ = type(
        f"Packed{kind.__name__}", (kind,), {"__module__": __name__, "__call__": _call, "forward": _forward(own)}
    )
    return True


def fused(layer: nn.Module) -> Any:
    """What runs a layer that `fuse` has changed, its compiled calls in `calls`; None for other modules."""
    return vars(layer).get("_fused")


def _is_norm(module: object) -> bool:
    return type(module) is PackedNorm and not module.plus_one


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Straight to forward where nothing is hooked in."""
    if self._forward_hooks or self._forward_pre_hooks or _HOOKS or _PRE_HOOKS or self.training or is_compiling():
        return super(type(self), self).__call__(*args, **kwargs)
    return self.forward(*args, **kwargs)


def _forward(own: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a layer's class, with its own forward for what the compiled calls don't serve."""

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        compiled: _Fused = self._fused
        if not compiled.serves(self, hidden_states, position_embeddings):
            result: torch.Tensor = own(
                self, hidden_states, attention_mask, position_ids, cache, use_cache, position_embeddings, **kwargs
            )
            return result
        kwargs["position_ids"], kwargs["use_cache"] = position_ids, use_cache
        return compiled.run(hidden_states, attention_mask, cache, position_embeddings, kwargs)

    return forward


class _Fused:
    """The compiled calls of one layer, and the modules that they stand for."""

    def __init__(self, layer: nn.Module, attention: nn.Module, form: AttentionForm) -> None:
        names = (*_PROJECTIONS, "o_proj", *_HEAD_NORMS[: 2 * form.norms])
        owned = [(layer, name) for name in ("self_attn", "mlp", *_NORMS)] + [(attention, name) for name in names]
        self._parts: list[tuple[nn.Module, str, Any]] = [(one, name, getattr(one, name)) for one, name in owned]
        self._norms = [cast(PackedNorm, getattr(layer, name)) for name in _NORMS]
        self._heads = [cast(PackedNorm, getattr(attention, name)) for name in _HEAD_NORMS[: 2 * form.norms]]
        self._attention, self._form = cast(Any, attention), form
        self._kind = type(attention)
        mlp = cast(PackedGated, layer.mlp)
        first, output = cast(PackedProjection, attention.q_proj), cast(PackedLinear, attention.o_proj)
        self._head_dim = cast(int, attention.head_dim)
        self._width = first.in_features
        self._counts = [
            cast(PackedProjection, getattr(attention, name)).out_features // self._head_dim for name in _PROJECTIONS
        ]
        self.calls = PackedLayer(
            first.shared.matrix,
            output.matrix,
            mlp.gate_up,
            mlp.down,
            mlp.activation,
            self._head_dim,
            self._norms[0].epsilon,
            self._norms[1].epsilon,
            self._heads[0].epsilon if self._heads else 0.0,
        )

    def serves(self, layer: nn.Module, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor] | None) -> bool:
        """Whether the layer is still what it was, and the compiled calls take such an input."""
        if (
            is_compiling()
            or x.dtype is not _BF16
            or x.ndim != 3
            or x.shape[2] != self._width
            or not x.is_cpu
            or not x.is_contiguous()
            or x.requires_grad
            or layer.training
            or angles is None
            or _HOOKS
            or _PRE_HOOKS
            or torch._C._get_tracing_state()
        ):
            return False
        batch, tokens, _ = x.shape
        for one in angles:
            shape = one.shape
            if (
                one.dtype is not _BF16
                or len(shape) != 3
                or shape[0] not in (1, batch)
                or shape[1] != tokens
                or shape[2] != self._head_dim
                or not one.is_contiguous()
                or not one.is_cpu
                or tokens == 0
            ):
                return False
        if angles[0].shape != angles[1].shape or type(self._attention) is not self._kind:
            return False
        for parent, name, part in self._parts:
            same = parent._modules.get(name) is part
            if (
                not same
                or part._forward_hooks
                or part._forward_pre_hooks
                or part.training
                or "forward" in part.__dict__
            ):
                return False
        return all(norm.weight.dtype is _BF16 and norm.weight.is_contiguous() for norm in (*self._norms, *self._heads))

    def run(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None,
        cache: Any,
        angles: Any,
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        """The layer's output, [batch, tokens, width] as x. kwargs are the attention's and the cache's."""
        attention, form = self._attention, self._form
        batch, tokens, _ = x.shape
        queries, keys, values = (x.new_empty((batch, tokens, count, self._head_dim)) for count in self._counts)
        cos, sin = angles
        before, after = self._norms
        on_queries, on_keys = (norm.weight.data_ptr() for norm in self._heads) if self._heads else (0, 0)
        self.calls.before(
            x.data_ptr(),
            x.numel(),
            before.weight.data_ptr(),
            on_queries,
            on_keys,
            cos.data_ptr(),
            sin.data_ptr(),
            cos.numel(),
            queries.data_ptr(),
            queries.numel(),
            keys.data_ptr(),
            keys.numel(),
            values.data_ptr(),
            values.numel(),
        )
        queries, keys, values = queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
        if cache is not None:
            keys, values = cache.update(keys, values, attention.layer_idx, kwargs=kwargs)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(attention.config._attn_implementation, form.eager)
        if form.windowed:
            kwargs["sliding_window"] = form.window(attention)
        attended, _ = attend(attention, queries, keys, values, mask, dropout=0.0, scaling=attention.scaling, **kwargs)
        if attended.dtype is not _BF16 or attended.requires_grad or not attended.is_cpu:
            unusable(attention.o_proj, attended, attention.o_proj.in_features)
        attended = attended.reshape(batch, tokens, -1).contiguous()
        result = torch.empty_like(x)
        self.calls.after(
            x.data_ptr(),
            x.numel(),
            attended.data_ptr(),
            attended.numel(),
            after.weight.data_ptr(),
            result.data_ptr(),
            result.numel(),
        )
        return result
