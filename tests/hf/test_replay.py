"""Budgets lose what they say and nothing else: logits equal the mask-replay oracle, in every way to run a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hf import tiny
from hf.replay import Recorder, replayed
from hf.runs import SMALL, cut, forwards, minimum, paged
from kvpager import PagerConfig
from kvpager.config import DIGESTS, MODES, POLICIES
from kvpager.hf import PagerCache, kv_shape

PROMPT, STEPS, BUDGET = 200, 20, 128
CHUNKS = {chunk: cut(PROMPT + STEPS, chunk, STEPS) for chunk in (128, 44, 1)}


@contextmanager
def recorded(model: Any, config: PagerConfig, forward: int) -> Iterator[tuple[PagerCache, Recorder]]:
    """A cache and what its tiles attend to, for forwards of up to `forward` tokens.

    With mode "discard" a forward's new tokens come on top of the smallest pool.
    """
    if config.mode == "discard":
        pages = 2 * 2 * -(-forward // config.page_size)
        config = replace(config, pool=pages + minimum(kv_shape(model.config), config))
    with paged(model, config, least=config.mode == "recall") as cache:
        recorder = Recorder(config.page_size)
        cache.pager.observers.append(recorder)
        yield cache, recorder


def check(
    monkeypatch: pytest.MonkeyPatch, name: str, config: PagerConfig, chunks: list[int], lossy: bool = True
) -> None:
    model, _ = tiny.pair(name)
    tokens = sum(chunks)
    ids = tiny.tokens(tokens)
    with recorded(model, config, max(chunks)) as (cache, recorder):
        found = forwards(model, ids, cache, chunks)
        row = cache.sequences[0].id
    assert (recorder.left_out(row, 2, tokens) > 0) == lossy
    torch.testing.assert_close(found, replayed(monkeypatch, name, recorder, row, ids), atol=1e-4, rtol=0)


@pytest.mark.promise(2)
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_policy_and_chunk(monkeypatch: pytest.MonkeyPatch, mode: Any, policy: Any, chunk: int) -> None:
    """G01: a prompt longer than the budget, cut in several ways, then decoding."""
    check(monkeypatch, "llama", replace(SMALL, budget=BUDGET, mode=mode, policy=policy), CHUNKS[chunk])


@pytest.mark.promise(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_every_architecture(monkeypatch: pytest.MonkeyPatch, name: str, mode: Any) -> None:
    check(monkeypatch, name, replace(SMALL, budget=80, mode=mode), CHUNKS[44], lossy=True)


@pytest.mark.promise(2)
@pytest.mark.parametrize("digest", DIGESTS)
def test_every_digest(monkeypatch: pytest.MonkeyPatch, digest: Any) -> None:
    check(monkeypatch, "llama", replace(SMALL, budget=80, digest=digest), CHUNKS[44])


@pytest.mark.promise(2)
@pytest.mark.parametrize(("page_size", "tile"), [(8, 64), (8, 1), (16, 16), (32, 64), (32, 1)])
@pytest.mark.parametrize("mode", MODES)
def test_every_page_size_and_tile(monkeypatch: pytest.MonkeyPatch, mode: Any, page_size: int, tile: int) -> None:
    config = replace(SMALL, budget=128, mode=mode, page_size=page_size, tile=tile)
    check(monkeypatch, "llama", config, CHUNKS[128])


@pytest.mark.promise(2)
@pytest.mark.parametrize("mode", MODES)
def test_generate_follows_the_replayed_model(monkeypatch: pytest.MonkeyPatch, mode: Any) -> None:
    model, _ = tiny.pair("llama")
    with recorded(model, replace(SMALL, budget=64, mode=mode), 150) as (cache, recorder):
        text = model.generate(tiny.tokens(150), cache=cache, max_new_tokens=60, do_sample=False)
        row = cache.sequences[0].id
    logits = replayed(monkeypatch, "llama", recorder, row, text[:, :-1])
    assert logits[0, 149:].argmax(dim=-1).tolist() == text[0, 150:].tolist()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("prompt", [1, 2, 3])
def test_tiny_prompts_keep_at_least_one_page(mode: Any, prompt: int) -> None:
    """G02: the least budgets that can be set; nothing is ever left empty."""
    model, _ = tiny.pair("llama")
    for sinks, recent in ((0, 0), (1, 0), (0, 1), (1, 1)):
        least = 8 * (sinks + recent + 1)
        config = PagerConfig(
            budget=least, page_size=8, tile=8, sink_pages=sinks, recent_pages=recent, group_pages=2, mode=mode
        )
        with recorded(model, config, prompt) as (cache, recorder):
            out = model.generate(
                tiny.tokens(prompt),
                cache=cache,
                max_new_tokens=40,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
            assert out.sequences.shape[1] == prompt + 40
            assert all(torch.isfinite(logits).all() for logits in out.logits)
            for events in recorder.events.values():
                assert all(event.selected.any(axis=1).all() for event in events)
                assert all(np.allclose(event.page_mass.sum(axis=1), 1, atol=1e-5) for event in events)


def test_keys_and_queries_keep_their_original_positions() -> None:
    """G03: one convention (original positions) for everything stored, after a long run and after going back."""
    model, own = tiny.pair("llama")
    rotated: list[torch.Tensor] = []

    def keep(module: Any, arguments: Any, values: dict[str, Any], _: Any) -> None:
        key = module.k_proj(values["hidden_states"]).unflatten(-1, (2, 16)).transpose(1, 2)
        cos, sin = values["position_embeddings"]
        turned = torch.cat([-key[..., 8:], key[..., :8]], dim=-1)
        rotated.append(key * cos[:, None] + turned * sin[:, None])

    with paged(model, replace(SMALL, budget=64), rows=2) as cache:
        text = model.generate(tiny.tokens(20), cache=cache, max_new_tokens=200, do_sample=False)
        cache.crop(-30)
        branch = cache.fork()
        ids = text[:, : branch.get_seq_length() + 7]
        model(ids[:, -7:], cache=branch)
        hook = own.model.layers[0].self_attn.register_forward_hook(keep, with_kwargs=True)
        own(ids)
        hook.remove()
        keys, _ = cache.pager.read(branch.sequences[0], 0)  # layer 0: its keys depend on tokens and positions alone
        branch.close()
    assert keys.shape[1] == ids.shape[1] == 196
    np.testing.assert_allclose(keys, rotated[0][0].numpy(), atol=1e-5)
