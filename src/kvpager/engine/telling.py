"""What a journal is told: each request that is taken, and after each step what every answer has gained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from kvpager.core.pager import Pager
from kvpager.core.sequence import Sequence as Held
from kvpager.core.telling import Mark
from kvpager.engine.outputs import Output, TokenLogprob
from kvpager.engine.params import SamplingParams
from kvpager.engine.request import Choice, Request
from kvpager.journaled import Accepted, Gained, JournalSink, Told

__all__ = ["Teller", "as_logprob", "as_params"]

_Key = tuple[str, int]  # a request's id, and which of its answers


class Teller:
    """Tells a journal of one engine's requests.

    Those that ask for log-probabilities of their prompt are left out: these are told with the first output alone, and
    need the whole prompt computed.
    """

    def __init__(self, pager: Pager, journal: JournalSink) -> None:
        self._pager, self._journal = pager, journal
        self._open: dict[str, int] = {}  # answers that have not ended, of the requests that the journal has
        self._marks: dict[_Key, tuple[Held, Mark]] = {}
        # blocks that nobody will go on with when a request has ended; sessions keep theirs
        self._own: dict[str, set[bytes]] = {}
        self._steps = 0

    def accept(self, request: Request, seed: int, seconds: float | None, session: str | None, client: bytes) -> None:
        """A request was taken; `seed` is what its answers are drawn with."""
        params = request.params
        if params.prompt_logprobs is not None:
            return
        self._open[request.id] = params.n
        if session is None:
            self._own[request.id] = set()
        given = (request.id, request.prompt, _told_params(params), request.priority, seconds, request.salt)
        self._journal.accept(Accepted(*given, session, seed, client))

    def again(self, accepted: Accepted, told: Sequence[Told]) -> None:
        """A request goes on that began elsewhere; `told` is all that its answers have come to, and may be known."""
        self._open[accepted.id] = sum(one.finish_reason is None for one in told)
        if accepted.session is None:
            self._own[accepted.id] = set()
        self._journal.accept(accepted)
        self._journal.step(told, _nothing)
        self._end(accepted.id)

    def forget(self) -> None:
        """Tell nothing more of the requests that there were."""
        self._open.clear()
        self._marks.clear()

    def step(self, running: Iterable[Request], outputs: list[Output], done: Callable[[], None]) -> None:
        """Tell what a step gave: its outputs, and what sequences hold more. `done` as in JournalSink.step."""
        self._steps += 1
        told = _by_answer([output for output in outputs if output.request_id in self._open])
        for key, gained in self._gained(running).items():
            told[key] = replace(told.get(key, Told(*key, (), None, None)), gained=gained)
        for key, one in told.items():
            if one.finish_reason is not None:
                self._marks.pop(key, None)
                self._open[one.id] -= 1
                self._end(one.id)
        if told:
            self._journal.step(list(told.values()), done)
        else:
            done()

    def _end(self, request_id: str) -> None:
        """Forget a request once all its answers have ended, with the blocks that were its own."""
        if not self._open[request_id]:
            del self._open[request_id]
            own = self._own.pop(request_id, None)
            if own:
                self._pager.drop(own)

    def _gained(self, running: Iterable[Request]) -> dict[_Key, Gained]:
        """What the sequences of running requests have gained, by answer."""
        grown: dict[_Key, Choice] = {}
        for request in running:
            if request.id not in self._open:
                continue
            for choice in request.active:
                sequence, key = choice.sequence, (request.id, choice.index)
                if sequence is None:
                    continue
                if key not in self._marks or self._marks[key][0] is not sequence:
                    self._marks[key] = sequence, Mark()
                if sequence.length != self._marks[key][1].length:
                    grown[key] = choice
        marked = [self._marks[key] for key in grown]
        fresh = [not mark.length for _, mark in marked]
        scores = self._steps % max(1, self._journal.scores_every) == 0
        found: dict[_Key, Gained] = {}
        for (key, choice), new, gained in zip(grown.items(), fresh, self._pager.tell(marked, scores), strict=True):
            if gained is None:
                continue
            request = choice.request
            if request.id in self._own:
                own = self._marks[key][1].own
                self._own[request.id] |= own
                own.clear()
            singles = request.schedule.until(len(request.prompt)) if new else ()
            found[key] = replace(gained, singles=singles) if singles else gained
        return found


def _nothing() -> None:
    pass


def _by_answer(outputs: list[Output]) -> dict[_Key, Told]:
    """Outputs as a journal is told of them, joined by answer."""
    told: dict[_Key, Told] = {}
    for output in outputs:
        key = (output.request_id, output.index)
        before = told.get(key)
        tokens = output.token_ids if before is None else (*before.tokens, *output.token_ids)
        logprobs: list[Mapping[str, Any]] | None = None
        if output.logprobs is not None:
            logprobs = [asdict(one) for one in output.logprobs]
        if before is not None and before.logprobs is not None:
            logprobs = [*before.logprobs, *(logprobs or [])]
        usage = None if output.usage is None else asdict(output.usage)
        end = output.finish_reason
        told[key] = Told(*key, tokens, logprobs, None, end, output.stop_reason, output.error, usage)
    return told


def _told_params(params: SamplingParams) -> dict[str, Any]:
    """The parameters that differ from their defaults, as JSON can hold them."""
    told = {one.name: getattr(params, one.name) for one in fields(params)}
    told = {name: value for name, value in told.items() if value != getattr(_DEFAULTS, name)}
    if params.logit_bias is not None:
        told["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in told.items()}


_DEFAULTS = SamplingParams()


def as_params(told: Mapping[str, Any]) -> SamplingParams:
    """The parameters that a journal was told of. Raises InputError, or TypeError for names that are none."""
    given = dict(told)
    if given.get("logit_bias") is not None:
        given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"].items()}
    return SamplingParams(**given)


def as_logprob(told: Mapping[str, Any]) -> TokenLogprob:
    """A token's log-probability that a journal was told of."""
    return TokenLogprob(told["token_id"], told["logprob"], tuple((token, one) for token, one in told["top"]))
