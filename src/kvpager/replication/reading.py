"""What a mirror makes of entries: requests that grow, each as long as no part of it is missing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from kvpager.journaled import Resumable
from kvpager.replication.book import Held, Misfit
from kvpager.replication.entries import Began, Broken, Entry, Gone, Grew, Part, Taken, Whole
from kvpager.replication.limits import Limits

__all__ = ["Reading"]

log = logging.getLogger(__name__)


class Reading:
    """Requests by id, as far as entries and requests in full have told. Not safe from several threads.

    gone    ids of requests that went on without the journal, the oldest first
    broken  requests that were dropped because what was told of them made no sense, or was not all there
    """

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self.requests: dict[str, Held] = {}
        self.gone: dict[str, None] = {}
        self.broken = 0
        self._limits, self._clock = limits, clock
        self._ended: dict[str, float] = {}
        self._dropped: set[str] = set()  # of which nothing more is known until they are told in full

    def resumables(self) -> dict[str, Resumable]:
        """All of them, as copies."""
        return {id: held.resumable() for id, held in self.requests.items()}

    def restart(self, whole: Mapping[bytes, Held | None]) -> None:
        """Know these requests, which were written in full, and no others."""
        ended, self._ended = self._ended, {}
        self.requests.clear()
        self._dropped.clear()
        for held in whole.values():
            if held is None:
                self.broken += 1
            elif len(self.requests) < self._limits.requests:
                self._put(held)
        self._ended.update({id: when for id, when in ended.items() if id in self._ended})

    def wants(self, number: int, entry: Entry) -> list[str]:
        """Requests that have to be read in full for this entry: those that parts of it don't go on from."""
        wanted: dict[str, None] = {}
        settled: set[str] = set()
        for part in entry.parts:
            if isinstance(part, Taken):
                settled.add(part.id)
            elif isinstance(part, Grew) and part.id not in settled:
                settled.add(part.id)
                if part.id not in self._dropped and self._fit(part, number, entry.beginning) == "gap":
                    wanted[part.id] = None
            elif isinstance(part, Whole) and self._incomplete(part.id, entry.beginning):
                wanted[part.id] = None
        return list(wanted)

    def take(self, number: int, entry: Entry, fetched: Mapping[str, Held | None]) -> None:
        """Take an entry's parts, with the requests that it wants."""
        fits: dict[str, str] = {}
        for part in entry.parts:
            if isinstance(part, Grew):
                if part.id not in fits:
                    fits[part.id] = self._decide(part, number, entry.beginning, fetched.get(part.id))
                if fits[part.id] == "next" and not self._grow(part, number):
                    fits[part.id] = "dropped"
            elif isinstance(part, Taken):
                fits[part.id] = self._begin(part, number, entry.beginning)
            else:
                self._other(part, entry.beginning, fetched)

    def fade(self) -> None:
        """Forget requests that have ended long enough ago."""
        old = self._clock() - self._limits.ended_s
        for id in [id for id, when in self._ended.items() if when <= old]:
            self._forget(id)

    # -- parts

    def _fit(self, part: Grew, number: int, beginning: str) -> str:
        """Whether a part is the "next" of its request, is "known" already, or there is a "gap" before it."""
        held = self.requests.get(part.id)
        return "gap" if held is None else _fit(held, part, number, beginning)

    def _decide(self, part: Grew, number: int, beginning: str, fetched: Held | None) -> str:
        if part.id in self._dropped:
            return "dropped"
        fit = self._fit(part, number, beginning)
        if fit == "gap" and fetched is not None and fetched.accepted.id == part.id:
            fit = _fit(fetched, part, number, beginning)
            if fit != "gap":
                self._put(fetched)
        if fit == "gap":
            self._drop(part.id, "something of it is missing")
        return fit

    def _grow(self, part: Grew, number: int) -> bool:
        held = self.requests[part.id]
        try:
            held.tell(part.told, part.at, part.spoiled)
        except Misfit as error:
            self._drop(part.id, str(error))
            return False
        held.last = number
        if any(len(answer.tokens) > self._limits.tokens for answer in held.answers):
            self._drop(part.id, "too many tokens")
            return False
        if held.ended:
            self._ended[part.id] = self._clock()
        return True

    def _begin(self, part: Taken, number: int, beginning: str) -> str:
        held = self.requests.get(part.id)
        if held is not None and held.beginning == beginning and held.last >= number:
            return "known"
        self._forget(part.id)
        try:
            if len(self.requests) >= self._limits.requests:
                raise Misfit("too many requests")
            self._put(Held(part.accepted, part.page, beginning, number))
        except Misfit as error:
            self._drop(part.id, str(error))
            return "dropped"
        return "next"

    def _other(self, part: Part, beginning: str, fetched: Mapping[str, Held | None]) -> None:
        if isinstance(part, Whole):
            whole = fetched.get(part.id)
            if whole is not None and whole.accepted.id == part.id and whole.beginning == beginning:
                held = self.requests.get(part.id)
                if held is None or held.beginning != beginning or held.last <= whole.last:
                    self._put(whole)
        elif isinstance(part, Gone):
            self._forget(part.id)
            self.gone[part.id] = None
            while len(self.gone) > self._limits.ended_entries:
                del self.gone[next(iter(self.gone))]
        elif isinstance(part, Broken):
            self._drop(part.id, part.why)
        elif isinstance(part, Began) and part.done:
            for id in [id for id, held in self.requests.items() if held.beginning != beginning]:
                self._forget(id)

    # -- requests

    def _incomplete(self, id: str, beginning: str) -> bool:
        held = self.requests.get(id)
        if held is None or held.beginning != beginning:
            return True
        return any(answer.header is None and answer.end is None for answer in held.answers)

    def _put(self, held: Held) -> None:
        id = held.accepted.id
        self.requests[id] = held
        self._dropped.discard(id)
        self.gone.pop(id, None)
        self._ended.pop(id, None)
        if held.ended:
            self._ended[id] = self._clock()

    def _forget(self, id: str) -> None:
        self.requests.pop(id, None)
        self._ended.pop(id, None)
        self._dropped.discard(id)

    def _drop(self, id: str, why: str) -> None:
        log.warning("mirror: a request can't be followed any more (%s)", why)
        self._forget(id)
        self._dropped.add(id)
        self.broken += 1
        while len(self._dropped) > self._limits.requests:
            self._dropped.pop()


def _fit(held: Held, part: Grew, number: int, beginning: str) -> str:
    if held.beginning != beginning:
        return "gap"
    if number <= held.last:
        return "known"
    return "next" if part.before == held.last else "gap"
