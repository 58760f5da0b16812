"""One forward of a ragged batch: each sequence brings as many new tokens as it likes, all in one row."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from kvpager.core.pager import Pager
from kvpager.core.sequence import Sequence
from kvpager.errors import CacheMismatch, StepError, UnsupportedModel
from kvpager.hf.attention import HANDLE, NAME
from kvpager.hf.eager import eager
from kvpager.hf.handle import Forward, PagedCache
from kvpager.hf.shape import architecture
from kvpager.hf.step import attend_batch

__all__ = ["RaggedRunner", "batch_length"]


def batch_length(model_config: PreTrainedConfig) -> int | None:
    """The most tokens of a sequence in a batch of others; None where the batch sets no bound.

    With longrope (Phi-3's long contexts) all positions of a forward are rotated by the long factors as soon as one of
    them is beyond the original context: a long sequence would change what others' keys are.
    """
    text = model_config.get_text_config(decoder=True)
    settings = getattr(text, "rope_parameters", None) or {}
    layers = settings.values() if settings and all(isinstance(one, dict) for one in settings.values()) else [settings]
    limits = [one["original_max_position_embeddings"] for one in layers if one.get("rope_type") == "longrope"]
    return min(limits, default=None)


class RaggedRunner:
    """Runs a model's forwards over sequences of a pager, side by side without padding.

    Raises CacheMismatch for a model that was not loaded with ``attn_implementation="kvpager"``.
    """

    def __init__(self, model: PreTrainedModel, pager: Pager) -> None:
        name = architecture(model.config)
        implementation = model.config.get_text_config(decoder=True)._attn_implementation
        if implementation != NAME:
            raise CacheMismatch(
                f"{name} was loaded with attn_implementation={implementation!r}: load it with "
                "attn_implementation='kvpager' after kvpager.hf.register()"
            )
        self._model: Any = model
        self._pager = pager
        self._cache = _RaggedCache(pager, name)

    def forward(
        self,
        sequences: SequenceOf[Sequence],
        token_ids: SequenceOf[SequenceOf[int]],
        keep: SequenceOf[int],
    ) -> torch.Tensor:
        """One step of the pager: each sequence gets its new tokens; logits [len(keep), vocabulary] come back.

        `keep` are places among all new tokens, sequence after sequence in this order. When anything raises, the step
        is rolled back: PageLost, PoolExhausted and SwapError as the pager raises them, or what the model raises.
        """
        counts = [len(ids) for ids in token_ids]
        positions = np.concatenate([np.arange(s.length, s.length + n) for s, n in zip(sequences, counts, strict=True)])
        flat = np.fromiter((token for ids in token_ids for token in ids), np.int64, len(positions))
        pager = self._pager
        pager.begin(sequences, counts, token_ids)
        mark = pager.step
        self._cache.start(mark)
        try:
            with torch.inference_mode():
                output = self._model(
                    input_ids=torch.from_numpy(flat)[None].to(self._model.device),
                    position_ids=torch.from_numpy(positions)[None].to(self._model.device),
                    cache=self._cache,
                    use_cache=True,
                    logits_to_keep=torch.tensor(keep, dtype=torch.long, device=self._model.device),
                )
            self._cache.require_whole()
            pager.commit()
        except BaseException:
            if pager.step is mark:
                pager.rollback()
            raise
        logits: torch.Tensor = output.logits[0]
        return logits


class _RaggedForward(Forward):
    """A forward of one row in which the sequences of the pager's open step stand one after the other."""

    __slots__ = ("_mark",)

    def __init__(self, pager: Pager, mark: object) -> None:
        super().__init__(pager)
        self.layer = -1
        self._mark = mark

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Store one layer's keys and values of all sequences and attend: [1, tokens, query heads, head_dim]."""
        if self.pager.step is not self._mark:
            raise StepError("the pager was used elsewhere in the middle of this forward, which is undone")
        return attend_batch(self.pager, self.layer, query, key, value, scale=scale, softcap=softcap)


class _RaggedCache(PagedCache):
    """What transformers takes for a cache: hands each layer's keys and values on to the attention function."""

    def __init__(self, pager: Pager, name: str) -> None:
        super().__init__(pager)
        self._name = name
        self._forward = _RaggedForward(pager, None)

    def start(self, mark: object) -> None:
        """Begin a forward in the pager's open step `mark`."""
        self._forward = _RaggedForward(self.pager, mark)

    def require_whole(self) -> None:
        """Raise CacheMismatch unless every layer's keys and values have been attended to."""
        if self._forward.pending or self._forward.layer != self.pager.shape.layers - 1:
            raise CacheMismatch(f"{self._name}: layer {self._forward.layer} was not attended to by kvpager's attention")

    @eager
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Announce one layer's new keys and values, [1, H, T, D]: the attention function stores them.

        Returns them unchanged. Raises UnsupportedModel when the model hands nothing on to its attention, CacheMismatch
        when its attention is not kvpager's, StepError for layers out of order.
        """
        handed_on = kwargs.get("kwargs")
        if handed_on is None:
            raise UnsupportedModel(f"{self._name}: its attention doesn't hand its arguments to the cache")
        forward = self._forward
        if forward.pending:
            self.require_whole()
        if layer_idx != forward.layer + 1:
            raise StepError(f"layer {layer_idx} of {self._name} came after layer {forward.layer}")
        forward.layer, forward.pending = layer_idx, True
        handed_on[HANDLE] = forward
        return key_states, value_states

    # What transformers asks about the cache: positions come with each forward, so it need know of no past.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: the positions of new tokens are given."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """The new tokens alone: no mask is made."""
        return query_length, 0
