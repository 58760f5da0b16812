"""``kvpager bench engine``: a workload through an engine in this process, and where the time of its steps goes.

Requests arrive on a virtual clock: it runs with the real one, but jumps over the time in which there is nothing to do,
so that a low rate takes no longer to measure than its work. Clocks stand around the engine's parts as in bench step:
each stops while another one inside of it runs, so that the parts add up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

from kvpager.bench.step import Stopwatch
from kvpager.bench.workload import Item
from kvpager.errors import InputError

if TYPE_CHECKING:
    from kvpager.engine.engine import Engine
    from kvpager.engine.outputs import EngineStats, Output, Usage
    from kvpager.engine.params import SamplingParams
    from kvpager.engine.request import Entry

__all__ = ["PARTS", "WORK", "Answer", "EngineRun", "Step", "VirtualClock", "drive", "require_room"]

PARTS = {
    "model": "the model's layers, but for attention",
    "attention": "the pager: storing, choosing, reading back, attending",
    "paging": "beginning and ending the pager's steps, parking and resuming",
    "sampling": "the next tokens from the logits",
    "scheduling": "who runs in the next step",
    "engine": "all else: batches, texts, counting",
}
WORK = ("model", "attention")  # all other parts are what the engine itself takes


class VirtualClock:
    """Seconds that never go back; `skip` moves them on at once."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._skipped = 0.0
        self._started = clock()

    def __call__(self) -> float:
        """Seconds since it was made."""
        return self._clock() - self._started + self._skipped

    def skip(self, until: float) -> None:
        """Let it be `until`, where that is still to come."""
        self._skipped += max(0.0, until - self())


@dataclass(frozen=True)
class Step:
    """One step of the engine: its time in parts (seconds), what it ran, and the pool after it.

    sequences, tokens   in its batch; `prefill` of the tokens belong to prompts
    schedule            who ran how far: requests with their first and last token
    """

    at: float
    seconds: dict[str, float]
    sequences: int
    tokens: int
    prefill: int
    schedule: tuple[tuple[str, int, int, int], ...]
    running: int
    waiting: int
    frames_used: int

    @property
    def whole(self) -> float:
        """Seconds of the whole step."""
        return sum(self.seconds.values())

    @property
    def kind(self) -> str:
        """What its tokens are for: "prefill", "decode", "mixed", or "idle" when nothing could run."""
        if not self.tokens:
            return "idle"
        return "decode" if not self.prefill else "prefill" if self.prefill == self.tokens else "mixed"


@dataclass
class Answer:
    """What one request wrote."""

    item: Item
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    usage: Usage | None = None


@dataclass
class EngineRun:
    """A workload's run. `seconds` is the virtual clock's, from the first arrival to the last token."""

    answers: list[Answer]
    steps: list[Step] = field(default_factory=list)
    seconds: float = 0.0
    stats: EngineStats | None = None
    interrupted: bool = False

    @property
    def ids_digest(self) -> str:
        """One number for all token ids of all answers, in order."""
        return _digest([answer.token_ids for answer in self.answers])

    @property
    def schedule_digest(self) -> str:
        """One number for who ran when, and how far."""
        return _digest([step.schedule for step in self.steps if step.tokens])


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def drive(
    engine: Engine,
    model: object,
    items: Sequence[Item],
    prompts: Callable[[Item], list[int]],
    params: Callable[[Item], SamplingParams],
    clock: VirtualClock,
    *,
    progress: Callable[[int], None] = lambda done: None,
) -> EngineRun:
    """Run all requests, each from its arrival on; `engine` runs `model` and reads `clock`.

    Ctrl-C gives what was measured so far. Raises what the engine's `add` raises.
    """
    prepared = [(str(item.index), item, prompts(item), params(item)) for item in items]
    run = EngineRun([Answer(item) for item in items])
    answers = {name: answer for (name, *_), answer in zip(prepared, run.answers, strict=True)}
    waiting = prepared[::-1]
    watch = Stopwatch(tuple(PARTS), on=True)
    done, start = 0, clock()
    try:
        with _clocks(engine, model, watch) as batch:
            while waiting or engine.has_work:
                while waiting and waiting[-1][1].at <= clock() - start:
                    name, _, ids, own = waiting.pop()
                    engine.add(name, ids, own)
                if not engine.has_work:
                    clock.skip(start + waiting[-1][1].at)
                    continue
                at = clock() - start
                done += _settle(watch.timed("engine", engine.step)(), answers)
                run.steps.append(_step(engine, watch, batch, at))
                progress(done)
    except KeyboardInterrupt:
        run.interrupted = True
    run.seconds = clock() - start
    run.stats = engine.stats()
    return run


def _settle(outputs: list[Output], answers: dict[str, Answer]) -> int:
    """Keep what a step gave; returns how many answers it ended."""
    ended = 0
    for output in outputs:
        answer = answers[output.request_id]
        answer.token_ids += output.token_ids
        if output.finish_reason is not None:
            answer.finish_reason, answer.usage, answer.error = output.finish_reason, output.usage, output.error
            ended += 1
    return ended


def _step(engine: Engine, watch: Stopwatch, batch: list[Entry], at: float) -> Step:
    stats = engine.stats()
    entries, prefill = list(batch), 0
    batch.clear()
    schedule = []
    for entry in entries:
        choice = entry.choice
        prompt = len(choice.request.prompt)
        prefill += max(0, min(entry.stop, prompt) - entry.start)
        schedule.append((choice.request.id, choice.index, entry.start, entry.stop))
    return Step(
        at=at,
        seconds=watch.take(),
        sequences=len(entries),
        tokens=sum(entry.tokens for entry in entries),
        prefill=prefill,
        schedule=tuple(schedule),
        running=stats.running,
        waiting=stats.waiting + stats.preempted,
        frames_used=stats.pager.frames_used,
    )


@contextmanager
def _clocks(engine: Engine, model: object, watch: Stopwatch) -> Iterator[list[Entry]]:
    """Clocks around the engine's parts inside; gives a list that each step fills with its entries."""
    batch: list[Entry] = []
    runner = engine._runner
    run = runner.run

    def noted(entries: list[Entry]) -> Any:
        batch.extend(entries)
        return run(entries)

    pager = engine.pager
    places: list[tuple[Any, str, str]] = [
        (engine._scheduler, "schedule", "scheduling"),
        (runner._sampler, "sample", "sampling"),
        (model, "forward", "model"),
        (pager, "attend_step", "attention"),
        *((pager, name, "paging") for name in ("begin", "commit", "park", "unpark") if hasattr(pager, name)),
    ]
    for owner, name, part in places:
        vars(owner)[name] = watch.timed(part, getattr(owner, name))
    vars(runner)["run"] = noted
    try:
        yield batch
    finally:
        for owner, name, _ in places:
            del vars(owner)[name]
        del vars(runner)["run"]


def require_room(items: Sequence[Item], longest: int) -> None:
    """Raise InputError for the first request that is longer than `longest` tokens, prompt and answer together."""
    for item in items:
        if item.prompt_tokens + item.output_tokens > longest:
            raise InputError(
                f"{item.kind}: {item.prompt_tokens} tokens in and {item.output_tokens} out are more than {longest}, "
                "the most of one request"
            )
