"""What the engine tells about a request: new text, and figures at its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["FinishReason", "Output", "TokenLogprob", "Usage"]

FinishReason = Literal["stop", "length", "abort", "deadline", "error"]


@dataclass(frozen=True)
class TokenLogprob:
    """A token's log-probability, and the likeliest tokens beside it."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Usage:
    """What a choice took."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    pages_attended: int = 0
    pages_recalled: int = 0
    pages_evicted: int = 0
    estimated_mass_coverage: float = 1.0
    preemptions: int = 0
    queue_s: float = 0.0
    first_token_s: float | None = None
    total_s: float = 0.0


@dataclass(frozen=True)
class Output:
    """News of one choice of a request."""

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    usage: Usage | None = None
    error: str | None = None
