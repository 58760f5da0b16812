"""How long an engine's requests wait, and its steps take."""

from __future__ import annotations

from dataclasses import dataclass

from kvpager.engine.outputs import Usage
from kvpager.stats import Distribution, Histogram, PagerLatencies

__all__ = ["EngineLatencies", "Latencies"]

STEP = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
REQUEST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
SHARES = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.925, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999, 1.0)


@dataclass(frozen=True)
class EngineLatencies:
    """One look at how long things took, in seconds, and what selections kept.

    step           of the engine: a forward, and the choice of tokens
    queue          of answers, from their request's arrival to its first step
    first_token    of answers, from their request's arrival; between_tokens: from one token to the next
    end_to_end     of answers, from their request's arrival to their end
    coverage       of answers: the estimated share of attention that their selections kept (1.0: all of it)
    pager          of parts of a step
    """

    step: Distribution
    queue: Distribution
    first_token: Distribution
    between_tokens: Distribution
    end_to_end: Distribution
    coverage: Distribution
    pager: PagerLatencies


class Latencies:
    """Takes what EngineLatencies gives."""

    def __init__(self) -> None:
        self.step, self.between_tokens = Histogram(STEP), Histogram(STEP)
        self.queue, self.first_token, self.end_to_end = (Histogram(REQUEST) for _ in range(3))
        self.coverage = Histogram(SHARES)

    def ended(self, usage: Usage) -> None:
        """An answer has ended, however that came."""
        self.queue.add(usage.queue_s)
        self.end_to_end.add(usage.total_s)
        if usage.pages_attended:
            self.coverage.add(usage.estimated_mass_coverage)

    def look(self, pager: PagerLatencies) -> EngineLatencies:
        """What was counted so far, with the pager's."""
        return EngineLatencies(
            self.step.look(),
            self.queue.look(),
            self.first_token.look(),
            self.between_tokens.look(),
            self.end_to_end.look(),
            self.coverage.look(),
            pager,
        )
