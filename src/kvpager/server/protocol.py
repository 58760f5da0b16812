"""What clients may send: OpenAI's fields, those that vLLM adds, and a clear refusal of what would change the answer.

Types are strict: "5" is not a number. Fields that are not listed here, or that change nothing about an answer (user,
metadata, store, service_tier ...), are ignored as OpenAI's servers do.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvpager.engine.guided import JSON_OBJECT
from kvpager.engine.params import SamplingParams
from kvpager.server.errors import ApiError
from kvpager.server.limits import Limits

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "Message",
    "TextPart",
    "TokenizeRequest",
    "refuse_unsupported",
    "sampling_params",
]

# Values of these fields with which an answer is what it is without the field; with others it would be another.
_REFUSED: dict[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "continue_final_message": (False,),
}
_WHY = {
    "tools": "this server does not call tools",
    "tool_choice": "this server does not call tools",
    "functions": "this server does not call functions",
    "function_call": "this server does not call functions",
    "suffix": "this server writes on after a prompt, and puts nothing into the middle of a text",
    "guided_json": "use response_format with a json_schema",
    "structured_outputs": "use response_format with a json_schema",
    "prompt_logprobs": "use /v1/completions with echo and logprobs",
}
_ID = Annotated[int, Field(ge=0, lt=2**31)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class StreamOptions(_Body):
    """What comes beside the text of a stream."""

    include_usage: bool | None = None


class TextPart(_Body):
    """A part of a message's content."""

    type: str
    text: str | None = None


class Message(_Body):
    """One turn of a conversation."""

    role: str
    content: str | list[TextPart] | None = None


class JsonSchema(_Body):
    """A schema with a name, as OpenAI wraps it."""

    name: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Body):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class _Common(_Body):
    """What both kinds of completion have."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None
    user: str | None = None
    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[_ID] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: int | None = Field(default=None, ge=-(2**31), lt=2**31)
    # our own
    session: str | None = None

    @property
    def usage_in_stream(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatRequest(_Common):
    """The body of /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    echo: Literal[False] | None = None


class CompletionRequest(_Common):
    """The body of /v1/completions."""

    prompt: str | list[str] | list[_ID] | list[list[_ID]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None


class TokenizeRequest(_Body):
    """The body of /tokenize: a prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(_Body):
    """The body of /detokenize."""

    model: str | None = None
    tokens: list[_ID]


def refuse_unsupported(request: BaseModel) -> None:
    """Raise ApiError for a field that this server does not know how to heed, where its value asks for something."""
    for name, value in (request.model_extra or {}).items():
        if name in _REFUSED and value is not None and not any(value == harmless for harmless in _REFUSED[name]):
            why = _WHY.get(name, "this server does not support it")
            raise ApiError(400, f"{name}: {why}", param=name, code="unsupported_parameter")


def sampling_params(request: ChatRequest | CompletionRequest, limits: Limits) -> SamplingParams:
    """The request's settings for the engine; those that it leaves out are OpenAI's defaults.

    Raises ApiError for what the limits rule out, InputError for values that are out of range.
    """
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    _check_limits(request, stop, limits)
    given = {
        name: getattr(request, name)
        for name in (
            *("n", "seed", "temperature", "top_p", "presence_penalty", "frequency_penalty"),
            *("min_p", "repetition_penalty", "min_tokens", "ignore_eos"),
            *("skip_special_tokens", "include_stop_str_in_output"),
        )
        if getattr(request, name) is not None
    }
    if request.top_k is not None:
        given["top_k"] = 0 if request.top_k == -1 else request.top_k  # -1: vLLM's way to say all
    logprobs = _logprobs(request, limits)
    return SamplingParams(
        **given,
        max_tokens=_max_tokens(request, limits),
        stop=tuple(stop),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        logit_bias=_logit_bias(request.logit_bias),
        logprobs=logprobs,
        prompt_logprobs=logprobs if isinstance(request, CompletionRequest) and request.echo else None,
        json_schema=_schema(request.response_format),
    )


def _check_limits(request: ChatRequest | CompletionRequest, stop: list[str], limits: Limits) -> None:
    n = 1 if request.n is None else request.n
    if not 1 <= n <= limits.n:
        raise _out_of_range("n", n, 1, limits.n)
    if isinstance(request, CompletionRequest) and request.best_of not in (None, n):
        text = "this server does not write more answers than it returns; leave it out, or give n"
        raise ApiError(400, f"best_of: {text}", param="best_of", code="unsupported_parameter")
    if len(stop) > limits.stop:
        raise ApiError(400, f"stop: {len(stop)} texts are more than {limits.stop}", param="stop", code="invalid_value")
    for text in stop:
        if not 1 <= len(text) <= limits.stop_characters:
            message = f"stop: a text of {len(text)} characters is not of 1 to {limits.stop_characters}"
            raise ApiError(400, message, param="stop", code="invalid_value")
    if request.stream_options is not None and not request.stream:
        message = "stream_options: they go with stream: true only"
        raise ApiError(400, message, param="stream_options", code="invalid_value")


def _max_tokens(request: ChatRequest | CompletionRequest, limits: Limits) -> int | None:
    """Tokens to write; None leaves it to the context. A completion has 16 by default, a chat as many as fit."""
    name, value = "max_tokens", request.max_tokens
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        name, value = "max_completion_tokens", request.max_completion_tokens
    if value is None:
        value = 16 if isinstance(request, CompletionRequest) else limits.max_tokens
        return value if limits.max_tokens is None or value is None else min(value, limits.max_tokens)
    if value == 0 and isinstance(request, CompletionRequest) and request.echo:
        return 1  # the prompt alone is wanted; what is written is not shown
    most = limits.max_tokens if limits.max_tokens is not None else 2**31 - 1
    if not 1 <= value <= most:
        raise _out_of_range(name, value, 1, most)
    return value


def _logprobs(request: ChatRequest | CompletionRequest, limits: Limits) -> int | None:
    name, value = "logprobs", request.logprobs
    if isinstance(request, ChatRequest):
        name = "top_logprobs"
        if request.top_logprobs and not request.logprobs:
            raise ApiError(400, "top_logprobs: it needs logprobs: true", param=name, code="invalid_value")
        value = (request.top_logprobs or 0) if request.logprobs else None
    if value is not None and not 0 <= value <= limits.logprobs:
        raise _out_of_range(name, value, 0, limits.logprobs)
    return value


def _logit_bias(given: dict[str, float] | None) -> dict[int, float] | None:
    if not given:
        return None
    for token in given:
        if not (token.isascii() and token.isdigit() and len(token) <= 10):
            raise ApiError(
                400, "logit_bias: a key is not a token id, a whole number", param="logit_bias", code="invalid_value"
            )
    return {int(token): bias for token, bias in given.items()}


def _schema(form: ResponseFormat | None) -> dict[str, Any] | str | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return JSON_OBJECT
    if form.json_schema is None or form.json_schema.schema_ is None:
        message = "response_format: type json_schema needs json_schema.schema"
        raise ApiError(400, message, param="response_format", code="missing_required_parameter")
    return form.json_schema.schema_


def _out_of_range(name: str, value: int, low: int, high: int) -> ApiError:
    shown = str(value) if value.bit_length() < 128 else "the value"
    return ApiError(400, f"{name}: {shown} is not in {low}..{high}", param=name, code="invalid_value")
