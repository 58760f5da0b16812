"""Writes the journal: one thread that knows every request in full, as a mirror does, and sends entry after entry.

What it does not know to have arrived it sends again; an entry has a number, and Redis takes each once. After a time
without Redis, and with every new epoch, the journal begins anew: all that it holds is written in full.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvpager.journaled import Accepted, Resumable, Told
from kvpager.replication.book import Held, Misfit
from kvpager.replication.entries import EntryWriter
from kvpager.replication.lease import Lease
from kvpager.replication.limits import Limits
from kvpager.replication.link import Connect, Link, Refused, Unreachable, read_replicas
from kvpager.replication.record import pack_request
from kvpager.replication.scripts import APPEND, append_sum
from kvpager.replication.stretch import Stretch
from kvpager.replication.waiting import Item, Waiting

__all__ = ["Writer"]

log = logging.getLogger(__name__)

WAIT_SLICE_MS = 100  # a replica that is gone is noticed after so long


@dataclass(frozen=True)
class Command:
    """An entry as it is sent: its id, the script's arguments, requests in full with it, and requests that it drops."""

    id: str
    arguments: list[Any]
    whole: list[str]
    dropped: list[str]


class Writer:
    """The journal's thread. requests: by id, running and ended; ended: when, by id, the first to end first.

    entries, bytes, wholes, beginnings, replicas  figures, read by others
    """

    def __init__(
        self, connect: Connect, lease: Lease, page: int, waiting: Waiting, limits: Limits, clock: Callable[[], float]
    ) -> None:
        self._lease, self._page, self._waiting, self._limits, self._clock = lease, page, waiting, limits, clock
        keys = lease.keys
        self._keys = (keys.lease, keys.tail, keys.stream, keys.requests)
        self._link = Link(connect, keys.stream)
        self.requests: dict[str, Held] = {}
        self.ended: OrderedDict[str, float] = OrderedDict()
        self._adopted: set[str] = set()  # that an engine has not gone on with yet
        self._again: dict[str, Accepted] = {}  # that it has, and tells next
        self._gone: set[str] = set()  # that is to be told
        self._stretch = Stretch(limits)
        self._anew = True
        self._pause, self._next_try, self._next_look = limits.retry_s, 0.0, 0.0
        self.entries = self.bytes = self.wholes = self.beginnings = self.replicas = 0
        self._thread = threading.Thread(target=self._run, name="kvpager-journal", daemon=True)

    def adopt(self, known: Mapping[str, Resumable]) -> None:
        """Take over what a mirror knows; before `start`."""
        now = self._clock()
        for id, request in known.items():
            try:
                held = self.requests[id] = Held.of(request, self._page)
            except (Misfit, ValueError):
                continue
            self._adopted.add(id)
            if held.ended:
                self.ended[id] = now
        self._waiting.know(self.requests)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def join(self) -> None:
        """Wait for the thread to end; it hangs where Redis does, and is left to itself then."""
        if self._thread.ident is not None:
            self._thread.join(2 * self._limits.bound_s)

    def _run(self) -> None:
        waiting = self._waiting
        self._keep_house()
        while waiting.state != "lost":
            items, generation = waiting.take(self._limits.batch_bytes, self._idle_s())
            if waiting.state == "degraded":
                self._anew = True  # items are missing, and nobody knows whether the last entry is there
            if not items and waiting.closed:
                break
            try:
                self._forget_gone()
                if items:
                    self._write(items, generation)
                else:
                    self._keep_house()
            except Exception:  # a fault of ours must not leave the engine waiting
                log.exception("journal: writing failed")
                self._anew = True
                waiting.give_up("a fault")
        self._link.close()

    # -- items

    def _write(self, items: list[Item], generation: int) -> None:
        """Write items and acknowledge them, trying again until they are given up."""
        entry = EntryWriter(self._stretch.beginning)
        number = self._stretch.number + 1
        for item in items:
            if item.accepted is not None:
                self._take(entry, item.accepted, number)
            for told in item.told:
                self._tell(entry, told, number)
        if len(entry) or self._gone:
            command = self._next(entry)
            while not self._attempt(lambda: self._append(command)):
                time.sleep(self._wait_s())
                if self._waiting.generation != generation:
                    return
        self._waiting.acknowledge(items)

    def _take(self, entry: EntryWriter, accepted: Accepted, number: int) -> None:
        id = accepted.id
        if id in self._adopted:  # told from its beginning with what comes next: both are to be in one entry
            self._adopted.discard(id)
            self._again[id] = accepted
            return
        try:
            id.encode()
            held = Held(accepted, self._page, self._stretch.beginning, number)
            entry.taken(accepted, self._page)
        except (Misfit, TypeError, ValueError, OverflowError) as error:
            log.error("journal: a request can't be written (%s)", type(error).__name__)
            self._abandon(id)
            return
        self.ended.pop(id, None)
        self.requests[id] = held
        self._stretch.touch(id, number)

    def _tell(self, entry: EntryWriter, told: Told, number: int) -> None:
        if told.id in self._again:
            self._take(entry, self._again.pop(told.id), number)
        held = self.requests.get(told.id)
        if held is None:
            return  # it has gone on without the journal
        self._adopted.discard(told.id)
        try:
            at = len(held.answers[told.index].tokens)
            held.tell(told)
            entry.grew(told, held.last, at)
        except (Misfit, IndexError, TypeError, ValueError) as error:
            log.error("journal: what a request has gained can't be written (%s)", type(error).__name__)
            self._abandon(told.id)
            return
        held.last = number
        self._stretch.touch(told.id, number)
        if held.ended:
            self.ended[told.id] = self._clock()

    # -- sending

    def _attempt(self, action: Callable[[], None]) -> bool:
        """Do something with Redis; whether it went well. Begins anew where that is needed, which does all of it."""
        try:
            if self._anew or self._lease.epoch != self._stretch.epoch:
                self._begin()
            else:
                action()
        except Unreachable:
            self._failed()
        except Refused as error:
            self._refused(error)
        else:
            self._pause = self._limits.retry_s
            self._waiting.acknowledge(())
            return True
        return False

    def _refused(self, error: Refused) -> None:
        if error.word == "FENCED" and error.rest not in ("-", str(self._lease.epoch)):
            log.warning("journal: the lease is another's now")
            self._lease.forget()
            self._waiting.lose()
            return
        self._anew |= error.word == "BEHIND"
        self._failed()

    def _failed(self) -> None:
        self._waiting.failing()
        self._next_try = self._clock() + self._pause
        self._pause = min(2 * self._pause, self._limits.longest_retry_s)

    def _next(self, entry: EntryWriter) -> Command:
        """The next entry, with what else is due, as it will be sent until it has arrived."""
        gone = self._told_gone(entry)
        whole = self._due()
        for id in whole:
            entry.whole(id)
        dropped = [*gone, *self._expired()]
        return self._command(entry, whole, dropped, trim=self._stretch.trim(whole, dropped))

    def _told_gone(self, entry: EntryWriter) -> list[str]:
        gone = sorted(self._gone)
        for id in gone:
            entry.gone(id)
        return gone

    def _append(self, command: Command) -> None:
        """Send the next entry and do in the books what it does. Raises Unreachable and Refused."""
        self._send(command)
        self._gone.difference_update(command.dropped)
        for id in command.dropped:
            self._drop(id)

    def _command(
        self, entry: EntryWriter, whole: dict[str, bytes], dropped: list[str], trim: str, begin: bool = False
    ) -> Command:
        stretch = self._stretch
        frame, slots = entry.pack()
        todo = {"epoch": str(stretch.epoch), "number": str(stretch.number + 1), "begin": begin, "trim": trim}
        told = json.dumps({**todo, "whole": list(whole), "dropped": dropped}).encode()
        requests = list(whole.values())
        arguments = [append_sum(self._keys, told, frame, requests), told, frame, slots, *requests]
        return Command(f"{stretch.epoch}-{stretch.number + 1}", arguments, list(whole), dropped)

    def _send(self, command: Command) -> None:
        """Send an entry and wait for its acknowledgement. Raises Unreachable and Refused."""
        began = self._clock()
        self._confirmed(command)
        if self._clock() - began >= self._limits.bound_s:
            raise Unreachable("slow")  # it is there, and is found there when it is sent again
        size = sum(len(part) for part in command.arguments[1:])
        self._stretch.wrote(len(command.arguments[2]) + len(command.arguments[3]), command.whole)
        self.entries += 1
        self.bytes += size
        self.wholes += len(command.whole)

    def _confirmed(self, command: Command) -> None:
        if self._clock() >= self._next_look:
            self._look()
        more = [("WAIT", 1, WAIT_SLICE_MS)] if self.replicas else []
        answers = self._link.call(APPEND, self._keys, command.arguments, *more)
        if answers[0] != command.id.encode():
            raise Unreachable("answer")
        if more and answers[1] == 0:
            self._look()  # a replica that is gone is not waited for
            if self.replicas:
                raise Unreachable("replica")

    def _look(self) -> None:
        self._next_look = 0.0
        self.replicas = read_replicas(self._link)
        self._next_look = self._clock() + self._limits.look_s

    # -- beginning anew

    def _begin(self) -> None:
        """Write all that is held, in full, and drop what was there before. Raises Unreachable and Refused."""
        self._anew = True
        if not self._lease.epoch:
            raise Unreachable("lease")
        self._stretch.begin(self._lease.epoch)
        self._forget_gone()
        entry = EntryWriter(self._stretch.beginning)
        entry.began(done=False)
        self._told_gone(entry)
        self._send(self._command(entry, {}, [], trim="", begin=True))
        for ids in self._shares():
            whole = EntryWriter(self._stretch.beginning)
            for id in ids:
                whole.whole(id)
                self.requests[id].beginning, self.requests[id].last = self._stretch.beginning, self._stretch.number + 1
            self._send(self._command(whole, {id: pack_request(self.requests[id]) for id in ids}, [], trim=""))
        there = self._link.send(("HKEYS", self._keys[3]))[0]
        rest = [name.decode(errors="replace") for name in there if isinstance(name, bytes)]
        entry = EntryWriter(self._stretch.beginning)
        entry.began(done=True)
        self._send(self._command(entry, {}, [name for name in rest if name not in self.requests], trim=""))
        self._gone.clear()
        self._anew = False
        self.beginnings += 1
        self._waiting.recovered()

    def _shares(self) -> list[list[str]]:
        """All requests, in shares that a command can hold."""
        shares: list[list[str]] = [[]]
        size = 0
        for id, held in self.requests.items():
            size += held.size
            if shares[-1] and size > self._limits.batch_bytes:
                shares.append([])
                size = held.size
            shares[-1].append(id)
        return [share for share in shares if share]

    # -- what is kept

    def _due(self) -> dict[str, bytes]:
        """Requests that are to be written in full now: those that ended, and those that keep the stream long."""
        ripe = [id for id in self._stretch.touched if self.requests[id].ended]
        running = len(self.requests) - len(self.ended)
        ripe += [id for id in self._stretch.ripe(running, lambda id: self.requests[id].light) if id not in ripe]
        whole: dict[str, bytes] = {}
        size = 0
        for id in ripe:
            size += self.requests[id].size
            if whole and size > self._limits.batch_bytes:
                break
            whole[id] = pack_request(self.requests[id])
        return whole

    def _expired(self) -> list[str]:
        """Ended requests that were kept for long enough."""
        old = self._clock() - self._limits.ended_s
        over = len(self.ended) - self._limits.ended_entries
        expired: list[str] = []
        for id, when in self.ended.items():
            if when > old and len(expired) >= over:
                break
            expired.append(id)
        return expired

    def _drop(self, id: str) -> None:
        if id in self.ended:
            self._waiting.forget([id])
        self._forget(id)

    def _forget_gone(self) -> None:
        """What has gone on without the journal is held no longer, and is to be told."""
        for id in self._waiting.take_gone():
            self._lose(id)

    def _abandon(self, id: str) -> None:
        self._waiting.abandon([id])
        self._lose(id)

    def _lose(self, id: str) -> None:
        if id in self.requests:
            self._gone.add(id)
        self._forget(id)

    def _forget(self, id: str) -> None:
        self.requests.pop(id, None)
        self.ended.pop(id, None)
        self._adopted.discard(id)
        self._again.pop(id, None)
        self._stretch.forget(id)

    def _keep_house(self) -> None:
        """With nothing to write: try whether Redis is there again, or still; drop what is kept no longer."""
        if self._clock() < self._next_try:
            return
        if self._anew or self._lease.epoch != self._stretch.epoch or self._gone or self._expired():
            command = self._next(EntryWriter(self._stretch.beginning))
            if not self._attempt(lambda: self._append(command)):
                self._anew = True  # nobody knows whether it is there
        elif self._clock() >= self._next_look:
            self._attempt(self._look)

    def _idle_s(self) -> float:
        now = self._clock()
        return max(0.001, min(self._wait_s() if self._next_try > now else self._limits.look_s, self._limits.look_s))

    def _wait_s(self) -> float:
        return min(max(self._next_try - self._clock(), 0.001), self._limits.bound_s / 4)
