"""From logits to tokens, for a batch of answers that each have settings of their own.

What a row gives depends on its logits, its settings, its seed and its place in the answer, never on the other rows:
each is worked on by itself, and its random number comes from a counter, not from a state that others advance.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvpager.engine.params import SamplingParams
from kvpager.errors import SampleError

if TYPE_CHECKING:
    import torch

__all__ = ["Guide", "SampleState", "Sampled", "Sampler", "token_logprobs"]

Row = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
NONE: Ids = np.empty(0, np.int64)
CHUNK = 256  # probabilities summed together; a draw looks for its chunk, then inside it
NEAR = (7.0, 10.0, 14.0)  # below the largest logit: where the likeliest tokens are looked for, one after the other
FEW = 4096  # tokens that are sorted without a look for a way around it
BINS_A_UNIT = 16  # of logits


class Guide(Protocol):
    """What rules tokens out by a grammar; see engine.guided."""

    @property
    def finished(self) -> bool:
        """Whether the text is complete and can't go on."""

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Which tokens may come next, [vocabulary of the tokenizer]."""

    def accept(self, token: int) -> None:
        """Go on after `token`; raises SampleError where it isn't allowed."""

    def copy(self) -> Guide:
        """Another one at the same place."""


class Sampled(NamedTuple):
    """A token, its log-probability by the model (None unless asked for), and the likeliest ones with theirs."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class SampleState:
    """What the choice of an answer's next token depends on besides the logits. One for each answer that runs.

    The owner calls `accept` with each token that the answer takes, once; a preempted answer keeps its state.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        seed: int,
        choice: int = 0,
        prompt: Iterable[int] = (),
        guide: Guide | None = None,
    ) -> None:
        """`seed` is used where `params` has none; `choice` numbers the answers to one prompt."""
        self.params = params
        self.guide = guide
        self.position = 0  # tokens of the answer so far
        own = (params.seed if params.seed is not None else seed) % 2**64
        self._key = own.to_bytes(8, "little") + choice.to_bytes(8, "little")
        self._output: dict[int, int] = {}  # how often each token is in the answer
        self._prompt = set(prompt) if params.repetition_penalty != 1.0 else set()
        bias = params.logit_bias or {}
        self._bias_ids = np.fromiter(bias.keys(), np.int64, len(bias))
        self._bias = np.fromiter(bias.values(), np.float32, len(bias))
        self._counted = _Growing()  # tokens of the answer
        self._repeated = _Growing(self._prompt)  # tokens of prompt and answer

    @property
    def finished(self) -> bool:
        """Whether the answer's grammar is complete and can't go on: the answer stops here."""
        return self.guide is not None and self.guide.finished

    def accept(self, token: int) -> None:
        """The answer takes `token`."""
        if self.guide is not None:
            self.guide.accept(token)
        self.position += 1
        params = self.params
        if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0:
            before = self._output.get(token, 0)
            self._output[token] = before + 1
            if not before:
                self._counted.add(token)
                if token not in self._prompt:
                    self._repeated.add(token)

    def uniform(self) -> float:
        """The random number in [0, 1) for the token at this position: of seed, choice and position alone."""
        number = hashlib.blake2b(self._key + self.position.to_bytes(8, "little"), digest_size=8).digest()
        return (int.from_bytes(number, "little") >> 11) * 2.0**-53

    def plain(self) -> bool:
        """Whether the logits are taken as they are (for this token)."""
        params = self.params
        return (
            self.guide is None
            and params.logit_bias is None
            and params.repetition_penalty == 1.0
            and not params.presence_penalty
            and not params.frequency_penalty
            and self.position >= params.min_tokens
        )

    def adjust(self, row: Row, end_ids: Ids) -> None:
        """Rule out and shift logits in place: guide, bias, penalties, min_tokens. `row` is [vocabulary], its own."""
        params = self.params
        if self.guide is not None:
            allowed = self.guide.allowed()[: len(row)]
            row[: len(allowed)][~allowed] = -np.inf
            row[len(allowed) :] = -np.inf
        row[self._bias_ids] += self._bias
        if params.repetition_penalty != 1.0:
            ids = self._repeated.ids
            old = row[ids]
            row[ids] = np.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
        if params.presence_penalty or params.frequency_penalty:
            ids = self._counted.ids
            counts = np.fromiter(self._output.values(), np.float32, len(ids))
            row[ids] -= params.frequency_penalty * counts + params.presence_penalty
        if self.position < params.min_tokens:
            ends = np.union1d(end_ids, np.array(params.stop_token_ids, np.int64))
            before = row[ends]
            row[ends] = -np.inf
            if self.guide is not None and row.max() == -np.inf:
                row[ends] = before  # the grammar is complete: it can only end


class _Growing:
    """Token ids that are added one at a time, as an array."""

    def __init__(self, first: Iterable[int] = ()) -> None:
        self._array = np.array(sorted(first), np.int64)
        self._size = len(self._array)

    @property
    def ids(self) -> Ids:
        return self._array[: self._size]

    def add(self, token: int) -> None:
        if self._size == len(self._array):
            self._array = np.concatenate([self._array, np.zeros(max(16, self._size), np.int64)])
        self._array[self._size] = token
        self._size += 1


class Sampler:
    """Chooses tokens for a model of `vocabulary` tokens, of which `end_ids` end an answer."""

    def __init__(self, vocabulary: int, end_ids: frozenset[int]) -> None:
        self.vocabulary = vocabulary
        self._end_ids = np.array(sorted(token for token in end_ids if token < vocabulary), np.int64)

    def sample(self, logits: torch.Tensor, states: Sequence[SampleState]) -> list[Sampled | SampleError]:
        """The next token of each answer; logits are [n, vocabulary] in any float dtype, one row for each of `states`.

        A row that gives no token has a SampleError in its place, and the others are not touched by it. Changes
        neither the logits nor the states: the owner accepts the tokens that it keeps.
        """
        assert logits.shape == (len(states), self.vocabulary), f"logits {tuple(logits.shape)} for {len(states)} rows"
        rows: Row = logits.detach().float().cpu().numpy()
        best = rows.argmax(axis=1)
        with np.errstate(over="ignore"):  # differences of the largest floats
            return [self._one(row, int(top), state) for row, top, state in zip(rows, best, states, strict=True)]

    def _one(self, row: Row, best: int, state: SampleState) -> Sampled | SampleError:
        # argmax takes the first NaN for the largest, so that one look at it tells
        if not np.isfinite(row[best]):
            return SampleError(f"logits: {_what(row)}; no token can be chosen")
        params = state.params
        known = _Distribution(row, best) if params.logprobs is not None else None
        if not state.plain():
            row = row.copy()
            try:
                state.adjust(row, self._end_ids)
            except SampleError as error:  # the guide's
                return error
            best = int(row.argmax())
            if not np.isfinite(row[best]):
                return SampleError(f"logits: {_what(row)} after guide, bias, penalties and min_tokens")
        token = best if params.greedy else draw(row, float(row[best]), params, state.uniform())
        if known is None:
            return Sampled(token)
        return known.sampled(token, params.logprobs or 0)


def _what(row: Row) -> str:
    bad = np.flatnonzero(np.isnan(row) | (row == np.inf))
    if len(bad):
        return f"{len(bad)} of {len(row)} are NaN or infinite, the first that of token {bad[0]}"
    return f"all {len(row)} tokens are ruled out"


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], top: int) -> list[Sampled | SampleError]:
    """Log-probabilities of tokens that are known already, as of a prompt: logits [T, vocabulary], those before each.

    `top` likeliest tokens are told beside. A row with NaN or infinity has a SampleError in its place.
    """
    rows: Row = logits.detach().float().cpu().numpy()
    with np.errstate(over="ignore"):
        return [_told(row, token, top) for row, token in zip(rows, token_ids, strict=True)]


def _told(row: Row, token: int, top: int) -> Sampled | SampleError:
    best = int(row.argmax())
    if np.isfinite(row[best]):
        return _Distribution(row, best).sampled(token, top)
    return SampleError(f"logits: {_what(row)}; they give no probabilities")


class _Distribution:
    """The model's own distribution, of a row that is not changed."""

    def __init__(self, row: Row, best: int) -> None:
        self._row = row
        self._best = float(row[best])
        self._log_total = self._best + float(np.log(_sums(np.exp(row - row[best])).sum()))

    def sampled(self, token: int, top: int) -> Sampled:
        likeliest = leading(self._row, self._best, top) if top else NONE
        return Sampled(token, self._logprob(token), tuple((int(other), self._logprob(other)) for other in likeliest))

    def _logprob(self, token: int) -> float:
        return float(self._row[token]) - self._log_total


def leading(row: Row, best: float, count: int) -> Ids:
    """The `count` likeliest tokens (all, where there are fewer), the likeliest first, of equals the lowest id."""
    for near in NEAR:
        ids = np.flatnonzero(row >= np.float32(best - near))
        if len(ids) >= count:
            break
    if not count <= len(ids) <= FEW:
        bins = _bins(row - np.float32(best))
        last = int(np.searchsorted(np.cumsum(np.bincount(bins)), count, side="left"))
        ids = np.flatnonzero(bins <= last)
    return _sorted(ids, row)[:count]


def _sorted(ids: Ids, row: Row) -> Ids:
    """Ascending ids by their logits, the largest first; of equals the lowest id."""
    return ids[np.argsort(-row[ids], kind="stable")]


def _bins(below: Row) -> npt.NDArray[np.int64]:
    """Numbers from 0 downward put into 1,024 bins, the largest in bin 0."""
    bins: npt.NDArray[np.int64] = np.minimum(below * np.float32(-BINS_A_UNIT), np.float32(1023)).astype(np.int64)
    return bins


def _sums(weights: Row) -> npt.NDArray[np.float64]:
    """Sums of each CHUNK weights, float64."""
    sums: npt.NDArray[np.float64] = np.add.reduceat(weights, np.arange(0, len(weights), CHUNK)).astype(np.float64)
    return sums


def draw(row: Row, best: float, params: SamplingParams, uniform: float) -> int:
    """Draw by inverting the cumulated probabilities, in order of ids, at `uniform` (0 to 1).

    `best` is the row's largest logit. Exact: top-k, top-p and min-p keep what a sort of the whole vocabulary would (of
    equals the lowest ids).
    """
    scaled = (row - np.float32(best)) / np.float32(params.temperature)
    weights = np.exp(scaled)
    kept = _kept(scaled, weights, params)
    if kept is None:
        return _invert(weights, uniform)
    cumulated = np.cumsum(weights[kept], dtype=np.float64)
    place = int(np.searchsorted(cumulated, uniform * cumulated[-1], side="right"))
    return int(kept[min(place, len(kept) - 1)])


def _kept(scaled: Row, weights: Row, params: SamplingParams) -> Ids | None:
    """The tokens that top-k, then top-p, then min-p leave, in order; None for all. The likeliest's weight is 1."""
    kept: Ids | None = None
    if 0 < params.top_k < len(scaled):
        kept = leading(scaled, 0.0, params.top_k)
        if params.top_p < 1.0:
            kept = _until(kept, weights, params.top_p * float(weights[kept].sum(dtype=np.float64)))
        kept = np.sort(kept)
    elif params.top_p < 1.0:
        kept = _nucleus(scaled, weights, params.top_p * float(_sums(weights).sum()))
    if params.min_p > 0.0:
        likely = weights >= np.float32(params.min_p)
        kept = np.flatnonzero(likely) if kept is None else kept[likely[kept]]
    return kept


def _until(ids: Ids, weights: Row, mass: float) -> Ids:
    """The first of `ids` that make up `mass` together, one at least."""
    own = weights[ids].astype(np.float64)
    return ids[: max(1, int(np.searchsorted(np.cumsum(own) - own, mass, side="left")))]


def _nucleus(scaled: Row, weights: Row, mass: float) -> Ids:
    """The fewest likeliest tokens that make up `mass` together, in order."""
    for near in NEAR:
        ids = np.flatnonzero(scaled >= np.float32(-near))
        if len(ids) > FEW:
            break
        if weights[ids].sum(dtype=np.float64) >= mass:
            return np.sort(_until(_sorted(ids, scaled), weights, mass))
    # too many to sort: only those in the bin in which the mass is reached need it
    bins = _bins(scaled)
    reached = np.cumsum(np.bincount(bins, weights=weights))
    last = min(int(np.searchsorted(reached, mass, side="left")), len(reached) - 1)
    chosen = bins < last
    rest = mass - (reached[last - 1] if last else 0.0)
    chosen[_until(_sorted(np.flatnonzero(bins == last), scaled), weights, rest)] = True
    return np.flatnonzero(chosen)


def _invert(weights: Row, uniform: float) -> int:
    """The token at `uniform` of the cumulated weights, in order of ids."""
    cumulated = np.cumsum(_sums(weights))
    target = uniform * cumulated[-1]
    chunk = min(int(np.searchsorted(cumulated, target, side="right")), len(cumulated) - 1)
    inside = np.cumsum(weights[chunk * CHUNK : (chunk + 1) * CHUNK], dtype=np.float64)
    rest = target - (cumulated[chunk - 1] if chunk else 0.0)
    place = int(np.searchsorted(inside, rest, side="right"))
    if place == len(inside):  # the sums differ by a rounding: the last token with any weight
        place = int(np.searchsorted(inside, inside[-1], side="left"))
    return chunk * CHUNK + place
