"""The mirror: what a standby knows of the primary's requests, read from the journal as it grows.

It begins with the requests that were written in full and goes on with the stream. Nothing that is read is believed
before it was looked at: what does not fit costs the request its place here, never a wrong token.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvpager.journaled import Resumable
from kvpager.replication.book import Held
from kvpager.replication.entries import Began, Entry, read_entry
from kvpager.replication.keys import Keys
from kvpager.replication.limits import Limits
from kvpager.replication.link import Connect, Link, Unreachable
from kvpager.replication.packing import Damaged
from kvpager.replication.reading import Reading
from kvpager.replication.record import unpack_request

__all__ = ["Mirror", "MirrorStats"]

log = logging.getLogger(__name__)

ENTRIES = 32  # at a time
ID = re.compile(rb"(\d{1,18})-(\d{1,18})")
BLOCK_S = 0.1  # one waits at the stream's end for so long, then looks whether to stop


@dataclass(frozen=True)
class MirrorStats:
    """One look at a mirror.

    requests  that it knows, running and ended; gone: that went on without the journal, as far as it heard
    entries   that it read; restarts: how often it had to begin with requests in full
    broken    requests and entries that made no sense, or of which something is missing
    lag_s     since it was at the stream's end; up to 0.1 s while all is well
    """

    requests: int
    gone: int
    entries: int
    restarts: int
    broken: int
    lag_s: float


class Mirror:
    """Follows a pair's journal with a thread of its own, from `start` to `close`."""

    def __init__(
        self,
        connect: Connect,
        name: str,
        *,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`connect` gives a client of redis-py whose time-out is above 0.1 s. Raises ConfigError for the name."""
        self.keys = Keys(name)
        self._limits, self._clock = limits or Limits(), clock
        self._link = Link(connect, self.keys.stream)
        self._lock = threading.Lock()
        self._reading = Reading(self._limits, clock)
        self._position = ""  # of the last entry that was read; "" to begin with requests in full
        self._suspicious = 0  # tries at the entry that comes next
        self._current = clock()
        self._entries = self._restarts = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvpager-mirror", daemon=True)

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def close(self) -> None:
        """Follow no longer; what is known stays known."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(5)
        self._link.close()

    def finish(self, within_s: float = 1.0) -> dict[str, Resumable]:
        """Read to the stream's end and stop: what whoever has acquired the lease goes on with.

        Nobody writes any more then. Where the end can't be reached in time, what is known until then is all there is.
        """
        self.close()
        end = self._clock() + within_s
        while self._clock() < end:
            try:
                if self.poll(0.0):
                    break
            except Unreachable:
                time.sleep(0.01)
        self._link.close()
        return self.requests()

    def requests(self) -> dict[str, Resumable]:
        """All that can be gone on with, running and ended, by id: copies."""
        with self._lock:
            return self._reading.resumables()

    def gone(self, id: str) -> bool:
        """Whether a request is known to have gone on without the journal."""
        with self._lock:
            return id in self._reading.gone

    def stats(self) -> MirrorStats:
        """Figures."""
        with self._lock:
            reading = self._reading
            lag = self._clock() - self._current
            known, gone, broken = len(reading.requests), len(reading.gone), reading.broken
            return MirrorStats(known, gone, self._entries, self._restarts, broken, lag)

    def poll(self, block_s: float) -> bool:
        """Read what there is, waiting for it for up to `block_s`; True where that was all. Raises Unreachable.

        For one thread: this one's, or the caller's while it does not run.
        """
        if not self._position:
            self._restart()
            self._position = "0-0"
        entries = self._read(block_s)
        if not entries and not self._at_end():
            return False
        for id, fields in entries:
            if not self._take(id, fields):
                return False
        with self._lock:
            self._reading.fade()
            if len(entries) < ENTRIES:
                self._current = self._clock()
        return len(entries) < ENTRIES

    # -- with the thread

    def _run(self) -> None:
        pause = self._limits.retry_s
        while not self._stop.is_set():
            try:
                self.poll(BLOCK_S)
            except Unreachable:
                self._stop.wait(pause)
                pause = min(2 * pause, self._limits.longest_retry_s)
            except Exception:  # a fault of ours: begin again, rather than stop
                log.exception("mirror: reading failed")
                self._position = ""
                self._stop.wait(self._limits.longest_retry_s)
            else:
                pause = self._limits.retry_s

    def _restart(self) -> None:
        """Know what was written in full, and nothing else; the stream goes on from there."""
        found = self._link.send(("HGETALL", self.keys.requests))[0]
        if not isinstance(found, dict):
            raise Unreachable("answer")
        read = {id: self._request(data) for id, data in found.items()}
        with self._lock:
            self._reading.restart(read)
            self._restarts += 1

    def _read(self, block_s: float) -> list[tuple[bytes, Any]]:
        command: list[object] = ["XREAD", "COUNT", ENTRIES]
        if block_s:
            command += ["BLOCK", max(1, round(block_s * 1e3))]
        return _entries(self._link.send([*command, "STREAMS", self.keys.stream, self._position])[0])

    def _at_end(self) -> bool:
        """Whether nothing follows what was read; where something else was read than the journal has, begin again."""
        tail = self._link.send(("GET", self.keys.tail))[0]
        try:
            last = (0, 0) if tail is None else _place(tail)
        except (Damaged, TypeError) as error:
            raise Unreachable("answer") from error
        position = _place(self._position.encode())
        if tail is not None and last < position:
            self._position = ""
        return tail is None or last == position

    def _take(self, id: bytes, fields: Any) -> bool:
        """Take an entry; False where it is to be read again, because it may be the way here that has damaged it."""
        try:
            place = _place(id)
            entry = _unpacked(fields, self._limits)
        except Damaged as error:
            self._link.close()
            self._suspicious = 0 if self._suspicious else 1
            if self._suspicious or not ID.fullmatch(id):
                return False
            log.warning("mirror: an entry of the journal is damaged (%s)", error)
            self._restart()
            with self._lock:
                self._reading.broken += 1
        else:
            self._suspicious = 0
            if not self._follows(place, entry):
                self._restart()
            fetched = self._fetch(self._reading.wants(place[1], entry))
            with self._lock:
                self._reading.take(place[1], entry, fetched)
        self._position = id.decode()
        self._entries += 1
        return True

    def _follows(self, place: tuple[int, int], entry: Entry) -> bool:
        """Whether no entry is missing before this one."""
        if self._position == "0-0" or any(isinstance(part, Began) for part in entry.parts[:1]):
            return True
        epoch, number = _place(self._position.encode())
        return place == (epoch, number + 1)

    def _fetch(self, ids: list[str]) -> dict[str, Held | None]:
        """Requests that were written in full, by id; None for what is not there or makes no sense."""
        if not ids:
            return {}
        found = self._link.send(("HMGET", self.keys.requests, *ids))[0]
        if not isinstance(found, list) or len(found) != len(ids):
            raise Unreachable("answer")
        return {id: self._request(data) for id, data in zip(ids, found, strict=True)}

    def _request(self, data: Any) -> Held | None:
        try:
            return None if data is None else unpack_request(data, self._limits)
        except Damaged as error:
            log.warning("mirror: a request is damaged (%s)", error)
            return None


def _entries(answer: Any) -> list[tuple[bytes, Any]]:
    """The entries in an answer to XREAD, in either of the protocol's versions."""
    if not answer:
        return []
    try:
        entries = next(iter(answer.values())) if isinstance(answer, dict) else answer[0][1]
        if len(entries) == 1 and isinstance(entries[0], list) and not isinstance(entries[0][0], bytes):
            entries = entries[0]
        pairs = [(id, fields) for id, fields in entries]
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise Unreachable("answer") from error
    if not all(isinstance(id, bytes) for id, _ in pairs):
        raise Unreachable("answer")
    return pairs


def _place(id: bytes) -> tuple[int, int]:
    """Epoch and number of an entry. Raises Damaged."""
    found = ID.fullmatch(id)
    if not found:
        raise Damaged("id")
    return int(found[1]), int(found[2])


def _unpacked(fields: Any, limits: Limits) -> Entry:
    if not isinstance(fields, dict) or not {b"entry", b"slots"} <= fields.keys():
        raise Damaged("fields")
    return read_entry(fields[b"entry"], fields[b"slots"], limits)
