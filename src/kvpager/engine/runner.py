"""One step's forward and its samples."""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from kvpager.core.pager import Pager
from kvpager.engine.outputs import TokenLogprob
from kvpager.engine.request import Choice, Entry
from kvpager.engine.sampler import Sampled, Sampler, token_logprobs
from kvpager.errors import SampleError
from kvpager.hf.ragged import RaggedRunner

__all__ = ["Drawn", "Runner"]


class Drawn(NamedTuple):
    """A choice's next token, or why there is none."""

    choice: Choice
    sampled: Sampled | SampleError


class Runner:
    """Runs a step's entries through the model as one ragged batch and draws their next tokens."""

    def __init__(self, model: PreTrainedModel, pager: Pager, sampler: Sampler) -> None:
        self._ragged = RaggedRunner(model, pager)
        self._sampler = sampler

    def run(self, entries: list[Entry]) -> list[Drawn]:
        """The next token of each choice whose entry ends with its last known token.

        Only rows that are sampled, or asked for as the prompt's log-probabilities, go through the output layer. What
        the pager or the model raises comes through, the step rolled back.
        """
        keep: list[int] = []
        told: list[tuple[Entry, int, int]] = []  # prompt rows: where they begin in `keep`, and how many
        choices: list[Choice] = []
        sampled: list[int] = []  # rows of `keep`, one for each of `choices`
        start = 0
        for entry in entries:
            rows = self._prompt_rows(entry)
            if rows:
                told.append((entry, len(keep), len(rows)))
                keep += [start + row for row in rows]
            start += entry.tokens
            if entry.sample:
                these = self._drawing(entry)
                choices += these
                sampled += [len(keep)] * len(these)
                keep.append(start - 1)
        if not keep:
            keep.append(start - 1)  # an empty index would make the output layer's shape differ
        tokens = [entry.choice.tokens(entry.start, entry.stop) for entry in entries]
        logits = self._ragged.forward([entry.sequence for entry in entries], tokens, keep)
        for entry, first, count in told:
            self._tell(entry, logits[first : first + count])
        if not choices:
            return []
        last = logits if sampled == list(range(len(keep))) else logits[torch.tensor(sampled)]
        drawn = self._sampler.sample(last, [choice.state for choice in choices])
        return [Drawn(choice, one) for choice, one in zip(choices, drawn, strict=True)]

    @staticmethod
    def _drawing(entry: Entry) -> list[Choice]:
        """Who draws from an entry's last row: at the prompt's end all answers to it."""
        request = entry.choice.request
        return [entry.choice] if request.forked else request.alive

    @staticmethod
    def _prompt_rows(entry: Entry) -> range:
        """Those of an entry's rows that tell the log-probability of a prompt token that is still to be told."""
        request = entry.choice.request
        if request.params.prompt_logprobs is None:
            return range(0)
        first, stop = max(entry.start, len(request.prompt_logprobs)), min(entry.stop, len(request.prompt) - 1)
        return range(first - entry.start, stop - entry.start)

    @staticmethod
    def _tell(entry: Entry, logits: torch.Tensor) -> None:
        request = entry.choice.request
        first = len(request.prompt_logprobs) + 1
        tokens = request.prompt[first : first + len(logits)]
        for token, one in zip(tokens, token_logprobs(logits, tokens, request.params.prompt_logprobs or 0), strict=True):
            logprob = float("nan") if isinstance(one, SampleError) or one.logprob is None else one.logprob
            top = () if isinstance(one, SampleError) else tuple(one.top)
            request.prompt_logprobs.append(TokenLogprob(token, logprob, top))
