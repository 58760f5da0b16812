"""One forward through the model: from a batch of torch tensors to one pager sequence a row, and back."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from kvpager.core.pager import Pager
from kvpager.core.sequence import Sequence
from kvpager.errors import InputError, StepError
from kvpager.hf.handle import Forward

if TYPE_CHECKING:
    from kvpager.hf.cache import PagerCache

__all__ = ["BoolArray", "Row", "Step", "attend_batch", "columns_of", "columns_seen", "rows_of", "taken_back"]

BoolArray = npt.NDArray[np.bool_]
# Which of a forward's columns are a row's real tokens: None for all of them.
Where = slice | npt.NDArray[np.int64] | None
_TAKEN = (torch.bfloat16, torch.float32, torch.float16)  # as they lie; others become float32


class Row:
    """A row of the batch that has real tokens in this forward.

    index      which row; sequence its pager sequence
    where      the columns of this forward that hold its tokens, None for all
    count      how many they are
    """

    __slots__ = ("count", "index", "sequence", "where")

    def __init__(self, index: int, sequence: Sequence, where: Where, count: int) -> None:
        self.index, self.sequence, self.where, self.count = index, sequence, where, count


def columns_seen(
    mask: torch.Tensor | None, before: BoolArray | None, batch: int, past: int, new: int
) -> BoolArray | None:
    """Which columns are real after a forward of `new` columns: bool [batch, past + new], or None for all.

    `mask` is the forward's padding mask and `before` what is known of the `past` columns. Raises InputError
    when the mask has another shape, or there is none although there are padded columns.
    """
    if mask is None:
        if before is None:
            return None
        raise InputError("attention_mask: the cache holds padded rows, so every forward needs the mask of all columns")
    if mask.ndim != 2:
        raise InputError(
            f"attention_mask: it has {mask.ndim} dimensions; kvpager takes the padding mask, [batch, columns]"
        )
    if tuple(mask.shape) != (batch, past + new):
        raise InputError(
            f"attention_mask: its shape is {tuple(mask.shape)}, not {(batch, past + new)}: "
            f"{batch} rows, {past} columns in the cache and {new} new ones"
        )
    real: BoolArray = mask.detach().cpu().numpy().astype(bool)  # a copy: the mask belongs to the caller
    return real


def taken_back(now: BoolArray, before: BoolArray | None) -> list[int] | None:
    """How many of its last tokens each row loses when the mask of past columns changes; None for no change.

    A row that ended before others was given padding that counted as tokens; the next turn's mask hides it.
    `now` and `before` are bool [rows, columns], None for all real. Raises InputError for any other change.
    """
    old = np.ones_like(now) if before is None else before
    if np.array_equal(now, old):
        return None
    hidden = old & ~now
    columns = now.shape[1]
    last_kept = np.where(now.any(axis=1), columns - 1 - now[:, ::-1].argmax(axis=1), -1)
    first_hidden = np.where(hidden.any(axis=1), hidden.argmax(axis=1), columns)
    wrong = (now & ~old).any(axis=1) | (first_hidden < last_kept)
    if wrong.any():
        raise InputError(
            f"attention_mask: row {int(wrong.argmax())} differs from what it said of columns already in the cache; "
            "only a row's last tokens can be taken back"
        )
    counts: list[int] = hidden.sum(axis=1).tolist()
    return counts


def columns_of(real: BoolArray, tokens: int) -> int:
    """How many leading columns of a row hold its first `tokens` tokens, and no token more."""
    columns = np.flatnonzero(real)
    return int(columns[tokens]) if tokens < len(columns) else len(real) - 1


def rows_of(sequences: SequenceOf[Sequence], real: BoolArray | None, new: int) -> list[Row]:
    """The rows with real tokens among the last `new` columns."""
    if real is None:
        return [Row(index, sequence, None, new) for index, sequence in enumerate(sequences)]
    rows = []
    for index, sequence in enumerate(sequences):
        columns = np.flatnonzero(real[index, -new:])
        count = len(columns)
        if count == new:
            rows.append(Row(index, sequence, None, new))
        elif count and columns[-1] - columns[0] + 1 == count:  # one run, as with padding on one side
            rows.append(Row(index, sequence, slice(int(columns[0]), int(columns[-1]) + 1), count))
        elif count:
            rows.append(Row(index, sequence, columns, count))
    return rows


def _tokens_of(rows: list[Row], columns: int) -> torch.Tensor:
    """Where the rows' tokens are among all rows' columns, one row after the other."""
    every = np.arange(columns)
    parts = [row.index * columns + (every if row.where is None else every[row.where]) for row in rows]
    return torch.from_numpy(np.concatenate(parts)) if parts else torch.empty(0, dtype=torch.int64)


def _numbers(states: torch.Tensor) -> npt.NDArray[Any]:
    """States [1, heads, T, head_dim] as they lie, [heads, T, head_dim]: uint16 stands for bfloat16."""
    if states.requires_grad or not states.is_cpu:
        states = states.detach().cpu()
    states = states[0]
    if states.dtype is torch.bfloat16:
        states = states.view(torch.uint16)
    elif states.dtype not in _TAKEN:
        states = states.float()
    array: npt.NDArray[Any] = states.numpy()
    return array


def attend_batch(
    pager: Pager,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """One layer of the pager's open step with a model's own tensors: see :meth:`Pager.attend_step`.

    query [1, query heads, T, D], key and value [1, KV heads, T, D]: T counts the step's tokens, sequence after sequence
    in the order that `begin` was given; any strides, nothing is copied where channels lie side by side. Returns
    [1, T, query heads, D], contiguous, in the query's dtype and on its device.
    """
    _, heads, tokens, channels = query.shape
    here = query.dtype if query.dtype in _TAKEN else torch.float32
    output = torch.empty((1, tokens, heads, channels), dtype=here)
    pager.attend_step(
        layer,
        _numbers(query),
        _numbers(key),
        _numbers(value),
        scale=scale,
        softcap=softcap,
        output=_numbers(output.transpose(1, 2)),
    )
    return output if query.is_cpu and here is query.dtype else output.to(query)


class Step(Forward):
    """A PagerCache's forward that has begun."""

    __slots__ = ("_alone", "_batch", "_cache", "_columns", "_mark", "_real", "_rows", "_tokens")

    def __init__(self, cache: PagerCache, batch: int, columns: int) -> None:
        super().__init__(cache.pager)
        self._cache = cache
        self._batch, self._columns = batch, columns
        self._rows: list[Row] = []
        self._real: BoolArray | None = None
        self._alone = False
        self._tokens: torch.Tensor | None = None  # the real ones among batch x columns, or None for all
        self._mark: object | None = None  # the pager's step, while it is open

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Store the keys and values of the current layer and attend: [batch, columns, query heads, head_dim].

        query [B, Hq, T, D], key and value [B, H, T, D]; the output has the query's dtype and device, with
        zeros where a column is padding. The first layer opens the pager's step and the last one commits it;
        an error rolls it back.
        """
        try:
            if self.layer == 0:
                self._begin(mask)
            elif self._mark is not None and self._mark is not self.pager.step:
                raise StepError("the pager was used elsewhere in the middle of this forward, which is undone")
            elif mask is not None and mask.ndim != 2:
                raise InputError(f"attention_mask: layer {self.layer} got a mask of {mask.ndim} dimensions, not 2")
            output = self._alone_attend if self._alone else self._rows_attend
            result = output(query, key, value, scale, softcap)
            if self.layer == self.pager.shape.layers - 1:
                self._commit()
        except BaseException:
            self._cache.abandon()
            raise
        return result

    def _begin(self, mask: torch.Tensor | None) -> None:
        cache = self._cache
        past = cache.get_seq_length()
        self._real = columns_seen(mask, cache.real_columns, self._batch, past, self._columns)
        cache.check_promise(self._real, self._columns)
        if self._real is not None and past:
            cache.take_back(self._real[:, :past])
        self._rows = rows_of(cache.sequences, self._real, self._columns)
        padded = len(self._rows) < self._batch or any(row.where is not None for row in self._rows)
        self._alone = self._batch == 1 and not padded
        self._tokens = _tokens_of(self._rows, self._columns) if padded else None
        if self._rows:
            self.pager.begin([row.sequence for row in self._rows], [row.count for row in self._rows])
            self._mark = self.pager.step

    def _commit(self) -> None:
        if self._mark is not None:
            self.pager.commit()
            self._mark = None
        self._cache.advance(self._columns, self._real)

    def undo(self) -> None:
        """Roll back what this forward has stored, if anything and if nobody else has done so."""
        if self._mark is not None and self._mark is self.pager.step:
            self.pager.rollback()

    def _alone_attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, softcap: float | None
    ) -> torch.Tensor:
        """A batch of one without padding: nothing is gathered."""
        return attend_batch(self.pager, self.layer, query, key, value, scale=scale, softcap=softcap)

    def _rows_attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, softcap: float | None
    ) -> torch.Tensor:
        """Rows side by side, without their padding."""
        batch, heads, columns, channels = query.shape
        if not self._rows:
            return query.new_zeros((batch, columns, heads, channels))
        tokens = self._tokens

        def ragged(states: torch.Tensor) -> torch.Tensor:
            rows = states.transpose(0, 1).reshape(states.shape[1], -1, channels)
            return (rows if tokens is None else rows[:, tokens]).unsqueeze(0)

        result = attend_batch(
            self.pager, self.layer, ragged(query), ragged(key), ragged(value), scale=scale, softcap=softcap
        )
        if tokens is None:
            return result.view(batch, columns, heads, channels)
        output = query.new_zeros((batch * columns, heads, channels))
        output[tokens] = result[0]
        return output.view(batch, columns, heads, channels)
