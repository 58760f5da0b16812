"""The engine: many requests at once over one pager. A step is three verbs: schedule, run, settle."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from kvpager.config import DType, PagerConfig
from kvpager.core.pager import Pager
from kvpager.engine.answers import Answers
from kvpager.engine.checks import checked
from kvpager.engine.guided import Guides
from kvpager.engine.latencies import EngineLatencies
from kvpager.engine.outputs import EngineStats, Output
from kvpager.engine.params import SamplingParams
from kvpager.engine.request import Choice, Entry, Request
from kvpager.engine.resuming import resume, retold
from kvpager.engine.room import Need, Room
from kvpager.engine.runner import Drawn, Runner
from kvpager.engine.sampler import Sampler, SampleState
from kvpager.engine.scheduler import Scheduler
from kvpager.engine.session import Session
from kvpager.engine.sessions import Sessions
from kvpager.engine.settings import EngineConfig, model_length, pager_settings, step_tokens
from kvpager.engine.telling import Teller, as_params
from kvpager.engine.text import TextState, decoder
from kvpager.errors import EngineStopped, InputError, PageLost, PoolExhausted, QueueFull, SwapError
from kvpager.hf.shape import kv_shape
from kvpager.journaled import JournalSink, Resumable
from kvpager.models import LoadedModel
from kvpager.stored import BlockStore, Erasing

__all__ = ["Engine", "EngineConfig"]

MOST_REPLAYS = 3  # times that one answer's sequence is computed anew after a page of it was lost


class Engine:
    """Serves requests with one model over one pager of its own.

    `loaded` was loaded with kvpager's attention; `pager` says how to page, `kv_dtype` how pages are held (None: the
    model's own number format), `clock` gives seconds that never go back. What is computed outlives the engine in
    `store`, which it closes; the pager's namespace then says what the model's numbers depend on. What another process
    needs to go on with its requests is told to `journal`. One thread owns an engine and its pager.

    Raises ConfigError, UnsupportedModel, CacheMismatch, or SwapError when swap can't be opened.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        pager: PagerConfig,
        config: EngineConfig | None = None,
        *,
        kv_dtype: DType | None = None,
        store: BlockStore | None = None,
        journal: JournalSink | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config or EngineConfig()
        text = loaded.model.config.get_text_config(decoder=True)
        self._vocabulary = int(text.vocab_size)
        self._decoders = {skip: decoder(loaded.tokenizer, skip) for skip in (True, False)}
        self._guides = Guides(loaded.tokenizer, self._vocabulary, loaded.end_ids)
        self._clock = clock
        self._seeds = random.Random(self.config.seed)
        shape = kv_shape(loaded.model.config, kv_dtype or loaded.dtype)
        self._store = store
        self.pager = Pager(shape, pager_settings(self.config, pager, shape), store=store)
        self.pager.populate()
        try:
            self._sessions = Sessions(self.pager, self._vocabulary)
            self._room = Room(self.pager, self.config.max_num_seqs, model_length(self.config, loaded))
            self._scheduler = Scheduler(
                self.pager,
                self._room,
                self._sessions,
                step_tokens(self.config, self.pager.config.tile),
                self.config.enable_prefix_caching,
            )
            self._runner = Runner(loaded.model, self.pager, Sampler(self._vocabulary, loaded.end_ids))
        except BaseException:
            self.pager.shutdown()
            raise
        self._answers = Answers(self.pager, self._scheduler, self._sessions, loaded.end_ids)
        self.journal = journal
        self._teller = None if journal is None else Teller(self.pager, journal)
        self._end_ids = loaded.end_ids
        self._retold: list[Output] = []  # of requests that began elsewhere, for the next step to give out
        self._numbers = self._steps = 0
        self._closed = False
        self._whole = True  # not inside a step, nor after one that was broken off

    # -- requests

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        deadline: float | None = None,
        salt: bytes = b"",
        session: str | None = None,
        client: bytes | None = b"",
    ) -> None:
        """Take a request: it waits until a step has room for it. Lower priorities are served first.

        `deadline` is a time of the engine's clock after which it ends as it is; `salt` keeps its blocks from requests
        with other salts. A `session` is a conversation of that salt: the request goes on from where the session's last
        one ended, also after a restart, and is saved when it ends, however that comes. `client` is for who answers the
        client, should the request go on elsewhere; None keeps it out of the journal, for nobody could come back to it.
        Raises InputError, RequestTooLarge for what could never run, QueueFull, SessionBusy or EngineStopped, with
        nothing changed.
        """
        if self._closed:
            raise EngineStopped("the engine was closed")
        ids = checked(request_id, prompt, params, priority, deadline, salt, self._vocabulary)
        if request_id in self._answers.requests:
            raise InputError(f"request_id: {request_id!r} is being served already")
        need = self._room.require(len(ids), params.max_tokens, params.n)
        if len(self._scheduler.waiting) >= self.config.max_queue:
            raise QueueFull(f"{len(self._scheduler.waiting)} requests wait already (max_queue); try again later")
        seed = self._seeds.getrandbits(63)
        hold = None if session is None else Session.named(salt, session, seed)
        drawn = seed if hold is None else hold.turn_seed
        request = self._request(request_id, ids, params, (priority, deadline, salt), need, hold, drawn)
        if self._teller is not None and client is not None:
            left = None if deadline is None else deadline - self._clock()
            self._teller.accept(request, self._sessions.turn(request) or drawn, left, session, client)
        self._answers.requests[request_id] = request
        self._scheduler.add(request)

    def resume(self, resumable: Resumable) -> None:
        """Take a request that began in another engine of the same model and settings, and go on as that would have.

        It holds what the store has of its blocks and the journal of its open one; what is missing is computed anew from
        its tokens, in the order in which they were. The next step gives out what its answers had come to, an output for
        each token. Its deadline begins anew; it need not queue up. Raises InputError, RequestTooLarge, SessionBusy or
        EngineStopped, with nothing changed.
        """
        if self._closed:
            raise EngineStopped("the engine was closed")
        accepted = resumable.accepted
        try:
            params = as_params(accepted.params)
        except (TypeError, ValueError) as error:
            raise InputError(f"resumable: {error}") from None
        deadline = None if accepted.seconds is None else self._clock() + accepted.seconds
        given = (accepted.priority, deadline, accepted.salt)
        ids = checked(accepted.id, accepted.prompt, params, *given, self._vocabulary)
        if accepted.id in self._answers.requests:
            raise InputError(f"resumable: {accepted.id!r} is being served already")
        need = self._room.require(len(ids), params.max_tokens, params.n)
        seed, session = accepted.seed, accepted.session
        hold = None if session is None else Session.named(accepted.salt, session, seed)
        request = self._request(accepted.id, ids, params, given, need, hold, seed)
        try:
            outputs = resume(request, resumable, self.pager.config.page_size, self._end_ids)
        except BaseException:
            if hold is not None:
                self._sessions.release(hold)
            raise
        now = self._clock()
        for choice in request.choices:
            choice.first_token = now if choice.output else None
        if self._teller is not None:
            self._teller.again(accepted, retold(request, resumable))
        self._retold += outputs
        if request.alive:
            self._sessions.turn(request)
            self._answers.requests[request.id] = request
            self._scheduler.add(request)
        elif hold is not None:
            self._sessions.release(hold)

    def _request(
        self,
        request_id: str,
        ids: list[int],
        params: SamplingParams,
        given: tuple[int, float | None, bytes],
        need: Need,
        hold: Session | None,
        seed: int,
    ) -> Request:
        """A request and its answers at their beginning; its session is claimed, and nothing else changed.

        `given` are priority, deadline and salt; `seed` is what its answers are drawn with.
        """
        priority, deadline, salt = given
        request = Request(
            request_id,
            ids,
            params,
            priority=priority,
            deadline=deadline,
            salt=salt,
            number=self._numbers,
            arrived=self._clock(),
            need=need,
        )
        decode = self._decoders[params.skip_special_tokens]
        for place in range(params.n):
            guide = None if params.json_schema is None else self._guides.guide(str(params.json_schema))
            state = SampleState(params, seed=seed, choice=place, prompt=ids, guide=guide)
            request.choices.append(Choice(request, place, state, TextState(decode, params)))
        if hold is not None:
            self._sessions.claim(hold, params)
            request.session = hold
        self._numbers += 1
        return request

    def abort(self, request_id: str) -> bool:
        """End a request now; False when there is none of that name. The next step tells it."""
        request = self._answers.requests.get(request_id)
        if request is None:
            return False
        if request.session is not None and not self._whole:
            request.session.kept = False  # after a step that was broken off, nobody knows what its pages hold
        self._answers.end(request, "abort", self._clock())
        return True

    def abandon(self) -> None:
        """Let go of all requests: another engine goes on with them. Nothing of it is told, here or to a journal."""
        self._answers.abandon(self._clock(), self._teller)
        self._retold = []

    @property
    def has_work(self) -> bool:
        """Whether a step would have something to do or to tell."""
        return bool(self._answers.requests or self._answers.outputs or self._retold)

    # -- a step

    def step(self, done: Callable[[], None] = lambda: None) -> list[Output]:
        """Run one step: what it adds to each answer, in order. Empty when idle, or when the step gave no tokens.

        With a journal, these are to be given on once `done` has been called, from whatever thread.
        """
        if self._closed:
            raise EngineStopped("the engine was closed")
        self._whole = False
        now = self._clock()
        for request in [
            one for one in self._answers.requests.values() if one.deadline is not None and one.deadline <= now
        ]:
            self._answers.end(request, "deadline", now)
        entries = self._scheduler.schedule(now)
        self._answers.retell(now)
        drawn = self._run(entries) if entries else self._stuck()
        if drawn:
            self._answers.settle(drawn, self._clock())
        if entries:
            self._answers.latencies.step.add(self._clock() - now)
        self._whole = True
        outputs = self._answers.take()
        if self._teller is not None:
            self._teller.step(self._scheduler.running, outputs, done)
        outputs, self._retold = self._retold + outputs, []
        return outputs

    def _run(self, entries: list[Entry]) -> list[Drawn]:
        """The step's new tokens; none when it failed and was rolled back."""
        try:
            drawn = self._runner.run(entries)
        except PageLost as error:
            self._replay(entries, error)
            return self._one_by_one(entries) if len(entries) > 1 else []
        except AssertionError:
            raise
        except Exception as error:
            # whose fault it was shows when each runs alone
            return self._one_by_one(entries) if len(entries) > 1 else self._failed(entries[0], error)
        self._steps += 1
        return drawn

    def _one_by_one(self, entries: list[Entry]) -> list[Drawn]:
        """After a failed step: its entries as steps of their own, as far as none of them lacks room."""
        drawn: list[Drawn] = []
        preemptions = self._scheduler.preemptions
        for entry in entries:
            if self._scheduler.preemptions > preemptions:
                break  # somebody has made room: the next step tries again
            if entry.choice.sequence is entry.sequence:  # else it has ended, or was lost
                drawn += self._run([entry])
        return drawn

    def _stuck(self) -> list[Drawn]:
        """Nothing could be scheduled: fine when nothing runs, else the last to be served has to give way."""
        running = self._scheduler.running
        if running:
            if len(running) > 1:
                self._scheduler.park(running[-1])
            else:
                self._answers.end(running[0], "error", self._clock(), "no step of it fits the pool")
        return []

    def _failed(self, entry: Entry, error: Exception) -> list[Drawn]:
        """An entry failed alone: for want of room who is to be served last makes way, else its request ends."""
        running = self._scheduler.running
        if isinstance(error, (PoolExhausted, SwapError)) and len(running) > 1:
            self._scheduler.give_up(running[-1])
        else:
            self._answers.end(entry.choice.request, "error", self._clock(), f"{type(error).__name__}: {error}")
        return []

    def _replay(self, entries: list[Entry], error: PageLost) -> None:
        """Pages were lost: the sequences that hold them are computed anew from their tokens, the others go on."""
        lost = set(error.sequences) or {entry.sequence.id for entry in entries}
        for request in list(self._scheduler.running):
            for choice in request.active:
                if choice.sequence is None or choice.sequence.id not in lost:
                    continue
                self._scheduler.lose(choice)
                if choice.replays > MOST_REPLAYS:
                    self._answers.end(
                        request, "error", self._clock(), f"pages were lost {choice.replays} times: {error}"
                    )
                    break

    # -- what is kept

    def forget_session(self, salt: bytes, name: str) -> bool:
        """Forget a session of a tenant; False where there is none. Raises InputError, or SessionBusy while it is used.

        The blocks of its text stay in the store until they make way or `erase` is called.
        """
        return self._sessions.forget(salt, name)

    def erase(self, salt: bytes) -> Erasing:
        """Forget all that a tenant has in pool and store: none of it is found from now on.

        What is returned says when the store has none of it any more, and how many blocks and sessions it had. Requests
        that run go on, and their sessions are not saved. Raises InputError without a store.
        """
        return self._sessions.erase(salt)

    # -- looking, and the end

    def stats(self) -> EngineStats:
        """Counters and sizes."""
        return EngineStats(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            preempted=len(self._scheduler.parked),
            preemptions=self._scheduler.preemptions,
            replays=self._scheduler.replays,
            steps=self._steps,
            prompt_tokens=self._answers.tokens["prompt"],
            cached_tokens=self._answers.tokens["cached"],
            completion_tokens=self._answers.tokens["completion"],
            pager=self.pager.stats(),
            finished=dict(self._answers.finished),
            sessions=self._sessions.stats(),
            store=None if self._store is None else self._store.stats(),
            recomputed=self._scheduler.recomputed,
        )

    def latencies(self) -> EngineLatencies:
        """How long things took."""
        return self._answers.latencies.look(self.pager.latencies())

    @property
    def store_states(self) -> dict[str, str]:
        """The state of each tier of the store, as in StoreStats, the nearest first; none where there is no store."""
        return {} if self._store is None else self._store.states

    def check(self) -> None:
        """Assert that the books balance: the pager's, and that requests and sequences belong together."""
        self.pager.check()
        queued = [*self._scheduler.running, *self._scheduler.waiting, *self._scheduler.parked]
        assert len({request.id for request in queued}) == len(queued), "a request stands in two queues"
        assert {request.id for request in queued} == set(self._answers.requests), (
            "a request is in no queue, or forgotten"
        )
        held = [choice.sequence for request in queued for choice in request.choices if choice.sequence is not None]
        assert len(held) == self.pager.stats().sequences, "a sequence belongs to no request"
        for request in queued:
            assert request.alive, f"{request.id} has ended and is still in a queue"
            for choice in request.choices:
                assert choice.finish_reason is None or choice.sequence is None, f"{request.id}: an ended answer's pages"
        self._whole = True

    def close(self) -> None:
        """Let go of everything; requests that run are not told, but their sessions are saved. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._whole:
                for request in self._answers.requests.values():
                    self._sessions.save(request.choices[0], "abort")
        finally:
            self.pager.shutdown()
            if self._store is not None:
                self._store.close()
