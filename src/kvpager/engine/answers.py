"""Answers as they grow: each token's text, when an answer ends, and what is to be told about it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from kvpager.core.pager import Pager
from kvpager.engine.latencies import Latencies
from kvpager.engine.outputs import FinishReason, Output, TokenLogprob
from kvpager.engine.request import Choice, Request
from kvpager.engine.runner import Drawn
from kvpager.engine.sampler import Sampled
from kvpager.engine.scheduler import Scheduler
from kvpager.engine.sessions import Sessions
from kvpager.engine.telling import Teller
from kvpager.errors import KVPagerError, SampleError

__all__ = ["Answers"]


class Answers:
    """The requests that an engine has and their answers; `end_ids` are tokens that end one.

    requests   by id, until they have ended
    outputs    that the next step gives out
    finished   ended requests by how they ended; tokens: of them, by kind
    latencies  how long they waited for what
    """

    def __init__(self, pager: Pager, scheduler: Scheduler, sessions: Sessions, end_ids: frozenset[int]) -> None:
        self._pager, self._scheduler, self._sessions, self._end_ids = pager, scheduler, sessions, end_ids
        self.requests: dict[str, Request] = {}
        self.outputs: list[Output] = []
        self.finished: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.latencies = Latencies()

    def retell(self, now: float) -> None:
        """Tell what answers that go on had come to when they were cut short."""
        for choice, piece in self._sessions.retold():
            choice.first_token = choice.last_token = now
            self.tokens["completion"] += len(choice.output)
            self.outputs.append(self._output(choice, piece, tuple(choice.output), None))

    def settle(self, drawn: list[Drawn], now: float) -> None:
        """Give each choice its token, end those that are done, and let the answers to one prompt part."""
        for choice, sampled in drawn:
            if isinstance(sampled, SampleError):
                self._finish(choice, "error", now, error=str(sampled))
            else:
                self._extend(choice, sampled, now)
        for request in {choice.request.id: choice.request for choice, _ in drawn}.values():
            if not request.forked:
                self._fork(request)
            if not request.alive:
                self._forget(request)

    def end(self, request: Request, reason: FinishReason, now: float, error: str | None = None) -> None:
        """End all answers of a request that have not ended."""
        for choice in request.alive:
            self._finish(choice, reason, now, error=error)
        self._forget(request)

    def abandon(self, now: float, teller: Teller | None) -> None:
        """End all requests; neither that nor their sessions are kept, and `teller` has nothing to tell of them."""
        for request in list(self.requests.values()):
            if request.session is not None:
                request.session.kept = False
            self.end(request, "abort", now)
        self.outputs.clear()
        if teller is not None:
            teller.forget()

    def take(self) -> list[Output]:
        """What is to be given out now."""
        outputs, self.outputs = self.outputs, []
        return outputs

    def _extend(self, choice: Choice, sampled: Sampled, now: float) -> None:
        """A choice takes a token: its text, and whether it ends."""
        request, params, token = choice.request, choice.request.params, sampled.token
        try:
            choice.state.accept(token)
        except SampleError as error:
            self._finish(choice, "error", now, error=str(error))
            return
        choice.output.append(token)
        if choice.first_token is None:
            choice.first_token = now
            self.latencies.first_token.add(now - request.arrived)
        else:
            self.latencies.between_tokens.add(now - choice.last_token)
        choice.last_token = now
        self.tokens["completion"] += 1
        reason: FinishReason | None = None
        stop: str | int | None = None
        piece = ""
        if token in self._end_ids and not params.ignore_eos:
            reason = "stop"
        elif token in params.stop_token_ids:
            reason, stop = "stop", token
        else:
            piece = choice.text.push(token)
            if choice.text.stopped:
                reason, stop = "stop", choice.text.stop_reason
            elif choice.state.finished:
                reason = "stop"
            elif choice.known >= request.need.length:
                reason = "length"
        logprobs = None
        if sampled.logprob is not None:
            logprobs = (TokenLogprob(token, sampled.logprob, tuple(sampled.top)),)
        if reason is None:
            self.outputs.append(self._output(choice, piece, (token,), logprobs))
        else:
            self._finish(choice, reason, now, stop, piece, (token,), logprobs)

    def _output(
        self, choice: Choice, text: str, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...] | None
    ) -> Output:
        told = None
        request = choice.request
        if choice.index == 0 and request.params.prompt_logprobs is not None and not request.told:
            request.told = True
            told = tuple(request.prompt_logprobs)
        return Output(request.id, choice.index, text, tokens, logprobs, told)

    def _finish(
        self,
        choice: Choice,
        reason: FinishReason,
        now: float,
        stop: str | int | None = None,
        piece: str = "",
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] | None = None,
        error: str | None = None,
    ) -> None:
        """End one answer: what was held back of its text is let go, and its sequence closed unless others need it."""
        request = choice.request
        piece += choice.text.finish()
        if choice.text.stopped and reason == "length":
            reason, stop = "stop", choice.text.stop_reason
        choice.finish_reason = reason
        if request.forked:
            self._sessions.save(choice, reason)
            self._scheduler.close(choice)
        output = self._output(choice, piece, tokens, logprobs)
        usage = request.usage(choice, now)
        self.latencies.ended(usage)
        self.outputs.append(replace(output, finish_reason=reason, stop_reason=stop, usage=usage, error=error))

    def _fork(self, request: Request) -> None:
        """The prompt is done and each answer has its first token: give each that goes on a sequence of its own."""
        request.forked = True
        first = request.choices[0]
        sequence, first.sequence = first.sequence, None
        assert sequence is not None
        alive = request.alive
        for choice in alive[1:]:
            try:
                choice.sequence = self._pager.fork(sequence)
            except KVPagerError:
                continue  # it is computed anew from its tokens, as after a loss
            choice.cost = choice.sequence.cost
        if alive:
            alive[0].sequence, alive[0].cost = sequence, sequence.cost
        else:
            self._pager.close(sequence)

    def _forget(self, request: Request) -> None:
        self._scheduler.remove(request)
        if request.session is not None:
            self._sessions.release(request.session)
        del self.requests[request.id]
        self.tokens["prompt"] += len(request.prompt)
        self.tokens["cached"] += request.cached_tokens
        reasons = [choice.finish_reason or "error" for choice in request.choices]
        self.finished[next((reason for reason in reasons if reason not in ("stop", "length")), reasons[0])] += 1
