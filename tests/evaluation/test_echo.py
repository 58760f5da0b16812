from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import kvpager.hf
from kvpager.config import PagerConfig
from kvpager.errors import ConfigError, InputError
from kvpager.evaluation.echo import EchoTask, echo_full, echo_run, frames_for
from kvpager.hf import PagerCache
from kvpager.models import LoadedModel, load

IDS = np.random.default_rng(1).integers(3, 259, 1000).tolist()
TASK = EchoTask.take(IDS, 64, 160, seed=0)


@pytest.mark.parametrize("seed", range(30))
def test_passage_and_other_text_never_overlap(seed: int) -> None:
    numbered = list(range(300))  # a token is its own position
    task = EchoTask.take(numbered, 64, 160, seed)
    first, other, second = task.token_ids[:64], task.token_ids[64:224], task.token_ids[224:]
    assert first == second
    assert first == tuple(range(task.passage_at, task.passage_at + 64))
    assert other == tuple(range(task.between_at, task.between_at + 160))
    assert not set(first) & set(other)
    assert EchoTask.take(numbered, 64, 160, seed) == task


def test_seeds_take_other_places_and_either_order() -> None:
    tasks = [EchoTask.take(IDS, 64, 160, seed) for seed in range(20)]
    assert len({(task.passage_at, task.between_at) for task in tasks}) == 20
    assert {task.passage_at < task.between_at for task in tasks} == {True, False}


def test_places_can_be_given() -> None:
    task = EchoTask.take(IDS, 10, 20, at=(500, 100))
    assert (task.passage_at, task.between_at) == (500, 100)
    assert task.token_ids[:10] == tuple(IDS[500:510])


@pytest.mark.parametrize(
    ("passage", "between", "at", "message"),
    [
        (1, 20, None, "1 and 20; each needs at least 2"),
        (600, 500, None, "it has 1000 tokens; passage and other text need 1100"),
        (10, 20, (100, 95), "100,95 makes 10 and 20 tokens overlap"),
        (10, 20, (995, 5), "995,5 makes 10 and 20 tokens overlap, or leave the text's 1000"),
    ],
)
def test_what_the_text_can_not_give_is_refused(
    passage: int, between: int, at: tuple[int, int] | None, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        EchoTask.take(IDS, passage, between, at=at)


@pytest.mark.promise(2)
def test_without_budget_a_run_is_the_full_cache(loaded: LoadedModel) -> None:
    full = echo_full(loaded.model, TASK, chunk=32)
    with PagerCache(loaded.model.config, PagerConfig(pool=30, group_pages=16)) as cache:
        run = echo_run(loaded.model, cache, TASK, full, chunk=64)
    assert run.second_loss == pytest.approx(full.second_loss, abs=1e-5)
    assert run.between_loss == pytest.approx(full.between_loss, abs=1e-5)
    assert run.kl_mean < 1e-6
    assert run.top1 == 1
    assert run.stats.recalls > 0
    assert run.recalls_a_token == run.stats.recalls / 288


def test_losses_are_those_of_one_forward_over_everything(loaded: LoadedModel) -> None:
    ids = torch.tensor([TASK.token_ids])
    loaded.model.set_attn_implementation("sdpa")
    with torch.no_grad():
        logits = loaded.model(input_ids=ids, use_cache=False).logits[0]
    loaded.model.set_attn_implementation("kvpager")
    loss = torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="none")
    full = echo_full(loaded.model, TASK, chunk=48)
    assert full.between_loss == pytest.approx(loss[64 : 64 + 159].mean().item(), abs=1e-5)
    assert full.second_loss == pytest.approx(loss[224:].mean().item(), abs=1e-5)
    assert full.kv_bytes == 288 * 2 * 2 * 2 * 16 * 4
    torch.testing.assert_close(full.logits, logits[64:], atol=1e-4, rtol=0)


@pytest.mark.promise(1)
def test_the_figures_do_not_depend_on_the_pool(loaded: LoadedModel) -> None:
    full = echo_full(loaded.model, TASK, chunk=32)
    runs = []
    for pool in (80, 24):
        with PagerCache(loaded.model.config, PagerConfig(pool=pool, budget=96, tile=16, group_pages=8)) as cache:
            runs.append(echo_run(loaded.model, cache, TASK, full, chunk=32, belady=True))
    large, small = runs
    assert (large.second_loss, large.between_loss, large.kl_mean) == (
        small.second_loss,
        small.between_loss,
        small.kl_mean,
    )
    assert large.stats.recalls == large.optimal_recalls == 0
    assert small.optimal_recalls is not None
    assert 0 < small.optimal_recalls <= small.stats.recalls


def test_discarding_fits_the_frames_it_is_given(loaded: LoadedModel) -> None:
    full = echo_full(loaded.model, TASK, chunk=64)
    with PagerCache(loaded.model.config) as cache:
        frames = frames_for(64, 32, 16, 64, cache.pager.shape)
    config = PagerConfig(mode="discard", budget=64, tile=32, pool=frames)
    with PagerCache(loaded.model.config, config) as cache:
        run = echo_run(loaded.model, cache, TASK, full, chunk=64)
    assert run.stats.discards > 0
    assert run.stats.recalls == run.stats.swap_bytes == run.stats.digest_bytes == 0
    assert run.kl_mean > 0


def test_a_chunk_that_splits_tiles_is_refused(loaded: LoadedModel) -> None:
    full = echo_full(loaded.model, TASK, chunk=64)
    with PagerCache(loaded.model.config) as cache, pytest.raises(ConfigError, match="chunk: 96 is not a multiple of"):
        echo_run(loaded.model, cache, TASK, full, chunk=96)


@pytest.mark.slow
def test_the_default_model_still_reads_the_passage_after_eviction(tmp_path: Path) -> None:
    kvpager.hf.register()
    real = load("smollm2-135m", dtype="float32")
    from kvpager.evaluation.text import bundled_text

    ids = real.tokenizer(bundled_text()[:12000], add_special_tokens=False)["input_ids"]
    task = EchoTask.take(ids, 128, 512, at=(0, 400))
    full = echo_full(real.model, task, chunk=256)
    with PagerCache(real.model.config, PagerConfig(budget=192, swap=tmp_path / "swap")) as cache:
        run = echo_run(real.model, cache, task, full, chunk=256)
    shape = cache.pager.shape
    lossy = PagerConfig(mode="discard", budget=192, pool=frames_for(192, 64, 16, 256, shape))
    with PagerCache(real.model.config, lossy) as cache:
        forgot = echo_run(real.model, cache, task, full, chunk=256)
    assert abs(run.second_loss - full.second_loss) < 0.1
    assert forgot.second_loss > full.second_loss + 0.5
