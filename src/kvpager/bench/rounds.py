"""Times that can be compared: everybody runs in every round, so that what disturbs a machine disturbs all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter, sleep

__all__ = ["Runner", "play"]

BLOCK_SECONDS = 0.005  # a time of less is mostly the waking of threads: short runs are timed several together
RUNNER_SECONDS = 3.0  # after which a slow one gets no more turns
MOST_RUNS = 1000
PAUSE = 0.001  # until the threads of the one before sleep


@dataclass
class Runner:
    """One who is timed: `places` are run in turn. `seconds` holds the mean time of one run, for each round.

    most_runs  runs that are timed together at most; 1 where a second run would find in the caches what the first read
    """

    places: Sequence[Callable[[], object]]
    most_runs: int = MOST_RUNS
    seconds: list[float] = field(default_factory=list)
    _next: int = 0
    _runs: int = 1
    _rounds: int = 1

    def warm_up(self, rounds: int) -> None:
        """Run once untimed and once timed, to know how many runs make a block and how many rounds are affordable."""
        self._block(1)
        spent = self._block(1)
        self._runs = max(1, min(self.most_runs, round(BLOCK_SECONDS / max(spent, 1e-9))))
        self._rounds = max(1, min(rounds, int(RUNNER_SECONDS / (spent * self._runs))))

    def turn(self) -> None:
        """Take one more time, unless enough were taken."""
        if len(self.seconds) < self._rounds:
            sleep(PAUSE)
            self.seconds.append(self._block(self._runs) / self._runs)

    def _block(self, runs: int) -> float:
        places, at = self.places, self._next
        started = perf_counter()
        for _ in range(runs):
            places[at]()
            at = (at + 1) % len(places)
        spent = perf_counter() - started
        self._next = at
        return spent

    @property
    def median(self) -> float:
        """The median time of one run in seconds."""
        return median(self.seconds)


def play(runners: Sequence[Runner], rounds: int, between: Callable[[], object]) -> None:
    """Time all runners in turns for so many rounds; `between` is called before, between and after the rounds."""
    for runner in runners:
        runner.warm_up(rounds)
    between()
    for _ in range(rounds):
        for runner in runners:
            runner.turn()
        between()
