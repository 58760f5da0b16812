"""Registration, and pairs of cache and attention that don't belong together: a clear error, nothing wrong computed."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers as tf
from transformers import AttentionInterface, DynamicCache, StaticCache
from transformers.masking_utils import AttentionMaskInterface, create_causal_mask

import kvpager.hf
from hf import tiny
from hf.runs import SMALL, paged
from kvpager.errors import CacheMismatch, InputError, StepError, UnsupportedModel
from kvpager.hf import PagerCache

IDS = tiny.tokens(40)


def run(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.slow
def test_nothing_is_registered_by_an_import() -> None:
    run(
        "import sys, kvpager; assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
        "import kvpager.hf\n"
        "from transformers import AttentionInterface\n"
        "assert 'kvpager' not in AttentionInterface._global_mapping\n"
        "kvpager.hf.register()\n"
        "assert 'kvpager' in AttentionInterface._global_mapping"
    )


def test_without_pytorch_the_extra_is_named() -> None:
    run(
        "import sys; sys.modules['torch'] = None\n"
        "from kvpager.errors import MissingDependency\n"
        "try:\n    import kvpager.hf\n"
        "except MissingDependency as error:\n    assert 'kvpager[hf]' in str(error)\n"
        "else:\n    raise SystemExit('no error')"
    )


def test_registering_twice_changes_nothing() -> None:
    kvpager.hf.register()
    before = dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)
    kvpager.hf.register()
    assert before == (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping)


@pytest.mark.promise(6)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("bound", [True, False], ids=["its configuration", "a copy of it"])
def test_a_pager_cache_under_another_attention_is_refused(attention: str, bound: bool) -> None:
    model = tiny.build(tiny.llama(), attention)
    cache = PagerCache(model.config if bound else tiny.llama(), SMALL)
    with pytest.raises(CacheMismatch, match="attn_implementation='kvpager'"):
        model(IDS, cache=cache)
    assert cache.get_seq_length() == 0
    with pytest.raises(CacheMismatch):
        model.generate(IDS, cache=cache, max_new_tokens=3)
    cache.pager.check()


@pytest.mark.promise(6)
def test_a_model_of_one_layer_under_another_attention_is_refused() -> None:
    model = tiny.build(tiny.llama(num_hidden_layers=1), "sdpa")
    with pytest.raises(CacheMismatch, match="attn_implementation='sdpa'"):
        model(IDS, cache=PagerCache(model.config, SMALL))
    cache = PagerCache(tiny.llama(num_hidden_layers=1), SMALL)
    model(IDS, cache=cache)  # right, as nothing was in the cache; what comes after would not be
    with pytest.raises(CacheMismatch, match="not kvpager's"):
        model(IDS[:, :1], cache=cache)


@pytest.mark.promise(6)
@pytest.mark.parametrize("make", [DynamicCache, lambda config: StaticCache(config=config, max_cache_len=64)])
def test_our_attention_with_another_cache_is_refused(make: Any) -> None:
    model, _ = tiny.pair("llama")
    with pytest.raises(CacheMismatch, match="PagerCache"):
        model(IDS, cache=make(config=model.config) if make is DynamicCache else make(model.config))


@pytest.mark.promise(6)
def test_our_attention_without_a_cache_is_refused() -> None:
    model, _ = tiny.pair("llama")
    for arguments in ({"use_cache": False}, {}):
        with pytest.raises(CacheMismatch, match="use_cache"):
            model(IDS, **arguments)
    with pytest.raises(CacheMismatch, match="PagerCache"):
        model.generate(IDS, max_new_tokens=3)


@pytest.mark.promise(6)
def test_a_cache_of_another_model_is_refused() -> None:
    model, _ = tiny.pair("llama")
    cache = PagerCache(tiny.llama(kv_heads=1), SMALL)
    with pytest.raises(CacheMismatch, match="1 KV heads of 16 channels got keys of 2 heads of 16"):
        model(IDS, cache=cache)
    deeper = PagerCache(tiny.llama(num_hidden_layers=3), SMALL)
    model(IDS, cache=deeper)
    assert deeper.get_seq_length() == 0, "a forward that ends early is never committed"


@pytest.mark.promise(6)
def test_training_and_dropout_are_refused() -> None:
    model = tiny.build(tiny.llama(attention_dropout=0.1)).train()
    cache = PagerCache(model.config, SMALL)
    with pytest.raises(InputError, match="training"):
        model(IDS, cache=cache)
    model.eval()(IDS, cache=cache)
    assert cache.get_seq_length() == IDS.shape[1]


@pytest.mark.promise(6)
def test_attention_weights_are_refused() -> None:
    model, _ = tiny.pair("llama")
    with pytest.raises(InputError, match="output_attentions"):
        model(IDS, cache=PagerCache(model.config, SMALL), output_attentions=True)


@pytest.mark.promise(6)
def test_a_mask_of_four_dimensions_is_refused_and_nothing_is_stored() -> None:
    model, own = tiny.pair("llama")
    mask = torch.ones((1, 1, 40, 40), dtype=torch.bool).tril()
    with paged(model) as cache:
        with pytest.raises(InputError, match="4 dimensions"):
            model(IDS, attention_mask=mask, cache=cache)
        assert cache.get_seq_length() == 0
        torch.testing.assert_close(model(IDS, cache=cache).logits, own(IDS).logits, atol=1e-4, rtol=0)


@pytest.mark.promise(6)
@pytest.mark.parametrize(
    "overlay",
    [
        {"or_mask_function": lambda *_: torch.tensor(True)},
        {"and_mask_function": lambda *_: torch.tensor(True)},
        {"block_sequence_ids": torch.zeros((1, 40), dtype=torch.long)},
        {"position_ids": torch.arange(40).remainder(20)[None]},  # two packed sequences
    ],
    ids=["or", "and", "blocks", "packed"],
)
def test_other_patterns_than_causal_are_refused(overlay: dict[str, Any]) -> None:
    config = copy.deepcopy(tiny.pair("llama")[0].config)
    with pytest.raises(InputError, match="causally"):
        create_causal_mask(
            config=config, inputs_embeds=torch.zeros((1, 40, 64)), attention_mask=None, cache=None, **overlay
        )


@pytest.mark.promise(6)
def test_packed_sequences_without_a_cache_are_refused_by_the_model_too() -> None:
    model, _ = tiny.pair("llama")
    with pytest.raises(InputError, match="packed"):
        model(IDS, position_ids=torch.arange(40).remainder(20)[None], use_cache=False)


@pytest.mark.promise(6)
def test_a_model_whose_attention_hands_nothing_on_is_refused() -> None:
    config = tf.GPTNeoXConfig(hidden_size=64, num_attention_heads=4, intermediate_size=64, num_hidden_layers=2)
    config.vocab_size = tiny.VOCABULARY
    model = tiny.build(config)
    disguised = PagerCache(tiny.llama(kv_heads=4), SMALL)  # as if kv_shape had let it pass
    disguised._config = model.config
    with pytest.raises(UnsupportedModel, match="hand its arguments"):
        model(IDS, cache=disguised)


@pytest.mark.promise(6)
def test_a_model_that_attends_twice_a_layer_is_refused() -> None:
    settings = {name: getattr(tiny.llama(), name) for name in ("hidden_size", "intermediate_size", "vocab_size")}
    config = tf.DiffLlamaConfig(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, **settings)
    model = tiny.build(config)
    cache = PagerCache(model.config, SMALL)
    with pytest.raises(UnsupportedModel, match="DiffLlamaAttention: it attends more than once"):
        model(IDS, cache=cache)
    assert cache.get_seq_length() == 0


@pytest.mark.promise(6)
def test_sinks_and_windows_that_the_configuration_hides_are_refused() -> None:
    model, _ = tiny.pair("llama")
    with pytest.raises(UnsupportedModel, match="sinks"):
        model(IDS, cache=PagerCache(model.config, SMALL), s_aux=torch.zeros(4))
    config = tiny.llama()
    config.sliding_window = 32  # Llama's own code ignores it
    with pytest.raises(UnsupportedModel, match=r"window of None.*says 32"):
        tiny.build(config)(IDS, cache=PagerCache(config, SMALL))


@pytest.mark.promise(6)
def test_layers_out_of_order_are_refused() -> None:
    cache = PagerCache(tiny.llama(), SMALL)
    states = torch.zeros((1, 2, 4, 16))
    with pytest.raises(StepError, match="layer 1"):
        cache.update(states, states, 1, kwargs={})
    with pytest.raises(UnsupportedModel):
        cache.update(states, states, 0)
