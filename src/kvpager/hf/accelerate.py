"""Putting packed modules in the place of a model's own: `accelerate`.

Modules are replaced, models are not written again: what takes part is recognised by what it is (a linear layer, three
projections side by side) or by what its code does (see recognise.py). All else stays in charge of itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast, get_args

import torch
from torch import nn

from kvpager.errors import ConfigError, InputError
from kvpager.hf.layer import fuse
from kvpager.hf.packed import (
    PackedEmbedding,
    PackedGated,
    PackedLinear,
    PackedNorm,
    PackedProjection,
    Place,
    Projections,
)
from kvpager.hf.recognise import (
    GatedForm,
    NormForm,
    embeddings_of,
    gated_form,
    is_linear,
    layer_forward,
    norm_form,
    rotary_forward,
)
from kvpager.hf.rotary import rotate
from kvpager.kernels.linear import Arena, Weights, packed_bytes

__all__ = ["AccelerateReport", "accelerate"]

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True)
class AccelerateReport:
    """What was replaced.

    replaced        how many modules were made, by their class ("PackedLinear", ...)
    packed_bytes    memory that packed weights take
    dropped_bytes   memory of the weights that the model no longer holds
    left            names of the linear layers that were left as they are
    """

    replaced: dict[str, int]
    packed_bytes: int
    dropped_bytes: int
    left: tuple[str, ...]


def accelerate(model: nn.Module, weights: str = "bfloat16") -> AccelerateReport:
    """Replace what the compiled kernels do faster; the model then serves inference alone.

    `weights` says how packed weights are held: "bfloat16" (as they were) or "int8" (rounded, a scale for each output).
    Replaced are linear layers, an attention's q_proj, k_proj and v_proj (one product), gated multilayer perceptrons
    (one call), root-mean-square norms and Llama's rotary embedding, where they are bfloat16 on the CPU and plain, and
    the rest of a decoder layer that does what Llama's does and was packed in all its parts (see layer.py):
    subclasses (adapters, quantised weights) and modules with hooks are left alone. An embedding that shares its weight
    with the output layer reads from the packed one (bfloat16), so no weight is held twice. Parameters that stay are
    frozen. Called again it finds nothing left to do.

    The kernels have threads of their own (`kvpager._native.set_threads`). PyTorch's threads wait by spinning on the
    same cores, so long inputs run about twice as fast after `torch.set_num_threads(1)`.

    Raises ConfigError for other `weights`, InputError for a model in training mode, and ValueError for int8 where a
    weight is not finite; what was replaced before that is whole and works.
    """
    if weights not in get_args(Weights):
        raise ConfigError(f"weights: {weights!r} is not one of {', '.join(get_args(Weights))}")
    if model.training:
        raise InputError("model: it is in training mode; packed weights serve inference, call model.eval() first")
    steps = _plan(model, cast(Weights, weights))
    before = _parameter_bytes(model)
    packed = sum(size for size, _ in steps)
    arena = Arena(max(packed, 1))
    made: Counter[str] = Counter()
    while steps:
        _, run = steps.pop(0)  # with the step go the last references to what it replaced
        made.update(type(module.eval()).__name__ for module in run(arena))
    model.requires_grad_(False)
    if made:
        _unmap(model)
    left = tuple(name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return AccelerateReport(dict(made), packed, before - _parameter_bytes(model), left)


def _parameter_bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def _unmap(model: nn.Module) -> None:
    """Give parameters that stay memory of their own: one that is left of a file keeps all of the file mapped."""
    for parameter in model.parameters():
        if type(parameter) is nn.Parameter and parameter.is_cpu:
            parameter.data = parameter.data.clone()


# A replacement: its bytes in the arena, and what does it and gives the modules that were made.
_Step = tuple[int, Callable[[Arena], list[nn.Module]]]


def _plan(model: nn.Module, weights: Weights) -> list[_Step]:
    """All replacements in a model. Each leaves the model whole."""
    steps: list[_Step] = []
    taken: set[int] = set()

    def free(module: object) -> bool:
        return id(module) not in taken

    for parent in list(model.modules()):
        if not free(parent):
            continue
        for name, child in parent.named_children():
            if not free(child):
                continue
            if (gated := gated_form(child)) is not None:
                steps.append(_gated(parent, name, child, gated, weights))
                taken.update(map(id, child.modules()))
                continue
            if (norm := norm_form(child)) is not None:
                steps.append(_norm(parent, name, child, norm))
                taken.add(id(child))
            elif (forward := rotary_forward(type(child), rotate)) is not None and "forward" not in vars(child):
                steps.append(_rotary(child, forward))
        trio = [getattr(parent, name, None) for name in _PROJECTIONS]
        if all(is_linear(one) and free(one) for one in trio) and _go_together(cast(list[nn.Linear], trio)):
            steps.append(_projections(parent, cast(list[nn.Linear], trio), weights))
            taken.update(map(id, trio))
        for name, child in parent.named_children():
            if is_linear(child) and free(child):
                steps.append(_linear(model, parent, name, cast(nn.Linear, child), weights))
                taken.add(id(child))
    steps.extend(_layer(parent) for parent in model.modules() if layer_forward(type(parent)) is not None)
    return steps


def _go_together(linears: list[nn.Linear]) -> bool:
    return len(set(map(id, linears))) == 3 and len({linear.in_features for linear in linears}) == 1


def _bias(linear: nn.Linear) -> torch.Tensor | None:
    return None if linear.bias is None else linear.bias.detach().contiguous()


def _linear(model: nn.Module, parent: nn.Module, name: str, linear: nn.Linear, weights: Weights) -> _Step:
    outputs, inputs = linear.out_features, linear.in_features
    embeddings = list(embeddings_of(model, linear.weight)) if weights == "bfloat16" else []

    def run(arena: Arena) -> list[nn.Module]:
        place = Place(arena.matrix([outputs], inputs, weights), outputs)
        place.write(linear.weight)
        made: list[nn.Module] = [PackedLinear(place, _bias(linear))]
        setattr(parent, name, made[0])
        for owner, attribute, embedding in embeddings:
            scale = cast("torch.Tensor | None", getattr(embedding, "embed_scale", None))
            made.append(PackedEmbedding(place, embedding.padding_idx, scale))
            setattr(owner, attribute, made[-1])
        return made

    return packed_bytes([outputs], inputs, weights), run


def _projections(parent: nn.Module, linears: list[nn.Linear], weights: Weights) -> _Step:
    outputs, inputs = [linear.out_features for linear in linears], linears[0].in_features

    def run(arena: Arena) -> list[nn.Module]:
        shared = Projections(arena.matrix(outputs, inputs, weights))
        for part, linear in enumerate(linears):
            Place(shared.matrix, outputs[part], part=part).write(linear.weight)
        made: list[nn.Module] = [PackedProjection(shared, part, _bias(linear)) for part, linear in enumerate(linears)]
        for name, module in zip(_PROJECTIONS, made, strict=True):
            setattr(parent, name, module)
        return made

    return packed_bytes(outputs, inputs, weights), run


def _gated(parent: nn.Module, name: str, module: nn.Module, form: GatedForm, weights: Weights) -> _Step:
    sources = [cast(nn.Linear, getattr(module, one)) for one in form.linears]
    down = cast(nn.Linear, module.down_proj)
    inputs, width, outputs = sources[0].in_features, down.in_features, down.out_features

    def run(arena: Arena) -> list[nn.Module]:
        gate_up = arena.matrix([width], inputs, weights, gated=True)
        below = arena.matrix([outputs], width, weights)
        gate, up = Place(gate_up, width), Place(gate_up, width, half=1)
        halves = [[gate, up]] if len(sources) == 1 else [[gate], [up]]
        places, biases = {}, {}
        for one, linear, rows in zip(
            (*form.linears, "down_proj"), (*sources, down), (*halves, [Place(below, outputs)]), strict=True
        ):
            places[f"{one}.weight"] = rows
            for place, weight in zip(rows, linear.weight.chunk(len(rows)), strict=True):
                place.write(weight)
            if (bias := _bias(linear)) is not None:
                biases[f"{one}.bias"] = bias
                for place, some in zip(rows, bias.chunk(len(rows)), strict=True):
                    place.set_bias(some)
        made = PackedGated(gate_up, below, form.activation, form.act_fn, places, biases)
        setattr(parent, name, made)
        return [made]

    return packed_bytes([width], inputs, weights, gated=True) + packed_bytes([outputs], width, weights), run


def _rotary(module: nn.Module, forward: Callable[..., object]) -> _Step:
    def run(arena: Arena) -> list[nn.Module]:
        kind = type(module)
        module.__class__ = type(f"Packed{kind.__name__}", (kind,), {"__module__": __name__, "forward": forward})
        return [module]

    return 0, run


def _layer(module: nn.Module) -> _Step:
    """Comes after all that it is made of: a layer is recognised by its packed modules."""

    def run(arena: Arena) -> list[nn.Module]:
        return [module] if fuse(module, rotate) else []

    return 0, run


def _norm(parent: nn.Module, name: str, module: nn.Module, form: NormForm) -> _Step:
    weight = cast(nn.Parameter, module.weight)

    def run(arena: Arena) -> list[nn.Module]:
        made = PackedNorm(weight, form.epsilon, form.plus_one)
        setattr(parent, name, made)
        return [made]

    return 0, run
