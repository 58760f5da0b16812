"""PagerCache: a transformers cache whose keys and values live in a pager."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from transformers import PreTrainedConfig

from kvpager.config import PagerConfig
from kvpager.core.pager import Pager
from kvpager.core.sequence import Sequence
from kvpager.errors import (
    CacheMismatch,
    ConfigError,
    InputError,
    SequenceError,
    StepError,
    UnsupportedModel,
)
from kvpager.hf.attention import HANDLE, NAME
from kvpager.hf.eager import eager
from kvpager.hf.handle import PagedCache
from kvpager.hf.shape import architecture, kv_shape
from kvpager.hf.step import BoolArray, Step, columns_of, taken_back
from kvpager.stats import PagerStats

__all__ = ["PagerCache"]


class PagerCache(PagedCache):
    """The cache to hand to ``model.generate(..., cache=cache)`` or to a forward of a model loaded with
    ``attn_implementation="kvpager"``.

    model_config  the model's configuration (``model.config``), which gives the shape of its keys and values
    pager_config  how the pager works; None for the defaults (exact, 256 MiB of frames)
    dtype         how pages are held; None takes the model's own
    pager         a pager to share between caches of one model, whose forwards take turns; the cache then doesn't
                  shut it down

    Each row of the batch is one sequence of the pager, in order (`sequences`). The pager holds a row's real tokens
    alone; transformers counts padded columns, and `get_seq_length` and `get_mask_sizes` report those, also in layers
    with a sliding window. A forward is one step: what it stored counts once its last layer has attended.

    A cache belongs to one thread, as its pager does. Where ``generate()`` runs in a thread of its own (with a
    TextIteratorStreamer, say), that thread first calls ``cache.pager.adopt()``, and so does the next one to use it.

    Raises UnsupportedModel for an architecture that can't be paged, and ConfigError for a pager of another shape.
    """

    def __init__(
        self,
        model_config: PreTrainedConfig,
        pager_config: PagerConfig | None = None,
        *,
        dtype: str | None = None,
        pager: Pager | None = None,
    ) -> None:
        shape = kv_shape(model_config, dtype)
        if pager is not None:
            if pager_config is not None:
                raise ConfigError("pager_config: give either a pager or how to make one, not both")
            wanted = shape if dtype is not None else replace(shape, dtype=pager.shape.dtype)
            if replace(pager.shape, scale=None) != wanted:
                raise ConfigError(f"pager: its shape is {pager.shape}, and the model's is {wanted}")
        super().__init__(Pager(shape, pager_config or PagerConfig()) if pager is None else pager)
        self.sequences: list[Sequence] = []
        self._owns_pager = pager is None
        self._config = model_config.get_text_config(decoder=True)
        self._name = architecture(model_config)
        self._columns = 0
        self._real: BoolArray | None = None  # which columns hold tokens, [rows, columns]; None: all
        self._promised: BoolArray | None = None  # as `_real`, for the columns of the prompts that reuse() was given
        self._step: Step | None = None

    # One forward: update() by each layer, then the attention function, which calls advance() or abandon().

    @eager
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Announce one layer's new keys and values, [B, H, T, D]: the attention function stores them.

        Returns them unchanged, and leaves the step in ``kwargs["kwargs"]``, which the model hands on.
        Raises CacheMismatch when the model's attention is not kvpager's, UnsupportedModel when the model
        hands nothing on.
        """
        handed_on = kwargs.get("kwargs")
        if handed_on is None:
            raise UnsupportedModel(f"{self._name}: its attention doesn't hand its arguments to the cache")
        step = self._step
        if step is not None and step.pending:
            self.abandon()
            raise CacheMismatch(self._mismatch("an attention that is not kvpager's"))
        if layer_idx == 0:
            step = self._start(key_states, value_states)
        elif step is None or step.layer != layer_idx - 1:
            self.abandon()
            raise StepError(f"layer {layer_idx} of {self._name} came without the layers before it")
        step.layer, step.pending = layer_idx, True
        handed_on[HANDLE] = step
        return key_states, value_states

    def _mismatch(self, found: str) -> str:
        return (
            f"a PagerCache was given to {self._name} with {found}: load the model with "
            "attn_implementation='kvpager' after kvpager.hf.register(), or use another cache"
        )

    def _start(self, keys: torch.Tensor, values: torch.Tensor) -> Step:
        """Check what a forward's first layer brings, and begin it."""
        self.abandon()
        implementation = self._config._attn_implementation
        if implementation not in (NAME, None):  # None: a copy of the configuration, that no model has bound
            raise CacheMismatch(self._mismatch(f"attn_implementation={implementation!r}"))
        shape, batch = self.pager.shape, keys.shape[0]
        for what, states in (("keys", keys), ("values", values)):
            if states.shape[1] != shape.kv_heads or states.shape[3] != shape.head_dim:
                raise CacheMismatch(
                    f"a PagerCache for {shape.kv_heads} KV heads of {shape.head_dim} channels got {what} of "
                    f"{states.shape[1]} heads of {states.shape[3]}: make it from this model's configuration"
                )
        if len(self.sequences) != batch:
            if self._columns:
                raise InputError(f"the batch has {batch} rows and the cache {len(self.sequences)}")
            self.reset()
            self.sequences = [self.pager.open() for _ in range(batch)]
        if any(sequence.closed for sequence in self.sequences):
            raise SequenceError(
                "a forward failed after pages had been dropped for good (mode 'discard'), and could not be undone: "
                "reset() the cache and give it the whole prompt again"
            )
        self._step = Step(self, batch, keys.shape[2])
        return self._step

    def advance(self, columns: int, real: BoolArray | None) -> None:
        """A forward of `columns` columns is complete; `real` says which columns hold tokens, of all so far."""
        self._columns += columns
        self._real = real
        self._step = None

    def check_promise(self, real: BoolArray | None, columns: int) -> None:
        """Raise InputError when `columns` new columns don't hold the tokens that reuse() named blocks by."""
        if self._promised is not None:
            new = slice(self._columns, self._columns + columns)
            promised = self._promised[:, new]
            found = np.ones_like(promised) if real is None else real[:, new][:, : promised.shape[1]]
            if not np.array_equal(found, promised):
                raise InputError("attention_mask: it differs from the one that reuse() was given for these columns")

    def take_back(self, real: BoolArray) -> None:
        """Drop the last tokens of rows whose mask now calls them padding; `real` is that of all past columns."""
        counts = taken_back(real, self._real)
        if counts is None:
            return
        self._remove(counts)
        self._real = real.copy()

    def abandon(self) -> None:
        """Roll back a forward that did not complete; does nothing without one."""
        step, self._step = self._step, None
        if step is not None:
            step.undo()

    # What transformers asks about the cache

    @property
    def real_columns(self) -> BoolArray | None:
        """Which columns hold tokens, bool [rows, columns]; None when all do."""
        return self._real

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns so far, padding included; the same for every layer."""
        return self._columns

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Columns that a mask spans, and where it begins: all of them from 0, also with a sliding window."""
        return self._columns + query_length, 0

    def __repr__(self) -> str:
        return f"PagerCache({len(self.sequences)} rows, {self._columns} columns, {self.pager.shape})"

    @property
    def batch_size(self) -> int:
        """Rows, or -1 before the first forward."""
        return len(self.sequences) or -1

    @property
    def is_croppable(self) -> bool:
        """True: `crop` leaves no trace."""
        return True

    # Changes between forwards

    def reset(self) -> None:
        """Close every sequence: the cache is empty again, for a batch of any size."""
        self.abandon()
        sequences, self.sequences = self.sequences, []
        self._columns, self._real, self._promised = 0, None, None
        for sequence in sequences:
            if not sequence.closed:  # the pager closes one itself when it can't be put back (mode "discard")
                self.pager.close(sequence)

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last columns: ``crop(-n)`` removes n of them, ``crop(n)`` keeps the first n, ``crop(0)`` none.

        Padded columns count, as everywhere in transformers. Removing more than there are empties the cache.
        """
        self.abandon()
        amount = int(tokens_to_remove)
        keep = self._columns if amount == 0 else amount if amount > 0 else max(0, self._columns + amount)
        if keep >= self._columns:
            return
        if self._real is None:
            self._remove([self._columns - keep] * len(self.sequences))
        else:
            self._remove(self._real[:, keep:].sum(axis=1).tolist())
            self._real = _all_real_as_none(self._real[:, :keep].copy())
        self._columns = keep
        self._promised = None if self._promised is None else self._promised[:, :keep]

    def _remove(self, counts: list[int]) -> None:
        """Take so many last tokens from each row: from all of them or, where one can't be cropped, from none."""
        lengths = [sequence.length - count for sequence, count in zip(self.sequences, counts, strict=True)]
        self.pager.crop_all(self.sequences, lengths)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes what row ``beam_idx[i]`` was: sequences used again are forked, those not used are closed."""
        self._select(_indices(beam_idx, len(self.sequences), "beam_idx"))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`, in that order."""
        self._select(_indices(indices, len(self.sequences), "indices"))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times, side by side."""
        if repeats < 1:
            raise InputError(f"repeats: {repeats} is not above zero")
        self._select([row for row in range(len(self.sequences)) for _ in range(repeats)])

    def _select(self, rows: list[int]) -> None:
        self.abandon()
        if not self.sequences:
            return
        chosen: list[Sequence] = []
        forks: list[Sequence] = []
        kept: set[int] = set()
        try:
            for row in rows:
                if row in kept:
                    forks.append(self.pager.fork(self.sequences[row]))
                    chosen.append(forks[-1])
                else:
                    kept.add(row)
                    chosen.append(self.sequences[row])
        except BaseException:
            for sequence in forks:
                self.pager.close(sequence)
            raise
        closed = [sequence for row, sequence in enumerate(self.sequences) if row not in kept]
        self.sequences = chosen
        if self._real is not None:
            self._real = _all_real_as_none(self._real[rows])
        if self._promised is not None:
            self._promised = self._promised[rows]
        for sequence in closed:
            self.pager.close(sequence)

    # Beyond transformers' own cache

    def fork(self) -> PagerCache:
        """A second cache with the same past, sharing this one's pager and its full blocks (``copy.deepcopy`` does it).

        Close it when it is no longer needed; it is of no use after the pager has been shut down.
        """
        self.abandon()
        other = PagerCache.__new__(PagerCache)
        other.__dict__.update(self.__dict__)
        other._owns_pager = False
        other.layers = []
        other.sequences = []
        try:
            for sequence in self.sequences:
                other.sequences.append(self.pager.fork(sequence))
        except BaseException:
            other.reset()
            raise
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> PagerCache:
        return self.fork()

    def reuse(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> list[int]:
        """Open each row with its prompt, sharing blocks that the pager already holds for the same tokens.

        input_ids [B, T] and its padding mask are those of the ``generate()`` that follows, which then computes
        only the rest; at least one token is left. Returns how many tokens of each row were found. Rows go on
        together, so a batch shares what its least lucky row allows. Blocks of these prompts can be found by
        later sequences (while they live, and after as far as the configuration's `prefix_tokens` goes).
        Raises StepError when the cache is not empty, InputError for ids that are not [B, T].
        """
        if self._columns:
            raise StepError(f"reuse: the cache already holds {self._columns} columns; reset() it first")
        if input_ids.ndim != 2 or not input_ids.shape[1]:
            raise InputError(f"input_ids: the shape is {tuple(input_ids.shape)}, not [batch, tokens]")
        ids = input_ids.cpu().numpy()
        real = np.ones(ids.shape, bool) if attention_mask is None else attention_mask.cpu().numpy().astype(bool)
        if real.shape != ids.shape:
            raise InputError(f"attention_mask: its shape is {real.shape}, and that of input_ids {ids.shape}")
        self.reset()
        try:
            for row, tokens in enumerate(ids):
                self.sequences.append(self.pager.open(tokens[real[row]].tolist() or None))
            shared = min(columns_of(real[row], sequence.length) for row, sequence in enumerate(self.sequences))
            found = [int(count) for count in real[:, :shared].sum(axis=1)]
            for sequence, count in zip(self.sequences, found, strict=True):
                if sequence.length > count:
                    self.pager.crop(sequence, count)
        except BaseException:
            self.reset()
            raise
        self._columns = shared
        self._real = _all_real_as_none(real[:, :shared].copy())
        self._promised = real.copy()  # a view of the caller's mask may change
        return found

    def stats(self) -> PagerStats:
        """The pager's counters and sizes."""
        return self.pager.stats()

    def close(self) -> None:
        """Close every sequence, and shut the pager down unless it was given. Idempotent."""
        self.reset()
        if self._owns_pager:
            self.pager.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _all_real_as_none(real: BoolArray) -> BoolArray | None:
    return None if real.all() else real


def _indices(indices: torch.Tensor | SequenceOf[int], rows: int, name: str) -> list[int]:
    """Row numbers, checked; a mask of rows is turned into numbers."""
    tensor = torch.as_tensor(indices)
    if tensor.dtype is torch.bool:
        tensor = tensor.nonzero().flatten()
    chosen = [int(row) for row in tensor.tolist()]
    for row in chosen:
        if rows and not 0 <= row < rows:
            raise InputError(f"{name}: {row} is not a row of the cache, 0..{rows - 1}")
    return chosen
