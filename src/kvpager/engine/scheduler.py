"""Who gets how many tokens in the next step: decodes first, then prompts in whole tiles, first come first served."""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterator

import numpy as np

from kvpager.core.pager import Pager
from kvpager.core.sequence import Sequence
from kvpager.engine.request import Choice, Entry, Request
from kvpager.engine.room import Room
from kvpager.engine.sessions import Sessions
from kvpager.errors import ConfigError, PageLost, PoolExhausted, SwapError

__all__ = ["Scheduler"]


class Scheduler:
    """The queues of an engine, and the choice of each step's entries.

    waiting, running, parked   requests, those to be served first in front
    preemptions, replays       how often a request gave up its frames, and a sequence is computed anew
    recomputed                 tokens of requests that began elsewhere that have to be computed again
    """

    def __init__(self, pager: Pager, room: Room, sessions: Sessions, max_num_batched_tokens: int, share: bool) -> None:
        self._pager, self._room, self._sessions = pager, room, sessions
        self._budget = max_num_batched_tokens
        self._tile, self._page = pager.config.tile, pager.config.page_size
        self._share = share and pager.config.mode == "recall"
        # without a budget, tiles of one and tiles of many select the same: everything
        self._selects = pager.config.budget is not None
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.parked: list[Request] = []
        self.preemptions = self.replays = self.recomputed = 0
        self._ended = 0

    # -- the queues

    def add(self, request: Request) -> None:
        """Let a new request wait for its turn; meanwhile the store reads ahead what it will want."""
        insort(self.waiting, request, key=lambda one: one.key)
        if self._share and self.running:
            self._pager.prefetch(request.prompt, request.salt)

    def remove(self, request: Request) -> None:
        """Forget a request, wherever it is, and close its sequences."""
        for queue in (self.running, self.waiting, self.parked):
            if request in queue:
                queue.remove(request)
        for choice in request.choices:
            self.close(choice)
        self._ended += 1

    def close(self, choice: Choice) -> None:
        """Let go of a choice's sequence, if it has one."""
        sequence, choice.sequence = choice.sequence, None
        if sequence is not None and not sequence.closed:
            self._pager.close(sequence)

    def lose(self, choice: Choice) -> None:
        """Let go of a running choice's sequence: it is computed anew from its tokens."""
        self.close(choice)
        choice.replays += 1
        self.replays += 1

    def park(self, request: Request) -> None:
        """A running request gives up its frames; it goes on where it was, before others of its priority."""
        for choice in request.active:
            if choice.sequence is not None:
                try:
                    self._pager.park(choice.sequence)
                except (ConfigError, SwapError):  # discard mode, or nothing can be written
                    self.lose(choice)
        self._set_aside(request)

    def give_up(self, request: Request) -> None:
        """As swap fails, a running request gives up its pages too, until another one has ended or none is left."""
        for choice in request.active:
            self.lose(choice)
        request.patience = self._ended
        self._set_aside(request)

    def _set_aside(self, request: Request) -> None:
        self.running.remove(request)
        request.preemptions += 1
        self.preemptions += 1
        insort(self.parked, request, key=lambda one: one.key)

    def _fits(self, request: Request, running: list[Request], parked: list[Request]) -> bool:
        kept = [one.need for one in parked if one is not request]
        return self._room.fits(request.need, [one.need for one in running], kept)

    # -- a step

    def schedule(self, now: float) -> list[Entry]:
        """The next step's entries; none when nothing can run."""
        self._make_way()
        self._resume()
        entries, left = self._decodes()
        entries += self._prefills(left, now)
        return self._fit(entries)

    def _make_way(self) -> None:
        """Park running requests of lower priority for the first that waits, where that makes room for it."""
        first = self.waiting[0] if self.waiting else None
        if first is None or self._fits(first, self.running, self.parked):
            return
        victims: list[Request] = []
        for request in reversed(self.running):
            if request.priority <= first.priority:
                return
            victims.append(request)
            rest = self.running[: -len(victims)]
            if self._fits(first, rest, [*self.parked, *victims]):
                for victim in victims:
                    self.park(victim)
                return

    def _resume(self) -> None:
        """Let parked requests go on in order, unless one of higher priority waits that they leave room for."""
        while self.parked:
            first = self.parked[0]
            ahead = self.waiting[0] if self.waiting and self.waiting[0].priority < first.priority else None
            # what parked requests hold in swap may be what it waits for: then only their end helps it
            if ahead is not None and self._fits(ahead, [], self.parked):
                return
            if self.running and (first.patience == self._ended or not self._fits(first, self.running, self.parked)):
                return
            self.parked.pop(0)
            for choice in first.active:
                self._unpark(choice)
            insort(self.running, first, key=lambda one: one.key)

    def _unpark(self, choice: Choice) -> None:
        if choice.sequence is not None:
            try:
                self._pager.unpark(choice.sequence)
            except (PageLost, PoolExhausted, SwapError):
                self.lose(choice)

    def _decodes(self) -> tuple[list[Entry], int]:
        """A token for every sequence whose prompt is done, and what is left of the budget."""
        ready = [choice for request in self.running for choice in request.active if self._single(choice)]
        entries = [self._entry(choice, choice.length + 1) for choice in ready[: self._budget]]
        return entries, self._budget - len(entries)

    def _single(self, choice: Choice) -> bool:
        """Whether a choice goes on by one token: as it decodes, or as it did before its pages were lost."""
        exactly = self._selects or choice.request.resumed
        return choice.decodes or (
            exactly and choice.length < choice.known and choice.request.schedule.single(choice.length)
        )

    def _prefills(self, left: int, now: float) -> list[Entry]:
        """Chunks of whole tiles, up to `left` tokens; requests that wait are started as far as there is room."""
        entries: list[Entry] = []
        full = False
        for request in self._in_order():
            if left < 1:
                break
            begins = request.started is None
            if begins:
                # those that are parked were there before
                full = full or any(one.priority <= request.priority for one in self.parked[:1])
                full = full or not self._fits(request, self.running, self.parked)
                if full or self._awaits(request) or (left < self._tile and left < len(request.prompt)):
                    continue
                self._start(request, now)
            for choice in request.active:
                single = self._single(choice)
                if single and (not begins or left < 1):
                    continue  # it has had its turn, or has it in the next step
                if choice.sequence is None:
                    self._open(choice)
                stop = choice.length + 1 if single else self._stop(choice, left)
                if stop > choice.length:
                    entries.append(self._entry(choice, stop))
                    left -= entries[-1].tokens
        return entries

    def _in_order(self) -> Iterator[Request]:
        """Running requests with more than a token to compute and waiting ones, those to be served first in front."""
        behind = [request for request in self.running if not all(self._single(choice) for choice in request.active)]
        return heapq.merge(behind, list(self.waiting), key=lambda one: one.key)

    def _stop(self, choice: Choice, left: int) -> int:
        """Where a chunk of at most `left` tokens ends: where its schedule cuts it, else at the end of a tile."""
        start = choice.length
        end = min(choice.request.schedule.cut(start), choice.known)
        return end if end - start <= left else max(start, (start + left) // self._tile * self._tile)

    def _entry(self, choice: Choice, stop: int) -> Entry:
        assert choice.sequence is not None
        return Entry(choice, choice.sequence, choice.sequence.length, stop, stop == choice.known)

    def _start(self, request: Request, now: float) -> None:
        self.waiting.remove(request)
        request.started, request.leader = now, None
        insort(self.running, request, key=lambda one: one.key)
        first = request.active[0]
        self._open(first, None if request.resumed else self._sessions.resume(request))
        request.cached_tokens = min(first.length, len(request.prompt))
        if request.resumed:
            for choice in request.active[1:]:
                self._open(choice)
            self.recomputed += sum(choice.known - 1 - choice.length for choice in request.active)

    def _open(self, choice: Choice, resumed: Sequence | None = None) -> None:
        """Give a choice a sequence: its session's, or what it had elsewhere, or what others have of its prompt."""
        request = choice.request
        # the prompt's log-probabilities need all of its logits, hence all of it computed
        shares = self._share and request.params.prompt_logprobs is None
        # others compute a prompt in whole tiles: under a budget that is another one from an earlier answer on
        shared = request.prompt[: request.schedule.first] if self._selects else request.prompt
        resumed = resumed or self._restored(choice)
        choice.sequence = resumed or self._pager.open(shared if shares else None, request.salt)
        choice.sequence.cost.add(choice.cost)
        choice.cost = choice.sequence.cost

    def _restored(self, choice: Choice) -> Sequence | None:
        """The sequence that a choice had in another engine, as far as the store has its blocks."""
        saved, choice.saved = choice.saved, None
        if saved is None:
            return None
        try:
            sequence = self._pager.restore(saved, choice.tokens(0, choice.known), choice.request.salt)
        except (PageLost, PoolExhausted, SwapError):
            return None
        if sequence is None or sequence.length:
            return sequence
        self._pager.close(sequence)
        return None

    # -- waiting for a prefix that another request computes

    def _awaits(self, request: Request) -> bool:
        """Whether a request should wait: another one is computing more of its prompt than can be shared yet.

        It waits for one other at most, once, and only while that one runs: so it always gets its turn.
        """
        if not self._share or request.resumed or request.params.prompt_logprobs is not None:
            return False
        if request.session is not None and self._sessions.look(request.session) is not None:
            return False
        if request.leader is None and not request.has_waited:
            request.leader, request.shared = self._leader(request)
            request.has_waited = request.leader is not None
        leader = request.leader
        if leader is not None and (leader not in self.running or leader.choices[0].length >= request.shared):
            request.leader = leader = None
        return leader is not None

    def _leader(self, request: Request) -> tuple[Request | None, int]:
        """The running request that computes the longest prefix of this one's prompt, beyond what it has done."""
        best, most = None, 0
        for other in self.running:
            if not other.prefills or other.salt != request.salt:
                continue
            shared = self._common(request, other)
            if shared > max(most, other.choices[0].length):
                best, most = other, shared
        return best, most

    def _common(self, request: Request, other: Request) -> int:
        """Tokens at the beginning of both prompts that can be shared: whole blocks, at least one token left out."""
        ours, theirs = request.prompt_array, other.prompt_array
        length = min(len(ours), other.schedule.first if self._selects else len(theirs))
        different = np.flatnonzero(ours[:length] != theirs[:length])
        same = min(int(different[0]) if different.size else length, len(ours) - 1)
        unit = self._tile if self._selects else self._page
        return same // unit * unit

    # -- what the pool allows

    def _fit(self, entries: list[Entry]) -> list[Entry]:
        """Leave out, from the end, what this step has no frames for; it comes first in the next one."""
        out: list[Entry] = []
        if any(entry.choice.skipped for entry in entries):
            entries.sort(key=lambda entry: -entry.choice.skipped)
        while entries and self._frames(entries) > self._pager.frames:
            last = entries.pop()
            tiles = last.tokens // self._tile
            if tiles > 1:
                # in discard mode a chunk needs frames of its own
                stop = (last.start + (tiles // 2) * self._tile) // self._tile * self._tile
                entries.append(last._replace(stop=stop, sample=False))
            else:
                out.append(last)
        for entry in entries:
            entry.choice.skipped = 0
        for entry in out:
            entry.choice.skipped += 1
        return entries

    def _frames(self, entries: list[Entry]) -> int:
        return self._pager.step_frames({entry.sequence: entry.tokens for entry in entries})
