"""Which of a model's modules packed ones can stand for.

A module counts as a known one if its forward is, instruction for instruction, that of a module of transformers: models
there repeat each other's code under names of their own. What was changed in any way is not recognised and stays.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn
from transformers.activations import GELUActivation, GELUTanh, SiLUActivation
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as _INTERFACES
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.phi3 import modeling_phi3 as phi3
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from kvpager.kernels.linear import ACTIVATIONS

__all__ = [
    "AttentionForm",
    "GatedForm",
    "NormForm",
    "attention_form",
    "embeddings_of",
    "gated_form",
    "is_linear",
    "is_plain",
    "layer_forward",
    "norm_form",
    "rotary_forward",
]

_ROTARY = "apply_rotary_pos_emb"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_plain(module: nn.Module) -> bool:
    """Whether nothing was hooked into a module or any module in it, and no forward was put over its class's."""
    return not any(
        "forward" in vars(part) or any(getattr(part, hooks) for hooks in _HOOKS) for part in module.modules()
    )


def is_linear(module: object) -> bool:
    """Whether a module is a plain linear layer, bfloat16 on the CPU; subclasses are not."""
    return type(module) is nn.Linear and is_plain(module) and all(map(_fits, module.parameters()))


def _fits(parameter: torch.Tensor) -> bool:
    # exact types: a subclass (a quantised weight, say) holds something else
    return type(parameter) is nn.Parameter and parameter.dtype is torch.bfloat16 and parameter.is_cpu


@dataclass(frozen=True)
class GatedForm:
    """A gated multilayer perceptron: names of the linear layers whose outputs are the gate and what it multiplies
    (one name: both, one after the other), its activation's module and number."""

    linears: tuple[str, ...]
    act_fn: nn.Module
    activation: int


def gated_form(module: nn.Module) -> GatedForm | None:
    """How a module is a gated multilayer perceptron of plain linear layers, or None."""
    linears: tuple[str, ...]
    if _same(type(module).forward, llama.LlamaMLP.forward):
        linears, act_fn = ("gate_proj", "up_proj"), getattr(module, "act_fn", None)
    elif _same(type(module).forward, phi3.Phi3MLP.forward):
        linears, act_fn = ("gate_up_proj",), getattr(module, "activation_fn", None)
    else:
        return None
    activation = _activation(act_fn)
    parts = [getattr(module, name, None) for name in (*linears, "down_proj")]
    if (
        activation is None
        or not isinstance(act_fn, nn.Module)
        or not is_plain(module)
        or not all(map(is_linear, parts))
    ):
        return None
    return GatedForm(linears, act_fn, ACTIVATIONS[activation])


def _activation(act_fn: object) -> str | None:
    kind, act = type(act_fn), getattr(act_fn, "act", None)
    if kind in (SiLUActivation, nn.SiLU):
        return "silu"
    if kind is GELUActivation and act is nn.functional.gelu:
        return "gelu"
    if kind is GELUTanh and isinstance(act, functools.partial) and act.func is nn.functional.gelu:
        return "gelu_tanh" if not act.args and act.keywords == {"approximate": "tanh"} else None
    if kind is nn.GELU:
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(str(getattr(act_fn, "approximate", "")))
    return None


@dataclass(frozen=True)
class NormForm:
    """A root-mean-square norm: what is added to the mean of squares, and whether 1 + weight multiplies (Gemma)."""

    epsilon: float
    plus_one: bool


def norm_form(module: nn.Module) -> NormForm | None:
    """How a module is a plain root-mean-square norm, bfloat16 on the CPU, or None."""
    kind = type(module)
    if _same(kind.forward, llama.LlamaRMSNorm.forward):
        epsilon, plus_one = getattr(module, "variance_epsilon", None), False
    elif _same(kind.forward, gemma2.Gemma2RMSNorm.forward) and _same(
        getattr(kind, "_norm", None), gemma2.Gemma2RMSNorm._norm
    ):
        epsilon, plus_one = getattr(module, "eps", None), True
    else:
        return None
    weight = getattr(module, "weight", None)
    fits = isinstance(weight, torch.Tensor) and _fits(weight) and weight.ndim == 1 and weight.is_contiguous()
    return NormForm(epsilon, plus_one) if fits and isinstance(epsilon, float) and is_plain(module) else None


def embeddings_of(model: nn.Module, weight: torch.Tensor) -> Iterator[tuple[nn.Module, str, nn.Embedding]]:
    """Embeddings that share an output layer's weight: the module that has it, its name there, and the embedding."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.Embedding) and child.weight is weight and child.max_norm is None:
                known = type(child) is nn.Embedding or _same(
                    type(child).forward, gemma2.Gemma2TextScaledWordEmbedding.forward
                )
                if known and is_plain(child):
                    yield parent, name, child


def rotary_forward(kind: type[nn.Module], rotate: Callable[..., Any]) -> Callable[..., Any] | None:
    """The forward of a kind of attention with `rotate` in the place of the rotary embedding that it calls.

    None where it calls none, or another one than Llama's. The forward's instructions are its own; they find another
    function under that name, and transformers' module stays as it is.
    """
    forward = kind.forward
    inner = inspect.unwrap(forward)
    called = getattr(inner, "__globals__", {}).get(_ROTARY)
    if _ROTARY not in getattr(getattr(inner, "__code__", None), "co_names", ()) or called is rotate:
        return None
    if (
        called is None
        or not _same(called, llama.apply_rotary_pos_emb)
        or not _same(called.__globals__.get("rotate_half"), llama.rotate_half)
    ):
        return None
    return _rebound(forward, inner.__globals__ | {_ROTARY: rotate})


@dataclass(frozen=True)
class AttentionForm:
    """An attention that projects, turns and attends as Llama's does.

    norms     whether queries and keys go through a norm of their heads first (Qwen 3)
    windowed  whether it hands a sliding window on, and `window` gives that of an attention
    eager     the attention function that is called where none is registered
    """

    norms: bool
    windowed: bool
    window: Callable[[Any], int | None]
    eager: Callable[..., Any]


_ATTENTIONS: tuple[tuple[Callable[..., Any], bool, bool, Callable[[Any], int | None]], ...] = (
    (llama.LlamaAttention.forward, False, False, lambda module: None),
    (qwen2.Qwen2Attention.forward, False, True, lambda module: module.sliding_window),
    (qwen3.Qwen3Attention.forward, True, True, lambda module: module.sliding_window),
    (mistral.MistralAttention.forward, False, True, lambda module: getattr(module.config, "sliding_window", None)),
)


def attention_form(kind: type[nn.Module], rotate: Callable[..., Any]) -> AttentionForm | None:
    """How a kind of attention, whose forward has `rotate` in the place of its rotary embedding, is like Llama's."""
    inner = inspect.unwrap(kind.forward)
    names = getattr(inner, "__globals__", {})
    eager = names.get("eager_attention_forward")
    if names.get(_ROTARY) is not rotate or eager is None or names.get("ALL_ATTENTION_FUNCTIONS") is not _INTERFACES:
        return None
    for known, norms, windowed, window in _ATTENTIONS:
        if _same(inner, inspect.unwrap(known)):
            return AttentionForm(norms, windowed, window, eager)
    return None


def layer_forward(kind: type[nn.Module]) -> Callable[..., torch.Tensor] | None:
    """The forward of a kind of decoder layer that does what Llama's does, or None."""
    forward: Callable[..., torch.Tensor] = kind.forward
    return forward if _same(inspect.unwrap(forward), inspect.unwrap(llama.LlamaDecoderLayer.forward)) else None


def _rebound(function: Any, names: dict[str, Any]) -> Callable[..., Any] | None:
    """A copy of a function that finds its global names in `names`, inside copies of the functions that wrap it."""
    wrapped, closure = getattr(function, "__wrapped__", None), function.__closure__
    if wrapped is not None:
        inner = _rebound(wrapped, names)
        cells = [cell.cell_contents is wrapped for cell in closure or ()]
        if inner is None or not any(cells):
            return None
        closure = tuple(CellType(inner) if own else cell for own, cell in zip(cells, closure, strict=True))
        names = function.__globals__
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(copy, function, updated=())
    copy.__wrapped__ = inner if wrapped is not None else None  # type: ignore[attr-defined]
    if wrapped is None:
        del copy.__wrapped__  # type: ignore[attr-defined]
    return copy


def _same(function: Any, known: Callable[..., Any]) -> bool:
    """Whether a function runs the same instructions on the same names and constants as a known one."""
    code, other = getattr(function, "__code__", None), known.__code__
    return code is not None and (code.co_code, code.co_names, code.co_consts, code.co_freevars) == (
        other.co_code,
        other.co_names,
        other.co_consts,
        other.co_freevars,
    )
