"""What a request may say about how its answer is drawn, cut and told: one frozen dataclass, checked when it is made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as brief
from typing import Any

from kvpager.engine.text import require_text
from kvpager.errors import InputError

__all__ = ["MOST_CHOICES", "MOST_LOGPROBS", "SamplingParams"]

MOST_TOKENS = 2**31 - 1
MOST_CHOICES = 128
MOST_LOGPROBS = 100  # alternatives told beside a token; OpenAI's servers allow 20
MOST_STOPS = 64
MOST_STOP_CHARACTERS = 4096
MOST_BIASES = 4096
LEAST_REPETITION = 0.01  # logits divided by much less become infinite
GREEDY_BELOW = 1e-5  # temperatures below leave nothing to chance in float32


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens, when to stop, and what to tell.

    Raises InputError that names the field, its value and what is allowed.

    max_tokens          most tokens of the answer; None: as many as the model's context has room for
    min_tokens          end marks, `stop_token_ids` and `stop` are ruled out until so many tokens are there
    temperature         logits are divided by it; 0 (anything below 0.00001) takes the likeliest token
    top_k               draw from so many likeliest tokens; 0 for all
    top_p               draw from the fewest likeliest tokens that have this share of the probability
    min_p               leave out tokens with less than this share of the likeliest one's probability
    repetition_penalty  logits of tokens in prompt or answer: divided by it above zero, multiplied below; 1 for none
    presence_penalty    taken from the logits of tokens that the answer has
    frequency_penalty   taken from a token's logit once for each time that the answer has it
    seed                of the draws; None: the engine gives the request one
    logit_bias          added to the logits of token ids
    stop                texts that end the answer; a match is not shown, unless `include_stop_str_in_output`
    stop_token_ids      tokens that end the answer, as the model's end marks do
    ignore_eos          go on after the model's end marks
    logprobs            log-probabilities of the answer's tokens, and of so many likeliest ones beside; None for none
    prompt_logprobs     the same for the prompt's tokens
    n                   answers to the same prompt, drawn apart from each other
    json_schema         the answer is JSON that keeps to this schema (a dict, or its text; kept as text)
    skip_special_tokens leave control tokens out of the text
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[int, float] | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    json_schema: dict[str, Any] | str | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, MOST_TOKENS)
        _whole("min_tokens", self.min_tokens, 0, MOST_TOKENS)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InputError(f"min_tokens: {self.min_tokens} is more than max_tokens, {self.max_tokens}")
        _number("temperature", self.temperature, 0.0, 100.0)
        _whole("top_k", self.top_k, 0, MOST_TOKENS)
        _number("top_p", self.top_p, 0.0, 1.0, above=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, LEAST_REPETITION, 100.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**64 - 1)
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name}: {brief(getattr(self, name))} is not True or False")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 0, MOST_LOGPROBS)
        _whole("n", self.n, 1, MOST_CHOICES)
        # what comes in as a list or a dict is copied, so that nobody changes it afterwards
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        object.__setattr__(self, "stop", _stops(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_ids(self.stop_token_ids))
        object.__setattr__(self, "json_schema", _schema(self.json_schema))

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, with nothing drawn."""
        return self.temperature < GREEDY_BELOW

    def require_vocabulary(self, vocabulary: int) -> None:
        """Raise InputError where a token id is not below `vocabulary`: known only once there is a model."""
        for name, ids in (("logit_bias", self.logit_bias or ()), ("stop_token_ids", self.stop_token_ids)):
            wrong = [token for token in ids if token >= vocabulary]
            if wrong:
                raise InputError(f"{name}: token id {wrong[0]} is not in 0..{vocabulary - 1}, the model's vocabulary")


def _whole(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{name}: {brief(value)} is not a whole number")
    if not low <= value <= high:
        raise InputError(f"{name}: {_short(value)} is not in {low}..{high}")


def _number(name: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"{name}: {brief(value)} is not a number")
    if not low <= value <= high or (above and value == low):  # NaN is in no range
        allowed = f"above {low:g} and at most {high:g}" if above else f"in {low:g}..{high:g}"
        raise InputError(f"{name}: {_short(value)} is not {allowed}")


def _short(value: float) -> str:
    """A number for a message; a whole number may be of any length, and Python refuses to write out the longest."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a whole number of {value.bit_length()} bits"
    return str(value)


def _biases(value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InputError(f"logit_bias: expected token ids with their biases, got {type(value).__name__}")
    if len(value) > MOST_BIASES:
        raise InputError(f"logit_bias: {len(value)} token ids are more than {MOST_BIASES}")
    for token, bias in value.items():
        _whole("logit_bias", token, 0, MOST_TOKENS)
        _number(f"logit_bias of token {token}", bias, -100.0, 100.0)
    return {int(token): float(bias) for token, bias in value.items()}


def _listed(name: str, value: object) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise InputError(f"{name}: expected a list, got {type(value).__name__}")
    if len(value) > MOST_STOPS:
        raise InputError(f"{name}: {len(value)} are more than {MOST_STOPS}")
    return tuple(value)


def _stops(value: object) -> tuple[str, ...]:
    stops = _listed("stop", [value] if isinstance(value, str) else value)
    for stop in stops:
        if not isinstance(stop, str):
            raise InputError(f"stop: {brief(stop)} is not text")
        require_text(stop, "stop")
        if not 1 <= len(stop) <= MOST_STOP_CHARACTERS:
            raise InputError(f"stop: a text of {len(stop)} characters is not of 1..{MOST_STOP_CHARACTERS}")
    return stops


def _stop_ids(value: object) -> tuple[int, ...]:
    ids = _listed("stop_token_ids", value)
    for token in ids:
        _whole("stop_token_ids", token, 0, MOST_TOKENS)
    return ids


def _schema(value: object) -> str | None:
    """The schema's text. Its keys stay in order: the answer's properties come in that order."""
    if value is None:
        return None
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InputError(f"json_schema: the text is not JSON ({error})") from None
    else:
        parsed = value
    if not isinstance(parsed, dict):
        raise InputError(f"json_schema: expected an object (dict), got {type(parsed).__name__}")
    try:
        return json.dumps(parsed, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"json_schema: can't be written as JSON ({error})") from None
