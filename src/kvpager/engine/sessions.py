"""The sessions of an engine: one writer at a time, begun from a record, saved when the request ends.

What a request leaves is its sequence, the order in which that was computed, and, where it was cut short, its answer so
far. The session's next request begins with the longest part that its prompt goes on from. If it is the request that was
cut short, sent again, the answer goes on as if nothing had happened.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict

from kvpager.core.blocks import tenant
from kvpager.core.pager import Pager
from kvpager.core.saving import SavedSequence
from kvpager.core.sequence import Sequence
from kvpager.core.state import approximate_settings
from kvpager.engine.outputs import FinishReason, SessionStats
from kvpager.engine.params import SamplingParams
from kvpager.engine.request import Choice, Request
from kvpager.engine.sampler import Guide, SampleState
from kvpager.engine.schedule import Schedule
from kvpager.engine.session import Session, session_key
from kvpager.engine.session_record import SessionRecord
from kvpager.errors import InputError, KVPagerError, PageLost, PoolExhausted, SampleError, SessionBusy, SwapError
from kvpager.stored import BlockStore, Erasing

__all__ = ["Sessions"]

CUT_SHORT: tuple[FinishReason, ...] = ("abort", "deadline")


class Sessions:
    """The sessions of one engine, over the pager's store; without one there are none."""

    def __init__(self, pager: Pager, vocabulary: int) -> None:
        self._pager, self._vocabulary = pager, vocabulary
        self._held: dict[bytes, Session] = {}
        self._retold: list[tuple[Choice, str]] = []
        self._resumed = self._saved = self._lost = 0

    # -- one writer each

    def claim(self, session: Session, params: SamplingParams) -> None:
        """Become the session's writer, until `release`.

        Raises InputError for a request that can't be of a session, and SessionBusy while another one uses it.
        """
        store = self._store()
        if params.n > 1:
            raise InputError(f"session: it goes on with one answer, and n is {params.n}")
        if params.prompt_logprobs is not None:
            raise InputError("session: log-probabilities of the prompt need all of it computed; ask without a session")
        self._take(session.key, store)
        self._held[session.key] = session

    def release(self, session: Session) -> None:
        """Let others write."""
        if self._held.pop(session.key, None) is not None:
            self._store().release(session.key)

    def _take(self, key: bytes, store: BlockStore) -> None:
        if key in self._held or not store.claim(key):
            raise SessionBusy("session: another request is using it; send this one when that has ended")

    def _store(self) -> BlockStore:
        store = self._pager.store
        if store is None:
            raise InputError("session: there is no store to keep sessions in; start with one (--store PATH)")
        return store

    # -- going on

    def look(self, session: Session) -> SessionRecord | None:
        """The record that a request will go on from, if there is one."""
        if not session.looked:
            session.looked = True
            data = self._store().load_record(session.key)
            if data is not None:
                session.record = SessionRecord.unpack(data, session.secret, self._vocabulary)
            self._lost += data is not None and session.record is None
        return session.record

    def resume(self, request: Request) -> Sequence | None:
        """Begin a request where its session was left: a sequence that holds the beginning of its prompt.

        None where nothing can be gone on from, and for a request without a session.
        """
        session = request.session
        record = None if session is None else self.look(session)
        if session is None or record is None:
            return None
        session.record = None
        choice = request.choices[0]
        again = self._follow(request, session, record)
        choice.state = _drawing(request, session, choice.state.guide)
        state = self._after(request, session, record.output) if again else None
        said = [] if state is None else record.output
        try:
            sequence = self._pager.restore(record.sequence, [*request.prompt, *said], request.salt)
        except (PoolExhausted, PageLost, SwapError):
            sequence = None
        else:
            if sequence is None:  # another model's, so what it said is, too
                self._lost += 1
                return None
        if state is not None:
            choice.state, choice.output = state, list(said)
            self._retold.append((choice, "".join([choice.text.push(token) for token in said])))
        if sequence is None or not sequence.length:
            self._lost += 1
            if sequence is not None:
                self._pager.close(sequence)
            return None
        self._resumed += 1
        length = sequence.length
        past = [(start, min(stop, length)) for start, stop in record.singles if start <= length]
        request.schedule = Schedule(len(request.prompt), past)
        return sequence

    def _follow(self, request: Request, session: Session, record: SessionRecord) -> bool:
        """Take the turn that comes after a record; whether it is the record's own, which was cut short."""
        again = bool(record.cut_short) and record.cut_short == self._mark(request)
        session.seed, session.turn = record.seed, record.turn + (not again)
        return again

    def turn(self, request: Request) -> int | None:
        """The seed of a request's turn in its session, as `resume` will find it; None without a session."""
        session = request.session
        if session is None:
            return None
        if (record := self.look(session)) is not None:
            self._follow(request, session, record)
        return session.turn_seed

    @staticmethod
    def _after(request: Request, session: Session, output: list[int]) -> SampleState | None:
        """How an answer's draws go on after these tokens.

        None where it is written anew, from the same seed: log-probabilities of its tokens, which nobody has kept, are
        asked for, it would be too long now, or its grammar is read otherwise than it was.
        """
        if not output or request.params.logprobs is not None:
            return None
        if len(request.prompt) + len(output) >= request.need.length:
            return None
        guide = request.choices[0].state.guide
        state = _drawing(request, session, None if guide is None else guide.copy())
        try:
            for token in output:
                state.accept(token)
        except SampleError:
            return None
        return state

    def retold(self) -> list[tuple[Choice, str]]:
        """Answers that have begun with tokens which were drawn before, and their text; each once."""
        retold, self._retold = self._retold, []
        return retold

    # -- saving

    def save(self, choice: Choice, reason: FinishReason) -> None:
        """Save an answer's sequence as it is when it ends, unless that was by an error: then the last record stays."""
        session, sequence, request = choice.request.session, choice.sequence, choice.request
        if session is None or not session.kept or sequence is None or not sequence.length or reason == "error":
            return
        cut_short = reason in CUT_SHORT
        try:
            saved = self._pager.save(sequence)
            done = saved is not None and self._store().save_record(
                session.key, session.tenant, self._record(request, session, saved, cut_short).pack(session.secret)
            )
        except KVPagerError:
            done = False
        self._saved += done
        self._lost += not done

    def _record(self, request: Request, session: Session, saved: SavedSequence, cut_short: bool) -> SessionRecord:
        length = len(saved.tokens)
        return SessionRecord(
            saved,
            request.schedule.until(length),
            session.seed,
            session.turn,
            self._mark(request) if cut_short else "",
            request.choices[0].output if cut_short else [],
        )

    def _mark(self, request: Request) -> str:
        """What tells a request from others: its prompt, its parameters, and how much attention is kept."""
        told = [request.prompt, asdict(request.params), approximate_settings(self._pager.config)]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()

    # -- forgetting

    def forget(self, salt: bytes, name: str) -> bool:
        """Drop a session's record; False where there is none. Raises InputError, or SessionBusy while it is used."""
        store = self._store()
        key = session_key(salt, name)
        self._take(key, store)
        try:
            there = store.load_record(key) is not None
            store.drop_record(key)
        finally:
            store.release(key)
        return there

    def erase(self, salt: bytes) -> Erasing:
        """Forget all blocks and sessions of a tenant, here and in the store: none is found from now on.

        Requests that run go on, and their sessions are not saved. Raises InputError without a store.
        """
        store, whose = self._store(), tenant(salt)
        for session in self._held.values():
            session.kept = session.kept and session.tenant != whose
        self._pager.forget(salt)
        return store.erase(whose)

    def stats(self) -> SessionStats:
        """Counters."""
        return SessionStats(len(self._held), self._resumed, self._saved, self._lost)


def _drawing(request: Request, session: Session, guide: Guide | None) -> SampleState:
    """The draws of a turn, from its answer's beginning."""
    return SampleState(request.params, seed=session.turn_seed, prompt=request.prompt, guide=guide)
