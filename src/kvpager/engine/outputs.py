"""What an engine gives back: outputs a step, the usage of each answer, and figures of the engine itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvpager.stats import PagerStats, StoreStats

__all__ = ["EngineStats", "FinishReason", "Output", "SessionStats", "TokenLogprob", "Usage"]

FinishReason = Literal["stop", "length", "abort", "deadline", "error"]


@dataclass(frozen=True)
class TokenLogprob:
    """A token's log-probability by the model's own distribution, and the likeliest tokens' beside it."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Usage:
    """What one answer has cost.

    prompt_tokens, completion_tokens   tokens read and written
    cached_tokens              prompt tokens that other requests had computed before: all but one at most, or all of
                               them where an answer that was cut short goes on
    pages_attended             pages that its tiles attended to, over all layers
    pages_recalled             pages that had to be read back from swap for its tiles
    pages_evicted              pages of its blocks that left the pool; a page that it shares counts for each sharer
    estimated_mass_coverage    the estimated share of attention that its selections kept, mean over its tiles
    preemptions                how often it gave up its frames
    queue_s, first_token_s, total_s   seconds until its first step, its first token and its end, from its arrival

    The answers of one request (n > 1) each count the prompt's tiles, which were computed once.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    pages_attended: int
    pages_recalled: int
    pages_evicted: int
    estimated_mass_coverage: float
    preemptions: int
    queue_s: float
    first_token_s: float | None
    total_s: float


@dataclass(frozen=True)
class Output:
    """What a step has added to one answer.

    request_id, index   which request, and which of its n answers
    text                new text; may be empty while a character or a stop string is not decided yet
    token_ids           new tokens
    logprobs            theirs, where they were asked for
    prompt_logprobs     once, with the first output of answer 0: of the prompt's tokens from the second on
    finish_reason       None while it goes on
    stop_reason         the stop string or token id that ended it; None for the model's own end marks
    usage, error        with the finish
    """

    request_id: str
    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    usage: Usage | None = None
    error: str | None = None


@dataclass(frozen=True)
class SessionStats:
    """One look at the sessions of an engine.

    held     that a request is using
    resumed  requests that went on from where their session was left
    saved    requests whose end was saved
    lost     ends that could not be saved, and records from which nothing could be gone on
    """

    held: int = 0
    resumed: int = 0
    saved: int = 0
    lost: int = 0


@dataclass(frozen=True)
class EngineStats:
    """One look at an engine.

    running, waiting, preempted   requests that have sequences, that wait for a first step, that gave up their frames
    finished          requests by how they ended (the first of their answers that did not stop by itself decides)
    preemptions       how often a request gave up its frames
    replays           sequences computed anew because a page of theirs was lost
    recomputed        tokens of requests that began in another engine that had to be computed again
    steps             forwards that were run
    prompt_tokens, cached_tokens, completion_tokens   of all requests: computed, found computed, written
    pager             the pager's own
    sessions          conversations that outlive their requests
    store             the store's own, where there is one
    """

    running: int
    waiting: int
    preempted: int
    preemptions: int
    replays: int
    steps: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    pager: PagerStats
    finished: dict[str, int] = field(default_factory=dict)
    sessions: SessionStats = field(default_factory=SessionStats)
    store: StoreStats | None = None
    recomputed: int = 0
