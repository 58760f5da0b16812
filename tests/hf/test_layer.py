"""Decoder layers in two compiled calls, against the same packed modules one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer

from hf import tiny

native = pytest.importorskip("kvpager._native", reason="the compiled kernels are not built here")
from kvpager.errors import InputError  # noqa: E402
from kvpager.hf import accelerate as module  # noqa: E402
from kvpager.hf.accelerate import accelerate  # noqa: E402
from kvpager.hf.packed import PackedLinear  # noqa: E402
from kvpager.kernels.linear import Arena  # noqa: E402

FUSED = ["llama", "llama-mqa", "llama-h24", "qwen2", "qwen3", "mistral", "qwen3-sliding"]


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = native.threads()
    native.set_threads(2)
    yield
    native.set_threads(max(before, 1))


@pytest.fixture(params=native.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = native.isa()
    native.set_isa(request.param)
    yield request.param
    native.set_isa(before)


def build(config: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    make: Callable[..., Any] = AutoModelForCausalLM.from_config
    return make(config, attn_implementation="eager", dtype=torch.bfloat16).eval()


def both(monkeypatch: pytest.MonkeyPatch, config: Callable[[], Any], weights: str = "bfloat16") -> tuple[Any, Any]:
    """The same model packed, with layers in two calls and without."""
    fused, apart = build(config()), build(config())
    accelerate(fused, weights)
    with monkeypatch.context() as patch:
        patch.setattr(module, "fuse", lambda *_: False)
        accelerate(apart, weights)
    assert type(fused.model.layers[0]).__name__.startswith("Packed")
    assert not type(apart.model.layers[0]).__name__.startswith("Packed")
    return fused, apart


def logits(model: Any, ids: torch.Tensor, **more: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(ids, **({"use_cache": False} | more)).logits
    return result


@pytest.fixture
def fused_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each layer that ran in two calls."""
    from kvpager.hf import layer

    runs: list[int] = []
    run = layer._Fused.run

    def counted(*args: Any) -> torch.Tensor:
        runs.append(1)
        return run(*args)

    monkeypatch.setattr(layer._Fused, "run", counted)
    return runs


@pytest.mark.parametrize("name", FUSED)
def test_two_calls_give_the_bits_of_the_modules(
    name: str, monkeypatch: pytest.MonkeyPatch, fused_runs: list[int]
) -> None:
    fused, apart = both(monkeypatch, tiny.CONFIGS[name])
    for tokens in range(1, 71):
        ids = tiny.tokens(tokens, seed=tokens)
        assert torch.equal(logits(fused, ids), logits(apart, ids)), tokens
    for rows, tokens in ((2, 1), (3, 17), (16, 1)):
        ids = tiny.tokens(tokens, rows=rows)
        assert torch.equal(logits(fused, ids), logits(apart, ids))
    assert len(fused_runs) == 2 * 73


@pytest.mark.parametrize("name", ["llama", "qwen3", "llama-h24"])
def test_every_instruction_set_and_int8(name: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for weights in ("bfloat16", "int8"):
        fused, apart = both(monkeypatch, tiny.CONFIGS[name], weights)
        for tokens in (1, 8, 16, 70, 500):
            ids = tiny.tokens(tokens)
            assert torch.equal(logits(fused, ids), logits(apart, ids))


def test_positions_of_many_sequences_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    fused, apart = both(monkeypatch, tiny.llama)
    ids, positions = tiny.tokens(12), torch.tensor([[5, 90, 3, 3, 200, 0, 1, 2, 3, 4, 5, 6]])
    assert torch.equal(logits(fused, ids, position_ids=positions), logits(apart, ids, position_ids=positions))


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_with_a_cache_and_biases(name: str, monkeypatch: pytest.MonkeyPatch, fused_runs: list[int]) -> None:
    def config() -> Any:
        result = tiny.CONFIGS[name]()
        result.attention_bias = result.mlp_bias = True
        return result

    models = both(monkeypatch, config)
    given = []
    for model in models:
        for layer in model.model.layers:
            assert name == "mistral" or layer.self_attn.q_proj.bias is not None
        cache = DynamicCache(config=model.config)
        given.append(
            [
                logits(model, tiny.tokens(tokens, seed=tokens), cache=cache, use_cache=True)
                for tokens in (40, 1, 1, 7, 1)
            ]
        )
    assert all(torch.equal(one, other) for one, other in zip(*given, strict=True))
    assert len(fused_runs) == 10


def test_inputs_that_are_not_contiguous(monkeypatch: pytest.MonkeyPatch, fused_runs: list[int]) -> None:
    fused, apart = both(monkeypatch, tiny.llama)
    wide = torch.randn((1, 20, 128), generator=torch.Generator().manual_seed(3)).bfloat16()
    x = wide[:, ::2, ::2]
    angles = fused.model.rotary_emb(x, torch.arange(10)[None])
    with torch.no_grad():
        ours, theirs = (model.model.layers[0](x, position_embeddings=angles) for model in (fused, apart))
        assert not fused_runs
        again = fused.model.layers[0](x.contiguous(), position_embeddings=angles)
        stretched = tuple(one.float().expand(2, -1, -1).bfloat16() for one in angles)
        pair = fused.model.layers[0](x.contiguous().expand(2, -1, -1).contiguous(), position_embeddings=stretched)
    assert torch.equal(ours, theirs)
    assert torch.equal(again, theirs)
    assert torch.equal(pair, theirs.expand(2, -1, -1))
    assert len(fused_runs) == 2


def test_an_input_keeps_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    fused, _ = both(monkeypatch, tiny.llama)
    x = torch.randn((1, 30, 64), generator=torch.Generator().manual_seed(3)).bfloat16()
    before = x.clone()
    with torch.no_grad():
        fused.model.layers[0](x, position_embeddings=fused.model.rotary_emb(x, torch.arange(30)[None]))
    assert torch.equal(x, before)


class Wrapped(nn.Module):
    """An adapter around a linear layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x) * 2
        return result


def _hook(*_: Any) -> None:
    return None


CHANGES: dict[str, Callable[[Any], Any]] = {
    "an adapter": lambda layer: setattr(layer.self_attn, "v_proj", Wrapped(layer.self_attn.v_proj)),
    "another perceptron": lambda layer: setattr(layer, "mlp", Wrapped(layer.mlp)),
    "another norm": lambda layer: setattr(layer, "input_layernorm", nn.Identity()),
    "a hook on a projection": lambda layer: layer.self_attn.k_proj.register_forward_hook(_hook),
    "a hook on the attention": lambda layer: layer.self_attn.register_forward_pre_hook(lambda *_: None),
    "a hook on the perceptron": lambda layer: layer.mlp.register_forward_hook(_hook),
    "a forward put over the class's": lambda layer: setattr(layer.mlp, "forward", lambda x: x * 3),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_that_was_changed_since_runs_its_own_forward(
    change: str, monkeypatch: pytest.MonkeyPatch, fused_runs: list[int]
) -> None:
    fused, apart = both(monkeypatch, tiny.llama)
    ids = tiny.tokens(9)
    for model in (fused, apart):
        CHANGES[change](model.model.layers[1])
    assert torch.equal(logits(fused, ids), logits(apart, ids))
    assert len(fused_runs) == 1  # the other layer


def test_hooks_on_a_layer_and_recorded_outputs(monkeypatch: pytest.MonkeyPatch, fused_runs: list[int]) -> None:
    fused, apart = both(monkeypatch, tiny.llama)
    ids = tiny.tokens(9)
    seen: list[Any] = []
    handle = fused.model.layers[0].register_forward_hook(lambda one, args, output: seen.append(output))
    logits(fused, ids)
    handle.remove()
    with torch.no_grad():
        ours, theirs = (model(ids, output_hidden_states=True, output_attentions=True) for model in (fused, apart))
    assert torch.equal(seen[0], ours.hidden_states[1])
    for one, other in zip(
        (*ours.hidden_states, *ours.attentions), (*theirs.hidden_states, *theirs.attentions), strict=True
    ):
        assert torch.equal(one, other)


class OtherLayer(LlamaDecoderLayer):
    """A layer with a forward of its own."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = super().forward(hidden_states, *args, **kwargs)
        return result * 2


class OtherAttention(LlamaAttention):
    """An attention with a forward of its own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def test_what_is_not_llamas_stays_apart() -> None:
    model = build(tiny.llama())
    first, second = model.model.layers
    first.__class__, second.self_attn.__class__ = OtherLayer, OtherAttention
    report = accelerate(model)
    assert "PackedLlamaDecoderLayer" not in report.replaced
    assert type(first) is OtherLayer
    assert type(second) is LlamaDecoderLayer


@pytest.mark.promise(6)
def test_what_a_layer_cannot_take_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    fused, _ = both(monkeypatch, tiny.llama)
    layer = fused.model.layers[0]
    x = torch.ones((1, 2, 64), dtype=torch.bfloat16)
    angles = fused.model.rotary_emb(x, torch.arange(2)[None])
    with pytest.raises(InputError, match="float32"), torch.no_grad():
        layer(x.float(), position_embeddings=angles)
    with pytest.raises(InputError, match="training"):
        layer.train()(x, position_embeddings=angles)
    layer.eval()
    with torch.enable_grad(), pytest.raises(InputError, match="gradient"):
        layer(x.clone().requires_grad_(), position_embeddings=angles)
    assert type(layer.self_attn.o_proj) is PackedLinear


@pytest.mark.promise(6)
def test_the_compiled_calls_check_what_they_get() -> None:
    def matrix(outputs: list[int], inputs: int, gated: bool = False) -> Any:
        return Arena(native.PackedMatrix.packed_bytes(outputs, inputs, "bfloat16", gated)).matrix(
            outputs, inputs, gated=gated
        )

    three, square, gate, down = matrix([64, 32, 32], 64), matrix([64], 64), matrix([96], 64, True), matrix([64], 96)
    kernel = native.PackedLayer(three, square, gate, down, 0, 16, 1e-5, 1e-5, 0.0)
    for wrong, said in (
        ((square, square, gate, down, 0, 16), "projections"),
        ((three, three, gate, down, 0, 16), "output"),
        ((three, matrix([64], 32), gate, down, 0, 16), "output"),
        ((three, square, square, down, 0, 16), "gate_up"),
        ((three, square, gate, gate, 0, 16), "down"),
        ((three, square, gate, square, 0, 16), "gate_up"),
        ((three, square, gate, down, 3, 16), "activation"),
        ((three, square, gate, down, 0, 15), "head_dim"),
        ((three, square, gate, down, 0, 24), "projections"),
    ):
        with pytest.raises(ValueError, match=said):
            native.PackedLayer(*wrong, 1e-5, 1e-5, 0.0)
    space = torch.zeros(4096, dtype=torch.bfloat16)
    at = space.data_ptr()
    for case, said in (
        ((at, 65, at, 0, 0, at, at, 16, at, 64, at, 32, at, 32), "x"),
        ((at, 0, at, 0, 0, at, at, 16, at, 0, at, 0, at, 0), "x"),
        ((at, 64, at, 0, 0, at, at, 32, at, 64, at, 32, at, 32), "cosine"),
        ((at, 64, at, 0, 0, at, at, 16, at, 63, at, 32, at, 32), "queries"),
        ((0, 64, at, 0, 0, at, at, 16, at, 64, at, 32, at, 32), "x"),
        ((at, 64, at, 1, 0, at, at, 16, at, 64, at, 32, at, 32), "query_norm"),
    ):
        with pytest.raises(ValueError, match=said):
            kernel.before(*case)
    for case_after, said in (
        ((at, 63, at, 64, at, at, 63), "x"),
        ((at, 64, at, 128, at, at, 64), "attended"),
        ((at, 64, at, 64, at, at, 32), "to"),
        ((at, 64, 0, 64, at, at, 64), "attended"),
    ):
        with pytest.raises(ValueError, match=said):
            kernel.after(*case_after)
