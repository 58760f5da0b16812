"""What is sent back: whole answers and chunks of streams, in the shapes of OpenAI's two kinds of completion."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpager.engine.outputs import FinishReason, Output, TokenLogprob, Usage
from kvpager.server.texts import Texts

__all__ = [
    "Choice",
    "Echo",
    "Logprobs",
    "Totals",
    "chat_chunk",
    "chat_whole",
    "completion_chunk",
    "completion_whole",
    "reasons",
]

_REASONS: dict[FinishReason, str] = {"stop": "stop", "length": "length", "deadline": "length", "abort": "length"}


@dataclass
class Totals:
    """Usage of all prompts and choices of one HTTP request.

    A prompt counts once, however many answers it gets; `shown` is off where no answer was wanted.
    """

    shown: bool = True
    prompts: dict[int, Usage] = field(default_factory=dict)  # the first that came, by prompt
    choices: list[Usage] = field(default_factory=list)

    def add(self, prompt: int, usage: Usage) -> None:
        """Take what one choice reported at its end."""
        self.prompts.setdefault(prompt, usage)
        self.choices.append(usage)

    def as_dict(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        prompt = sum(usage.prompt_tokens for usage in self.prompts.values())
        completion = sum(usage.completion_tokens for usage in self.choices) if self.shown else 0
        cached = sum(usage.cached_tokens for usage in self.prompts.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def paging(self) -> dict[str, Any]:
        """Our own figures: pages that this request's attention read, and its estimated fidelity.

        The coverage of several choices is their mean, weighted by the pages that each attended to.
        """
        attended = sum(usage.pages_attended for usage in self.choices)
        weighted = sum(usage.estimated_mass_coverage * usage.pages_attended for usage in self.choices)
        return {
            "pages_attended": attended,
            "pages_recalled": sum(usage.pages_recalled for usage in self.choices),
            "pages_evicted": sum(usage.pages_evicted for usage in self.choices),
            "estimated_mass_coverage": round(weighted / attended, 6) if attended else 1.0,
        }


@dataclass
class Choice:
    """One answer as far as it has come."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, output: Output) -> None:
        """Take an output of this choice."""
        self.texts.append(output.text)
        self.logprobs.extend(output.logprobs or ())
        if output.finish_reason is not None:
            self.finish_reason, self.stop_reason = reasons(output)


def reasons(output: Output) -> tuple[str | None, str | int | None]:
    """OpenAI's finish_reason, and vLLM's stop_reason: the stop text or token id, or what else cut the answer."""
    if output.finish_reason is None:
        return None, None
    cut = output.finish_reason if output.finish_reason in ("deadline", "abort") else None
    return _REASONS[output.finish_reason], output.stop_reason if cut is None else cut


@dataclass
class Echo:
    """A prompt to show before what was written after it. `logprobs` are of its tokens from the second on."""

    text: str
    ids: Sequence[int]
    logprobs: tuple[TokenLogprob, ...] = ()


class Logprobs:
    """Turns token ids with their log-probabilities into OpenAI's objects."""

    def __init__(self, texts: Texts, top: int) -> None:
        self._texts = texts
        self._top = top
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0  # characters of the text that the tokens so far make up, for completions

    def chat(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The object of a chat's choice."""
        return {
            "content": [
                {
                    **self._entry(entry.token_id, entry.logprob),
                    "top_logprobs": [self._entry(token, logprob) for token, logprob in entry.top[: self._top]],
                }
                for entry in entries
            ],
            "refusal": None,
        }

    def completion(self, entries: Sequence[tuple[int, TokenLogprob | None]]) -> dict[str, Any]:
        """The object of a completion's choice: token ids, None beside a prompt's first token, which nothing foretold.

        `text_offset` counts on from call to call, as chunks of one text.
        """
        tokens, logprobs, tops, offsets = [], [], [], []
        for token_id, entry in entries:
            text, data = self._texts.token(token_id)
            tokens.append(text)
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(data))
            logprobs.append(_finite(entry.logprob) if entry is not None else None)
            tops.append(self._top_of(entry, text) if entry is not None and self._top else None)
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def _top_of(self, entry: TokenLogprob, text: str) -> dict[str, float | None]:
        """The likeliest tokens by text, and the chosen one among them as OpenAI has it."""
        top = {self._texts.token(token)[0]: _finite(logprob) for token, logprob in entry.top[: self._top]}
        return {**top, text: _finite(entry.logprob)}

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        text, data = self._texts.token(token)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(data)}


def _finite(logprob: float | None) -> float | None:
    """JSON knows no infinity: a token that was ruled out gets OpenAI's -9999."""
    return None if logprob is None else max(logprob, -9999.0)


def chat_whole(choices: Sequence[Choice], logprobs: Sequence[Logprobs | None]) -> list[dict[str, Any]]:
    """The choices of a chat's answer."""
    return [
        {
            "index": index,
            "message": {"role": "assistant", "content": "".join(choice.texts), "refusal": None},
            "logprobs": told.chat(choice.logprobs) if told is not None else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        for index, (choice, told) in enumerate(zip(choices, logprobs, strict=True))
    ]


def chat_chunk(index: int, output: Output, logprobs: Logprobs | None, *, first: bool) -> dict[str, Any]:
    """The choice of a chunk of a chat's stream; the first one of an answer says the role."""
    delta: dict[str, Any] = {"role": "assistant", "content": ""} if first else {}
    if output.text or output.finish_reason is None:
        delta["content"] = output.text
    finish, stop = reasons(output)
    told = logprobs.chat(output.logprobs) if logprobs is not None and output.logprobs else None
    return {"index": index, "delta": delta, "logprobs": told, "finish_reason": finish, "stop_reason": stop}


def completion_whole(
    choices: Sequence[Choice], logprobs: Sequence[Logprobs | None], echoes: Sequence[Echo | None]
) -> list[dict[str, Any]]:
    """The choices of a completion; `echoes` are the prompts to show before them."""
    return [
        _completion(index, "".join(choice.texts), choice.logprobs, told, echo)
        | {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        for index, (choice, told, echo) in enumerate(zip(choices, logprobs, echoes, strict=True))
    ]


def completion_chunk(index: int, output: Output, logprobs: Logprobs | None, echo: Echo | None) -> dict[str, Any]:
    """The choice of a chunk of a completion's stream; `echo` is the prompt, where it is to be shown before it."""
    finish, stop = reasons(output)
    made = _completion(index, output.text, output.logprobs or (), logprobs, echo)
    return made | {"finish_reason": finish, "stop_reason": stop}


def _completion(
    index: int, text: str, entries: Sequence[TokenLogprob], logprobs: Logprobs | None, echo: Echo | None
) -> dict[str, Any]:
    told: list[tuple[int, TokenLogprob | None]] = [(entry.token_id, entry) for entry in entries]
    if echo is not None:
        text = echo.text + text
        told = [*zip(echo.ids, (None, *echo.logprobs), strict=False), *told]
    return {"index": index, "text": text, "logprobs": logprobs.completion(told) if logprobs and told else None}
