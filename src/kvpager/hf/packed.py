"""Modules whose weights are packed for the compiled kernels: what `accelerate` puts in the place of a model's own.

All take and give bfloat16 on the CPU, and have no gradient. Their weights are not parameters: `state_dict` unpacks
them, under the names and with the bits that they had (int8 weights refuse: their rounding can't be undone).
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.nn.modules.module import _global_forward_hooks as _HOOKS
from torch.nn.modules.module import _global_forward_pre_hooks as _PRE_HOOKS

from kvpager._native import rms_norm
from kvpager.errors import InputError
from kvpager.hf.eager import eager
from kvpager.kernels.linear import PackedMatrix

__all__ = ["PackedEmbedding", "PackedGated", "PackedLinear", "PackedNorm", "PackedProjection", "Place", "Projections"]

_BF16 = torch.bfloat16


class Place:
    """Where a weight [outputs, inputs] lies in a packed matrix."""

    __slots__ = ("count", "first", "half", "matrix", "part")

    def __init__(self, matrix: PackedMatrix, count: int, *, part: int = 0, half: int = 0, first: int = 0) -> None:
        self.matrix, self.count, self.part, self.half, self.first = matrix, count, part, half, first

    def write(self, weight: torch.Tensor) -> None:
        """Pack a weight, bfloat16 [count, inputs]. Raises ValueError when int8 can't hold it."""
        weight = weight.detach().contiguous()
        self.matrix.write(self.part, self.half, self.first, weight.data_ptr(), weight.numel())

    def set_bias(self, bias: torch.Tensor) -> None:
        """Add a bias, bfloat16 [count], to what the weight's outputs are."""
        self.matrix.set_bias(self.part, self.half, bias.data_ptr(), bias.numel())

    def read(self) -> torch.Tensor:
        """The weight unpacked, bfloat16 [count, inputs]; int8 times its scale."""
        weight = torch.empty((self.count, self.matrix.inputs), dtype=_BF16)
        self.matrix.read(self.part, self.half, self.first, weight.data_ptr(), weight.numel())
        return weight


def unusable(module: nn.Module, x: torch.Tensor, width: int) -> NoReturn:
    """Raise InputError that says what is wrong with an input."""
    name = type(module).__name__
    if module.training:
        raise InputError(f"{name}: the model is in training mode; packed weights serve inference, call model.eval()")
    if x.requires_grad:
        raise InputError(f"{name}: a gradient is asked for, and packed weights have none; use torch.no_grad()")
    if x.dtype is not _BF16 or not x.is_cpu:
        raise InputError(f"{name}: its input is {x.dtype} on {x.device}; packed weights take bfloat16 on the CPU")
    raise InputError(f"{name}: its input has {x.shape[-1] if x.ndim else 0} channels, not {width}")


class _Quick(nn.Module):
    """A module of one input whose call costs less: straight to forward where nothing is hooked in."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if is_compiling():
            return self._uncompiled(x)
        if self._forward_hooks or self._forward_pre_hooks or _HOOKS or _PRE_HOOKS or torch._C._get_tracing_state():
            return self._slow(x)
        result: torch.Tensor = self.forward(x)
        return result

    @eager
    def _uncompiled(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)

    def _slow(self, x: torch.Tensor) -> torch.Tensor:
        if torch._C._get_tracing_state():
            raise InputError(f"{type(self).__name__}: it can't be traced; trace the model before it is accelerated")
        result: torch.Tensor = super().__call__(x)
        return result


class _Packed(_Quick):
    """What packed modules share: their weights' places and a state_dict that unpacks them."""

    _places: dict[str, list[Place]]  # by the name of the parameter: its rows, one place after the other
    _biases: dict[str, torch.Tensor]  # by name

    def matrices(self) -> list[PackedMatrix]:
        """The matrices that hold its weights, each once; other modules may share them."""
        return list({id(one.matrix): one.matrix for places in self._places.values() for one in places}.values())

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name, places in self._places.items():
            destination[prefix + name] = self._unpacked(name, places)
        for name, bias in self._biases.items():
            destination[prefix + name] = bias
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _unpacked(self, name: str, places: list[Place]) -> torch.Tensor:
        if places[0].matrix.weights != "bfloat16":
            raise InputError(f"{name}: its weights were rounded to int8; save the model before it is accelerated")
        weights = [place.read() for place in places]
        return weights[0] if len(weights) == 1 else torch.cat(weights)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *_: Any) -> None:
        raise InputError(
            f"{prefix.rstrip('.') or type(self).__name__}: packed weights can't be loaded; load the model first"
        )

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise InputError(f"{type(self).__name__}: packed weights can't be copied; copy the model first")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InputError(f"{type(self).__name__}: packed weights can't be pickled; save the state_dict")


class _PackedProduct(_Packed):
    """In the place of one nn.Linear, the rows of whose weight are at one place."""

    def __init__(self, place: Place, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.in_features, self.out_features = place.matrix.inputs, place.count
        self.matrix = place.matrix
        self._places = {"weight": [place]}
        self._biases = {} if bias is None else {"bias": bias}
        if bias is not None:
            place.set_bias(bias)

    @property
    def weight(self) -> torch.Tensor:
        """The weight unpacked anew: changing it changes nothing."""
        return self._places["weight"][0].read()

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias; changing it changes nothing."""
        return self._biases.get("bias")

    def extra_repr(self) -> str:
        """The sizes, as nn.Linear shows them, and the type of the weights."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={bool(self._biases)}, "
            f"weights={self.matrix.weights}"
        )


class PackedLinear(_PackedProduct):
    """In the place of nn.Linear: y = x W^T + bias, x [..., in_features]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., out_features]. Raises InputError for another dtype or width, in training, or for a gradient."""
        shape = x.shape
        if x.dtype is not _BF16 or x.requires_grad or self.training or shape[-1] != self.in_features or not x.is_cpu:
            unusable(self, x, self.in_features)
        if not x.is_contiguous():
            x = x.contiguous()
        result = x.new_empty((*shape[:-1], self.out_features))
        self.matrix.product(x.data_ptr(), x.numel(), result.data_ptr(), result.numel())
        return result


class Projections:
    """The queries', keys' and values' weights as one matrix of three parts, multiplied by one input at once.

    The first of the three modules that sees an input computes all three products. The others hand theirs out if they
    are given the very same tensor, unchanged since; each product is handed out once. Whatever else they are given they
    compute alone, so any order of calls gives the right result. Tensors made under torch.inference_mode keep no count
    of changes: one that is changed in place between its projections, which no supported model does, is not noticed.
    `_ready` is replaced and popped from in single steps: threads that share the modules can at worst miss what another
    has computed.
    """

    def __init__(self, matrix: PackedMatrix) -> None:
        self.matrix = matrix
        self.outputs = tuple(matrix.outputs)
        self._ready: tuple[torch.Tensor, int, dict[int, torch.Tensor]] | None = None

    def product(self, part: int, x: torch.Tensor) -> torch.Tensor:
        """Part 0, 1 or 2 of the product of a contiguous x [..., inputs]: [..., outputs[part]]."""
        ready = self._ready
        version = -1 if x.is_inference() else x._version
        if ready is not None and ready[0] is x and ready[1] == version:
            result = ready[2].pop(part, None)
            if not ready[2]:
                self._ready = None  # nothing is kept longer than it is wanted
            if result is not None:
                return result
        lead = x.shape[:-1]
        first, second, third = self.outputs
        a, b, c = x.new_empty((*lead, first)), x.new_empty((*lead, second)), x.new_empty((*lead, third))
        self.matrix.product3(
            x.data_ptr(), x.numel(), a.data_ptr(), a.numel(), b.data_ptr(), b.numel(), c.data_ptr(), c.numel()
        )
        parts = {0: a, 1: b, 2: c}
        result = parts.pop(part)
        self._ready = (x, version, parts)
        return result


class PackedProjection(_PackedProduct):
    """In the place of an attention's q_proj, k_proj or v_proj: one part of their common product."""

    def __init__(self, shared: Projections, part: int, bias: torch.Tensor | None) -> None:
        super().__init__(Place(shared.matrix, shared.outputs[part], part=part), bias)
        self.shared, self.part = shared, part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., out_features]. Raises InputError for another dtype or width, in training, or for a gradient."""
        if x.dtype is not _BF16 or x.requires_grad or self.training or x.shape[-1] != self.in_features or not x.is_cpu:
            unusable(self, x, self.in_features)
        return self.shared.product(self.part, x if x.is_contiguous() else x.contiguous())

    def extra_repr(self) -> str:
        """The sizes, as nn.Linear shows them, the type of the weights, and that the product is shared."""
        return f"{super().extra_repr()}, part {self.part} of a common product"


class PackedGated(_Packed):
    """In the place of a gated multilayer perceptron: down(act(gate(x)) * up(x)) in one call.

    `names` are the parameters that it stands for, `activation` a number of kvpager.kernels.linear.ACTIVATIONS.
    """

    def __init__(
        self,
        gate_up: PackedMatrix,
        down: PackedMatrix,
        activation: int,
        act_fn: nn.Module,
        places: dict[str, list[Place]],
        biases: dict[str, torch.Tensor],
    ) -> None:
        super().__init__()
        self.act_fn = act_fn
        self.hidden_size, self.intermediate_size = gate_up.inputs, gate_up.outputs[0]
        self.out_features = down.outputs[0]
        self.gate_up, self.down, self.activation = gate_up, down, activation
        self._places, self._biases = places, biases

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., out_features]. Raises InputError for another dtype or width, in training, or for a gradient."""
        shape = x.shape
        if x.dtype is not _BF16 or x.requires_grad or self.training or shape[-1] != self.hidden_size or not x.is_cpu:
            unusable(self, x, self.hidden_size)
        if not x.is_contiguous():
            x = x.contiguous()
        result = x.new_empty((*shape[:-1], self.out_features))
        self.gate_up.gated(self.down, self.activation, x.data_ptr(), x.numel(), result.data_ptr(), result.numel())
        return result

    def extra_repr(self) -> str:
        """The sizes and the type of the weights."""
        return f"{self.hidden_size}, {self.intermediate_size}, weights={self.gate_up.weights}"


class PackedEmbedding(_Packed):
    """In the place of an embedding that shares its weight with the output layer: reads its rows from there.

    `scale` multiplies what is read (Gemma's embeddings), None for nothing.
    """

    def __init__(self, place: Place, padding_idx: int | None, scale: torch.Tensor | None) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.padding_idx = place.count, place.matrix.inputs, padding_idx
        self.matrix = place.matrix
        self._places, self._biases = {"weight": [place]}, {}
        self.embed_scale: torch.Tensor | None
        self.register_buffer("embed_scale", scale, persistent=False)

    @property
    def weight(self) -> torch.Tensor:
        """The weight unpacked anew: changing it changes nothing."""
        return self._places["weight"][0].read()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[..., embedding_dim] for whole numbers. Raises IndexError for one that is not in the vocabulary."""
        ids = input_ids.long().contiguous()
        result = torch.empty((*ids.shape, self.embedding_dim), dtype=_BF16)
        self.matrix.read_rows(ids.data_ptr(), ids.numel(), result.data_ptr(), result.numel())
        return result if self.embed_scale is None else result * self.embed_scale.to(_BF16)

    def extra_repr(self) -> str:
        """The sizes, as nn.Embedding shows them, and where the rows are."""
        return f"{self.num_embeddings}, {self.embedding_dim}, rows of the output layer"


class PackedNorm(_Quick):
    """In the place of a root-mean-square norm: Llama's, or with `plus_one` Gemma's. Keeps the weight as it is."""

    def __init__(self, weight: nn.Parameter, epsilon: float, plus_one: bool) -> None:
        super().__init__()
        self.weight = weight
        self.epsilon, self.plus_one = epsilon, plus_one
        self._width = weight.numel()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width]. Raises InputError for another dtype or width, in training, or for a gradient."""
        weight = self._parameters["weight"]
        assert weight is not None
        if x.dtype is not _BF16 or x.requires_grad or self.training or x.shape[-1] != self._width or not x.is_cpu:
            unusable(self, x, self._width)
        if weight.dtype is not _BF16 or not weight.is_contiguous():
            raise InputError(f"{type(self).__name__}: its weight is {weight.dtype}; it was bfloat16 when accelerated")
        if not x.is_contiguous():
            x = x.contiguous()
        result = torch.empty_like(x)
        rms_norm(
            x.data_ptr(), x.numel(), weight.data_ptr(), self._width, self.epsilon, self.plus_one, result.data_ptr()
        )
        return result

    def extra_repr(self) -> str:
        """The width and what is added to the squares' mean."""
        return f"({self._width},), eps={self.epsilon}" + (", 1 + weight" if self.plus_one else "")
