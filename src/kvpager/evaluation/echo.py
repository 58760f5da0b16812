"""The echo task: a passage, other text, and the same passage again.

A model with its whole past before it reads the passage for the second time with hardly any loss, since every word
has stood there before. What an eviction has thrown away shows as loss on the second reading; what it costs
otherwise shows in the text between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from kvpager.config import KVShape, PagerConfig
from kvpager.errors import InputError
from kvpager.evaluation.belady import AccessTrace, optimal_recalls
from kvpager.evaluation.figures import Divergence, token_losses
from kvpager.evaluation.forward import attention, chunk_bounds, forward, full_cache, full_cache_bytes
from kvpager.hf import PagerCache
from kvpager.stats import PagerStats

__all__ = ["EchoFull", "EchoRun", "EchoTask", "echo_full", "echo_run", "frames_for"]

Progress = Callable[[int], None]


@dataclass(frozen=True)
class EchoTask:
    """The tokens of one echo: `passage` tokens, `between` tokens of other text, and the passage again.

    passage_at, between_at   where in the text's tokens the two were taken
    """

    token_ids: tuple[int, ...]
    passage: int
    between: int
    passage_at: int
    between_at: int

    @classmethod
    def take(
        cls, text_ids: Sequence[int], passage: int, between: int, seed: int = 0, at: tuple[int, int] | None = None
    ) -> EchoTask:
        """Take both from the text at places that `seed` chooses, or at the two positions `at`; they never overlap.

        Raises InputError for lengths that the text can't give (each needs two tokens, to predict one) and for
        positions that overlap or reach beyond the text's end.
        """
        if passage < 2 or between < 2:
            raise InputError(f"passage, between: {passage} and {between}; each needs at least 2 tokens")
        spare = len(text_ids) - passage - between
        if spare < 0:
            raise InputError(
                f"text: it has {len(text_ids)} tokens; passage and other text need {passage + between} (two stretches "
                "that don't overlap)"
            )
        passage_at, between_at = at if at is not None else _places(passage, between, spare, seed)
        ends = (passage_at + passage, between_at + between)
        if max(ends) > len(text_ids) or not (ends[0] <= between_at or ends[1] <= passage_at):
            raise InputError(
                f"at: {passage_at},{between_at} makes {passage} and {between} tokens overlap, or leave the text's "
                f"{len(text_ids)} tokens"
            )
        first = tuple(text_ids[passage_at : passage_at + passage])
        other = tuple(text_ids[between_at : between_at + between])
        return cls(first + other + first, passage, between, passage_at, between_at)

    @property
    def between_predictions(self) -> slice:
        """Positions whose prediction is a token of the other text (its first token is left out)."""
        return slice(self.passage, self.passage + self.between - 1)

    @property
    def second_predictions(self) -> slice:
        """Positions whose prediction is a token of the second reading (its first token is left out)."""
        return slice(self.passage + self.between, 2 * self.passage + self.between - 1)


@dataclass(frozen=True)
class EchoFull:
    """What the full cache does. `logits` float32 [T - passage, vocabulary]: every position after the first passage."""

    second_loss: float
    between_loss: float
    kv_bytes: int
    logits: torch.Tensor

    def as_dict(self) -> dict[str, float | int]:
        """Its figures, for JSON."""
        return {"second_loss": self.second_loss, "between_loss": self.between_loss, "kv_bytes": self.kv_bytes}


@dataclass(frozen=True)
class EchoRun:
    """What a paged run does, beside the full cache.

    second_loss, between_loss  nats a token, as for the full cache
    kl_mean, kl_p99, top1      KL(full || run) in nats, and the share of positions with the same likeliest token, over
                               every position after the first passage (both the other text and the second reading)
    recalls_a_token ...        pages over all tokens of the run
    optimal_recalls            the fewest recalls that any policy could have had (Belady), or None if not asked for
    stats                      all counters and sizes of the pager
    """

    second_loss: float
    between_loss: float
    kl_mean: float
    kl_p99: float
    top1: float
    recalls_a_token: float
    evictions_a_token: float
    optimal_recalls: int | None
    config: PagerConfig
    stats: PagerStats

    def as_dict(self) -> dict[str, Any]:
        """All figures and the settings that made them, flat, for JSON."""
        own = {name: value for name, value in vars(self).items() if name not in ("stats", "config")}
        settings = {name: str(value) if name == "swap" else value for name, value in asdict(self.config).items()}
        return {**own, **self.stats.as_dict(), "settings": settings}


def _places(passage: int, between: int, spare: int, seed: int) -> tuple[int, int]:
    """Where the passage and the other text begin: either may come first, `spare` tokens are left out around them."""
    rng = np.random.default_rng(seed)
    early, late = sorted(rng.integers(0, spare + 1, size=2).tolist())
    if rng.integers(2):
        return early, late + passage
    return late + between, early


def frames_for(budget: int, tile: int, page_size: int, chunk: int, shape: KVShape) -> int:
    """Frames that hold a budget, a tile, the open block, and one layer's chunk on top: the least for mode discard."""
    in_tile = -(-tile // page_size)
    incoming = max(-(-chunk // page_size), in_tile + 1)
    return ((budget // page_size + in_tile + 1) * shape.layers + incoming) * shape.kv_heads


def echo_full(
    model: PreTrainedModel, task: EchoTask, *, chunk: int, progress: Progress = lambda done: None
) -> EchoFull:
    """Run the task with transformers' own attention (sdpa) and cache. `progress` gets the tokens done."""
    cache = full_cache(model)
    kept: list[torch.Tensor] = []
    losses: list[npt.NDArray[np.float32]] = []
    with torch.inference_mode(), attention(model, "sdpa"):
        for start, stop in chunk_bounds(len(task.token_ids), chunk, 1):
            logits = forward(model, cache, task.token_ids[start:stop]).float()
            losses.append(_losses(task, start, logits))
            kept.append(logits[max(0, task.passage - start) :].clone())
            progress(stop)
    loss = np.concatenate(losses)
    return EchoFull(
        second_loss=_mean(loss, task.second_predictions),
        between_loss=_mean(loss, task.between_predictions),
        kv_bytes=full_cache_bytes(cache),
        logits=torch.cat(kept),
    )


def echo_run(
    model: PreTrainedModel,
    cache: PagerCache,
    task: EchoTask,
    full: EchoFull,
    *,
    chunk: int,
    belady: bool = False,
    progress: Progress = lambda done: None,
) -> EchoRun:
    """Run the task through an empty PagerCache, in forwards of `chunk` tokens (a multiple of its tile).

    `belady` adds the fewest possible recalls. Recalls depend on `chunk`: all tiles of a forward run in one layer
    before the next layer. The caller closes the cache.
    """
    pager = cache.pager
    bounds = chunk_bounds(len(task.token_ids), chunk, pager.config.tile)
    trace = AccessTrace(pager)
    if belady:
        pager.observers.append(trace)
    apart, losses = Divergence(), []
    with torch.inference_mode(), attention(model, "kvpager"):
        for start, stop in bounds:
            logits = forward(model, cache, task.token_ids[start:stop]).float()
            losses.append(_losses(task, start, logits))
            first = max(start, task.passage)
            if stop > first:
                apart.add(full.logits[first - task.passage : stop - task.passage], logits[first - start :])
            progress(stop)
    loss, stats, tokens = np.concatenate(losses), cache.stats(), len(task.token_ids)
    return EchoRun(
        second_loss=_mean(loss, task.second_predictions),
        between_loss=_mean(loss, task.between_predictions),
        kl_mean=apart.kl_mean,
        kl_p99=apart.kl_p99,
        top1=apart.top1,
        recalls_a_token=stats.recalls / tokens,
        evictions_a_token=stats.evictions / tokens,
        optimal_recalls=optimal_recalls(trace.groups, stats.frames) if belady else None,
        config=pager.config,
        stats=stats,
    )


def _losses(task: EchoTask, start: int, logits: torch.Tensor) -> npt.NDArray[np.float32]:
    targets = task.token_ids[start + 1 : start + 1 + len(logits)]  # the last position of all predicts nothing
    return token_losses(logits[: len(targets)], torch.tensor(targets, dtype=torch.int64))


def _mean(loss: npt.NDArray[np.float32], where: slice) -> float:
    return float(loss[where].mean(dtype=np.float64))
