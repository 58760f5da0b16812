"""A request that began in another engine, from what a journal knows of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast, get_args

from kvpager.core.telling import joined
from kvpager.engine.outputs import FinishReason, Output, TokenLogprob, Usage
from kvpager.engine.request import Choice, Request
from kvpager.engine.schedule import Schedule
from kvpager.engine.telling import as_logprob
from kvpager.errors import InputError, SampleError
from kvpager.journaled import Resumable, Told

__all__ = ["resume", "retold"]


def resume(request: Request, resumable: Resumable, page_size: int, end_ids: frozenset[int]) -> list[Output]:
    """Bring a new request to where it had come; what its answers have given so far, an output for each token.

    So text, stop strings, draws and grammars are where they were. Raises InputError for what is not of this request.
    """
    count = len(request.choices)
    parts = (resumable.outputs, resumable.told, resumable.logprobs, resumable.saved)
    if any(len(part) != count for part in parts):
        raise InputError(f"resumable: it is not of {count} answers")
    outputs: list[Output] = []
    for choice, tokens, told, logprobs, saved in zip(request.choices, *parts, strict=True):
        outputs += _said(choice, list(tokens), [as_logprob(one) for one in logprobs], told, end_ids)
        if saved is not None and told is None:
            choice.saved = joined(saved, page_size)
            if saved.singles:
                request.schedule = Schedule(len(request.prompt), [(start, stop) for start, stop in saved.singles])
    begun = any(choice.output or choice.finish_reason is not None for choice in request.choices)
    request.forked = request.forked or begun
    request.resumed = begun or any(choice.saved is not None for choice in request.choices)
    return outputs


def _said(
    choice: Choice, tokens: list[int], logprobs: list[TokenLogprob], told: Told | None, end_ids: frozenset[int]
) -> list[Output]:
    """An answer's outputs until now; the choice is then where it was after them."""
    request, params = choice.request, choice.request.params
    if len(logprobs) != (0 if params.logprobs is None else len(tokens)):
        raise InputError("resumable: log-probabilities that are not of its tokens")
    outputs: list[Output] = []
    for place, token in enumerate(tokens):
        last = told is not None and told.finish_reason == "stop" and place == len(tokens) - 1
        marks = last and ((token in end_ids and not params.ignore_eos) or token in params.stop_token_ids)
        if told is None:
            try:
                choice.state.accept(token)
            except SampleError as error:
                raise InputError(f"resumable: {error}") from None
        choice.output.append(token)
        piece = "" if marks else choice.text.push(token)
        told_of = (logprobs[place],) if logprobs else None
        outputs.append(Output(request.id, choice.index, piece, (token,), told_of))
    return outputs if told is None else _ended(choice, outputs, told)


def _ended(choice: Choice, outputs: list[Output], told: Told) -> list[Output]:
    """The outputs of an answer that has ended: with its last token, unless it was ended from outside."""
    if told.finish_reason not in get_args(FinishReason):
        raise InputError(f"resumable: no answer ends with {told.finish_reason!r}")
    choice.finish_reason = reason = cast(FinishReason, told.finish_reason)
    rest = choice.text.finish()
    last = Output(choice.request.id, choice.index)
    if outputs and reason in ("stop", "length"):
        last = outputs.pop()
    usage = None if told.usage is None else Usage(**told.usage)
    end: dict[str, Any] = {"finish_reason": reason, "stop_reason": told.stop_reason, "usage": usage}
    return [*outputs, replace(last, text=last.text + rest, error=told.error, **end)]


def retold(request: Request, resumable: Resumable) -> list[Told]:
    """All that the answers have come to, for another journal."""
    told: list[Told] = []
    for choice, end, logprobs in zip(request.choices, resumable.told, resumable.logprobs, strict=True):
        rest = (None,) if end is None else (end.finish_reason, end.stop_reason, end.error, end.usage)
        known = None if request.params.logprobs is None else logprobs
        told.append(Told(request.id, choice.index, tuple(choice.output), known, None, *rest))
    return told
