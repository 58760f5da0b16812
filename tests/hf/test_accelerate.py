"""Models whose modules were replaced by packed ones, against themselves before."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb

from hf import tiny

native = pytest.importorskip("kvpager._native", reason="the compiled kernels are not built here")
from kvpager.errors import ConfigError, InputError  # noqa: E402
from kvpager.hf.accelerate import accelerate  # noqa: E402
from kvpager.hf.packed import (  # noqa: E402
    PackedEmbedding,
    PackedGated,
    PackedLinear,
    PackedNorm,
    PackedProjection,
    Projections,
)
from kvpager.hf.rotary import rotate  # noqa: E402


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = native.threads()
    native.set_threads(2)
    yield
    native.set_threads(max(before, 1))


def build(config: Any, seed: int = 0) -> Any:
    """A bfloat16 model under an attention of transformers' own."""
    torch.manual_seed(seed)
    make: Callable[..., Any] = AutoModelForCausalLM.from_config
    return make(config, attn_implementation="eager", dtype=torch.bfloat16).eval()


def llama(**more: Any) -> Any:
    return build(tiny.llama(**more))


def logits(model: Any, ids: torch.Tensor, **more: Any) -> torch.Tensor:
    result: torch.Tensor = model(ids, use_cache=False, **more).logits.float()
    return result


# What of each architecture is replaced, for two layers.
ALL = {"PackedLinear": 3, "PackedProjection": 6, "PackedGated": 2}
REPLACED = {
    "llama": ALL | {"PackedNorm": 5, "PackedLlamaAttention": 2, "PackedLlamaDecoderLayer": 2},
    "llama-mqa": ALL | {"PackedNorm": 5, "PackedLlamaAttention": 2, "PackedLlamaDecoderLayer": 2},
    "llama-h24": ALL | {"PackedNorm": 5, "PackedLlamaAttention": 2, "PackedLlamaDecoderLayer": 2},
    "qwen2": ALL | {"PackedNorm": 5, "PackedQwen2Attention": 2, "PackedQwen2DecoderLayer": 2},
    "qwen3": ALL | {"PackedNorm": 9, "PackedQwen3Attention": 2, "PackedQwen3DecoderLayer": 2},
    "mistral": ALL | {"PackedNorm": 5, "PackedMistralAttention": 2, "PackedMistralDecoderLayer": 2},
    "qwen3-sliding": ALL | {"PackedNorm": 9, "PackedQwen3Attention": 2, "PackedQwen3DecoderLayer": 2},
    "gemma2": ALL | {"PackedNorm": 9, "PackedGemma2Attention": 2, "PackedEmbedding": 1},
    "gemma3": ALL | {"PackedNorm": 13, "PackedGemma3Attention": 2, "PackedEmbedding": 1},
    "phi": {"PackedLinear": 7, "PackedProjection": 6, "PackedPhiAttention": 2},
    "phi3": {"PackedLinear": 5, "PackedGated": 2, "PackedNorm": 5},
}


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_logits_are_as_near_to_the_truth_as_before(name: str) -> None:
    model = build(tiny.CONFIGS[name]())
    truth = copy.deepcopy(model).float()
    ids = tiny.tokens(70, rows=2)
    exact, before = logits(truth, ids), logits(model, ids)
    report = accelerate(model)
    assert report.replaced == REPLACED[name]
    assert report.left == ()
    for chosen in (ids, ids[:, :1], ids[:1, :9]):
        rows, columns = chosen.shape
        ours, theirs = (
            (one[:rows, :columns] - exact[:rows, :columns]).square().mean().sqrt()
            for one in (logits(model, chosen), before)
        )
        assert ours <= 1.5 * theirs + 1e-3


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "phi3"])
def test_a_row_has_the_same_logits_whatever_the_batch(name: str) -> None:
    model = build(tiny.CONFIGS[name]())
    accelerate(model)
    ids = tiny.tokens(1, rows=20)
    together = logits(model, ids)
    for row in (0, 13):
        assert torch.equal(logits(model, ids[row : row + 1]), together[row : row + 1])


def test_int8_is_near_and_smaller() -> None:
    model = llama(hidden=256)
    ids = tiny.tokens(50)
    before = logits(model, ids)
    report = accelerate(model, "int8")
    assert report.packed_bytes < 0.6 * report.dropped_bytes
    difference = (logits(model, ids) - before).square().mean().sqrt() / before.square().mean().sqrt()
    assert 0 < difference < 0.15


def test_generating_gives_the_tokens_of_the_model_before() -> None:
    model = llama()
    ids = tiny.tokens(20)
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    before = model.generate(ids, **settings)
    accelerate(model)
    assert torch.equal(model.generate(ids, **settings), before)


def test_the_books_of_memory() -> None:
    model = llama(tie_word_embeddings=True)
    total = sum(parameter.nbytes for parameter in model.parameters())
    report = accelerate(model)
    left = sum(parameter.nbytes for parameter in model.parameters())
    assert report.dropped_bytes == total - left
    assert left == 5 * 64 * 2  # the norms
    assert report.packed_bytes <= report.dropped_bytes * 1.05  # parts and halves are filled up
    assert "PackedEmbedding" in report.replaced


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_shared_embedding_reads_the_same_bits(name: str) -> None:
    config = tiny.CONFIGS[name]()
    config.tie_word_embeddings = True
    model = build(config)
    ids = tiny.tokens(9, rows=2)
    before = model.get_input_embeddings()(ids)
    accelerate(model)
    after = model.get_input_embeddings()
    assert type(after) is PackedEmbedding
    assert torch.equal(after(ids), before)
    assert torch.equal(after(ids.int()), before)
    with pytest.raises(IndexError, match="128"):
        after(torch.tensor([[128]]))


def test_an_embedding_of_its_own_stays() -> None:
    model = llama(tie_word_embeddings=False)
    embedding = model.get_input_embeddings()
    accelerate(model)
    assert model.get_input_embeddings() is embedding


def test_projections_in_any_order() -> None:
    model = llama()
    plain = copy.deepcopy(model).model.layers[0].self_attn
    accelerate(model)
    ours = model.model.layers[0].self_attn
    generator = torch.Generator().manual_seed(1)
    names = ("q_proj", "k_proj", "v_proj")

    def check(name: str, x: torch.Tensor) -> None:
        torch.testing.assert_close(getattr(ours, name)(x), getattr(plain, name)(x), rtol=1e-2, atol=1e-3)

    inputs = [torch.randn((1, 3, 64), generator=generator).bfloat16() for _ in range(3)]
    for _ in range(150):
        which, name = (int(torch.randint(0, 3, (), generator=generator)) for _ in range(2))
        check(names[name], inputs[which])
    for x in inputs:
        for name in ("v_proj", "q_proj", "k_proj", "q_proj"):
            check(name, x)
    x = inputs[0]
    ours.q_proj(x)
    x.mul_(2)  # changed in between: what waits is no longer right
    check("k_proj", x)
    first, second = ours.q_proj(x), ours.q_proj(x)
    assert first.data_ptr() != second.data_ptr()
    check("v_proj", torch.randn((7, 64), generator=generator).bfloat16().t().contiguous().t())


def test_projections_keep_nothing_once_all_are_taken() -> None:
    model = llama()
    accelerate(model)
    attention = model.model.layers[0].self_attn
    shared: Projections = attention.q_proj.shared
    x = torch.ones((1, 1, 64), dtype=torch.bfloat16)
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(attention, name)(x)
    assert shared._ready is None


def test_threads_share_a_model() -> None:
    model = llama()
    accelerate(model)
    prompts = [tiny.tokens(12, seed=seed) for seed in range(4)]
    alone = [logits(model, prompt) for prompt in prompts]
    wrong: list[int] = []

    def run(index: int) -> None:
        with torch.no_grad():
            wrong.extend(index for _ in range(20) if not torch.equal(logits(model, prompts[index]), alone[index]))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


class Adapter(nn.Linear):
    """A subclass, as adapters and quantised layers are."""


def test_what_is_not_plain_is_left_alone() -> None:
    model = llama()
    first, second = model.model.layers
    calls = []
    first.mlp.up_proj.register_forward_hook(lambda *_: calls.append("hook"))
    first.self_attn.k_proj = Adapter(64, 32, bias=False).to(torch.bfloat16).eval()
    second.mlp.act_fn = nn.Hardswish()
    second.input_layernorm.float()
    kept = (first.mlp, first.mlp.up_proj, first.self_attn.k_proj, second.mlp, second.input_layernorm)
    ids = tiny.tokens(8)
    model.model.layers = model.model.layers[:1]
    before = logits(model, ids)
    model.model.layers.append(second)
    report = accelerate(model)
    now = (first.mlp, first.mlp.up_proj, first.self_attn.k_proj, second.mlp, second.input_layernorm)
    assert all(one is other for one, other in zip(kept, now, strict=True))
    assert report.left == ("model.layers.0.self_attn.k_proj", "model.layers.0.mlp.up_proj")
    assert type(first.self_attn.q_proj) is type(second.mlp.gate_proj) is PackedLinear
    assert type(second.self_attn.q_proj) is PackedProjection
    model.model.layers = model.model.layers[:1]
    calls.clear()
    torch.testing.assert_close(logits(model, ids), before, rtol=0.05, atol=0.1)
    assert calls == ["hook"]


def test_a_float32_model_is_left_alone() -> None:
    model = tiny.build(tiny.llama(), "eager")
    ids = tiny.tokens(8)
    before = logits(model, ids)
    report = accelerate(model)
    assert set(report.replaced) == {"PackedLlamaAttention"}
    assert report.packed_bytes == report.dropped_bytes == 0
    assert torch.equal(logits(model, ids), before)


def test_a_forward_of_another_model_is_not_mistaken() -> None:
    class Other(Gemma2RMSNorm):
        def _norm(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    model = build(tiny.CONFIGS["gemma2"]())
    model.model.norm = Other(64).to(torch.bfloat16).eval()
    accelerate(model)
    assert type(model.model.norm) is Other


def test_again_finds_nothing_to_do() -> None:
    model = llama()
    accelerate(model)
    report = accelerate(model)
    assert (report.replaced, report.packed_bytes, report.dropped_bytes) == ({}, 0, 0)


def test_hooks_added_later_run() -> None:
    model = llama()
    accelerate(model)
    seen: list[str] = []
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    mlp.register_forward_hook(lambda module, args, output: seen.append("mlp"))
    attention.q_proj.register_forward_pre_hook(lambda module, args: seen.append("q"))
    handle = nn.modules.module.register_module_forward_hook(lambda *_: seen.append("any"))
    logits(model, tiny.tokens(3))
    handle.remove()
    assert {"mlp", "q", "any"} == set(seen)
    assert len(model(tiny.tokens(3), output_hidden_states=True, output_attentions=True).attentions) == 2


@pytest.mark.promise(6)
def test_what_packed_modules_cannot_do_is_said() -> None:
    model = llama()
    with pytest.raises(ConfigError, match="int4"):
        accelerate(model, "int4")
    with pytest.raises(InputError, match="training"):
        accelerate(model.train())
    accelerate(model.eval())
    for module in (model.lm_head, model.model.layers[0].mlp, model.model.layers[0].self_attn.k_proj, model.model.norm):
        x = torch.ones((1, 2, 64), dtype=torch.bfloat16)
        for wrong, said in ((x.float(), "float32"), (x[..., :63], "63 channels"), (x.to("meta"), "meta")):
            with pytest.raises(InputError, match=said):
                module(wrong)
        with torch.enable_grad(), pytest.raises(InputError, match="gradient"):
            module(x.requires_grad_())
        with pytest.raises(InputError, match="training"):
            module.train()(x.detach())
        module.eval()
    with torch.enable_grad():
        assert not logits(model, tiny.tokens(3)).requires_grad
    with pytest.raises(InputError, match="copied"):
        copy.deepcopy(model)
    with pytest.raises(InputError, match="pickled"):
        pickle.dumps(model.lm_head)
    with pytest.raises(InputError, match="loaded"):
        model.load_state_dict(model.state_dict())


def test_the_state_dict_has_the_weights_of_before(tmp_path: Path) -> None:
    for name in ("qwen2", "phi3", "gemma2"):
        model = build(tiny.CONFIGS[name]())
        before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        ids = tiny.tokens(9)
        accelerate(model)
        after = model.state_dict()
        assert set(after) == set(before)
        assert all(torch.equal(after[key], before[key]) for key in before)
        model.save_pretrained(tmp_path / name)
        again = AutoModelForCausalLM.from_pretrained(
            tmp_path / name, dtype=torch.bfloat16, attn_implementation="eager"
        ).eval()
        expected = logits(model, ids)
        accelerate(again)
        assert torch.equal(logits(again, ids), expected)
    model = llama()
    accelerate(model, "int8")
    with pytest.raises(InputError, match="int8"):
        model.state_dict()


def test_weights_can_be_looked_at() -> None:
    model = llama()
    weights = [model.lm_head.weight.clone(), model.model.layers[1].self_attn.v_proj.weight.clone()]
    accelerate(model)
    assert torch.equal(model.lm_head.weight, weights[0])
    assert torch.equal(model.model.layers[1].self_attn.v_proj.weight, weights[1])
    assert model.lm_head.bias is None
    text = repr(model)
    for kind in (PackedLinear, PackedProjection, PackedGated, PackedNorm):
        assert kind.__name__ in text
    assert "weights=bfloat16" in text


def test_rotating_equals_the_models_own_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(2)
    for batch, angles, tokens, width in ((1, 1, 1, 64), (3, 1, 5, 48), (2, 2, 70, 18), (1, 1, 300, 64)):
        q, k = (
            torch.randn((batch, tokens, heads, width), generator=generator).bfloat16().transpose(1, 2)
            for heads in (9, 3)
        )
        turn = torch.randn((angles, tokens, width), generator=generator)
        cos, sin = turn.cos().bfloat16(), turn.sin().bfloat16()
        for queries in (q, q.contiguous(), q.float()):
            ours, theirs = rotate(queries, k, cos, sin), apply_rotary_pos_emb(queries, k, cos, sin)
            assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_the_attention_keeps_its_class_and_transformers_its_function() -> None:
    model, other = llama(), llama()
    accelerate(model)
    attention = model.model.layers[0].self_attn
    assert isinstance(attention, LlamaAttention)
    assert type(attention).__name__ == "PackedLlamaAttention"
    assert type(other.model.layers[0].self_attn) is LlamaAttention
    assert LlamaAttention.forward.__wrapped__.__globals__["apply_rotary_pos_emb"] is apply_rotary_pos_emb
    x = torch.ones((1, 2, 64), dtype=torch.bfloat16)
    angles = model.model.rotary_emb(x, torch.arange(2)[None])
    with pytest.warns(FutureWarning, match="past_key_values"):  # the forward's own wrapper still works
        attention(x, position_embeddings=angles, past_key_values=None)


@pytest.mark.slow
def test_a_compiled_model_leaves_its_graph_for_packed_modules() -> None:
    model = llama()
    accelerate(model)
    ids = tiny.tokens(9)
    expected = logits(model, ids)
    compiled: Any = torch.compile(model, backend="eager")
    assert torch.equal(logits(compiled, ids), expected)
