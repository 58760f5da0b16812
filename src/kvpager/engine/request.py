"""A request while the engine has it, and the answers that it asked for."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvpager.core.saving import SavedSequence
from kvpager.core.sequence import Cost, Sequence
from kvpager.engine.outputs import FinishReason, TokenLogprob, Usage
from kvpager.engine.params import SamplingParams
from kvpager.engine.room import Need
from kvpager.engine.sampler import SampleState
from kvpager.engine.schedule import Schedule
from kvpager.engine.session import Session
from kvpager.engine.text import TextState
from kvpager.ports import IntArray

__all__ = ["Choice", "Entry", "Request"]


class Choice:
    """One answer.

    sequence   its keys and values; None before its first step, and after they were lost
    cost       what its sequence has taken so far
    output     the tokens that were given out, once each
    replays    how often its sequence had to be computed anew
    skipped    steps in a row that had no frames for it
    saved      its sequence as another engine had it, until it has begun here
    """

    __slots__ = (
        "cost",
        "finish_reason",
        "first_token",
        "index",
        "last_token",
        "output",
        "replays",
        "request",
        "saved",
        "sequence",
        "skipped",
        "state",
        "text",
    )

    def __init__(self, request: Request, index: int, state: SampleState, text: TextState) -> None:
        self.request, self.index = request, index
        self.state, self.text = state, text
        self.sequence: Sequence | None = None
        self.cost = Cost()
        self.output: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.first_token: float | None = None
        self.last_token = 0.0
        self.replays = 0
        self.skipped = 0
        self.saved: SavedSequence | None = None

    @property
    def known(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self.request.prompt) + len(self.output)

    @property
    def length(self) -> int:
        """Tokens that its sequence holds."""
        return 0 if self.sequence is None else self.sequence.length

    @property
    def decodes(self) -> bool:
        """Whether all but its last token have been computed."""
        return bool(self.output) and self.sequence is not None and self.sequence.length == self.known - 1

    def tokens(self, start: int, stop: int) -> list[int]:
        """Tokens start..stop-1 of prompt and answer."""
        prompt = self.request.prompt
        split = len(prompt)
        if start >= split:
            return self.output[start - split : stop - split]
        return prompt[start:stop] + self.output[: max(0, stop - split)]


class Request:
    """A request and its answers. `number` counts arrivals; times are the engine's clock's, in seconds."""

    def __init__(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        *,
        priority: int,
        deadline: float | None,
        salt: bytes,
        number: int,
        arrived: float,
        need: Need,
    ) -> None:
        self.id, self.prompt, self.params = request_id, prompt, params
        self.priority, self.deadline, self.salt = priority, deadline, salt
        self.number, self.arrived = number, arrived
        self.need = need
        self.schedule = Schedule(len(prompt))
        self.session: Session | None = None
        self.resumed = False  # whether it began in another engine
        self.choices: list[Choice] = []
        self.prompt_array: IntArray = np.array(prompt, np.int64)
        self.prompt_logprobs: list[TokenLogprob] = []
        self.forked = params.n == 1  # whether each answer has a sequence of its own
        self.leader: Request | None = None  # it computes a prefix that this one waits for
        self.shared = 0  # tokens of that prefix
        self.has_waited = False
        self.patience: int | None = None  # the count of ended requests at which it gave up its pages
        self.told = False  # whether the prompt's log-probabilities were given out
        self.cached_tokens = 0
        self.preemptions = 0
        self.started: float | None = None

    @property
    def key(self) -> tuple[int, int]:
        """Whom to serve first: the lowest."""
        return self.priority, self.number

    @property
    def alive(self) -> list[Choice]:
        """Answers that have not ended."""
        return [choice for choice in self.choices if choice.finish_reason is None]

    @property
    def active(self) -> list[Choice]:
        """Answers that have a sequence, or need one: before the prompt's end the first stands for all."""
        return self.alive if self.forked else self.choices[:1]

    @property
    def prefills(self) -> bool:
        """Whether its prompt is still being computed for the first time."""
        return self.started is not None and not self.choices[0].output and self.choices[0].finish_reason is None

    def usage(self, choice: Choice, now: float) -> Usage:
        """What one of its answers has cost up to `now`."""
        cost = choice.cost if self.forked else self.choices[0].cost
        return Usage(
            prompt_tokens=len(self.prompt),
            completion_tokens=len(choice.output),
            cached_tokens=self.cached_tokens,
            pages_attended=cost.pages_attended,
            pages_recalled=cost.recalls,
            pages_evicted=cost.evictions,
            estimated_mass_coverage=cost.coverage_sum / cost.tiles if cost.tiles else 1.0,
            preemptions=self.preemptions,
            queue_s=(now if self.started is None else self.started) - self.arrived,
            first_token_s=None if choice.first_token is None else choice.first_token - self.arrived,
            total_s=now - self.arrived,
        )


class Entry(NamedTuple):
    """One sequence's part of a step: tokens start..stop-1 of a choice. `sample`: its last logits give a new token."""

    choice: Choice
    sequence: Sequence
    start: int
    stop: int
    sample: bool

    @property
    def tokens(self) -> int:
        """Its tokens."""
        return self.stop - self.start
