"""The mask-replay oracle: run a model densely with exactly the positions masked that paging left out.

What each tile attended to is recorded from the pager; a dense attention, written here in the plainest way,
applies the same visibility for every layer and KV head. If the mechanism is right, logits must match: what
a budget loses is then lost by design, and nothing else is.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AttentionInterface

from hf import tiny
from kvpager.core.attention import TileEvent

NAME = "replay"


class Recorder:
    """An observer of tiles: which pages each layer and head saw, for queries from `start` to `stop`."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.events: dict[int, list[TileEvent]] = {}  # by sequence

    def __call__(self, event: TileEvent) -> None:
        self.events.setdefault(event.sequence.id, []).append(event)

    def visible(self, sequence: int, layer: int, tokens: int) -> torch.Tensor:
        """Bool [KV heads, queries, keys] over all tokens of a sequence, causal."""
        events = [event for event in self.events[sequence] if event.layer == layer]
        heads = events[0].selected.shape[0]
        seen = torch.zeros((heads, tokens, tokens), dtype=torch.bool)
        for event in events:
            keys = torch.from_numpy(event.selected).repeat_interleave(self.page_size, dim=1)[:, : event.stop]
            seen[:, event.start : event.stop, :] = False
            seen[:, event.start : event.stop, : keys.shape[1]] = keys[:, None]
        return seen & torch.ones((tokens, tokens), dtype=torch.bool).tril()

    def left_out(self, sequence: int, layers: int, tokens: int) -> int:
        """How many (layer, head, query, key) were invisible although causal."""
        causal = tokens * (tokens + 1) // 2
        seen = [self.visible(sequence, layer, tokens) for layer in range(layers)]
        return sum(one.shape[0] * causal - int(one.sum()) for one in seen)


def dense(recorder: Recorder, sequence: int) -> Any:
    """An attention function that masks what the recorded sequence did not see."""

    def attend(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        scaling: float,
        softcap: float | None = None,
        sliding_window: int | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        assert attention_mask is None
        tokens, group = query.shape[2], query.shape[1] // key.shape[1]
        seen = recorder.visible(sequence, module.layer_idx, tokens)
        if sliding_window is not None:
            position = torch.arange(tokens)
            seen = seen & (position[None, :] > position[:, None] - sliding_window)
        key, value, seen = (one.repeat_interleave(group, dim=-3) for one in (key, value, seen))
        scores = query @ key.transpose(2, 3) * scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        return (weights @ value).transpose(1, 2).contiguous(), None

    return attend


def replayed(monkeypatch: pytest.MonkeyPatch, name: str, recorder: Recorder, row: int, ids: torch.Tensor) -> Any:
    """Logits [1, tokens, vocabulary] of the model `name` over `ids`, with the masks of the recorded sequence `row`."""
    monkeypatch.setitem(AttentionInterface._global_mapping, NAME, dense(recorder, row))
    return tiny.build(tiny.CONFIGS[name](), NAME)(ids, use_cache=False).logits
