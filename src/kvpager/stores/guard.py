"""A guard around a tier: whatever happens to it is counted, told once in the log, and kept from those who ask."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from kvpager.errors import StoreError, StoreFull, StoreTooLarge, StoreUnavailable, is_disk_full
from kvpager.stores.breaker import Breaker
from kvpager.stores.limits import Limits
from kvpager.stores.tier import FarTier, Tier

__all__ = ["LASTING", "RENEWED", "Guard"]

_log = logging.getLogger("kvpager.stores")
T = TypeVar("T")

RENEWED = ("damaged", "lost")
"""Kinds of failure after which a tier works again, empty."""

LASTING = ("full", "readonly", "timeout", "auth", "fenced")
"""Kinds of failure that trying again at once does not mend."""

_FOR_GOOD = ("foreign", "newer")


class Guard:
    """Calls a tier, with one breaker for what reads and one for what writes: a full disk can still be read.

    A tier that can't be opened is opened later, by `open`, when the writing breaker lets it; one that is another
    application's, newer, or that raised what no tier should raise, is off for good.

    tier     None while it is not open
    off      whether it is out of use for good
    errors   failures by kind
    reading, writing  the breakers
    alarm    called when the reading breaker of a far tier opens: somebody is to `probe` it
    """

    def __init__(
        self, opener: Callable[[], Tier], limits: Limits, clock: Callable[[], float], far_s: float | None = None
    ) -> None:
        """Opens the tier. What `opener` raises but StoreError and OSError (a missing package, say) is raised.

        far_s  for a far tier: a read that takes longer is slow, and while reading fails nobody who waits tries it again
        """
        self.tier: Tier | None = None
        self.off = False
        self.errors: Counter[str] = Counter()
        self.reading = Breaker(limits, clock)
        self.writing = Breaker(limits, clock)
        self._opener = opener
        self._limits = limits
        self._clock = clock
        self._told: set[tuple[str, str]] = set()
        self._name = "store"  # and the tier's own, once it is open
        self._far = far_s is not None
        self._slow_s = limits.slow_s if far_s is None else far_s
        self.alarm: Callable[[], None] = lambda: None
        self._closed = False
        self._lock = threading.Lock()  # of `errors` and `_told`: several threads may read at once
        self._open()

    @property
    def state(self) -> str:
        """Whether it is "ok", "off" for good, or the kind of failure for which it is out of use."""
        if self.off:
            return "off"
        return self.reading.reason or self.writing.reason or "ok"

    def open(self) -> bool:
        """Open the tier, if it is not and this may be tried now; returns whether it is open."""
        if self.tier is None and not self.off and not self._closed and self.writing.ready():
            try:
                self._open()
            except Exception as error:  # whatever it is, it must not end the thread that writes
                self._failed("not opened", self.writing, error)
        return self.tier is not None

    def read(self, call: Callable[[Tier], T], default: T) -> T:
        """What the tier answers; `default` where it fails, or is out of use."""
        tier = self.tier
        if tier is None or self.off or not (self.reading.reason is None if self._far else self.reading.ready()):
            return default
        damaged = tier.damaged
        begun = self._clock()
        try:
            answer = call(tier)
        except Exception as error:  # whatever it is, a broken store is a miss
            self._failed("reading", self.reading, error)
            return default
        if tier.damaged > damaged and self._first("reading", "damaged"):
            _log.warning("%s: what was read is damaged and counts as missing; told once", self._name)
        self._timed("reading", self.reading, begun)
        return answer

    def write(self, call: Callable[[Tier], T], forgets: bool = False) -> T:
        """What the tier answers. Raises StoreError, counted and logged, where it fails.

        forgets  whether the call only forgets something, which goes well on a full disk that still takes nothing
        """
        tier = self.tier
        if tier is None or self.off:
            raise StoreUnavailable("io", f"{self._name} is not open")
        begun = self._clock()
        try:
            answer = call(tier)
        except StoreTooLarge as error:  # which says nothing about what comes next
            self._count("writing", error.kind, str(error), False)
            raise
        except Exception as error:  # whatever it is, it must not end the thread that writes
            raise self._failed("writing", self.writing, error) from error
        if self._clock() - begun > self._limits.slow_s:  # others wait for it, but waiting longer helps nobody
            self._count("writing", "slow", "a call took longer than slow_s", False)
        if not (forgets and self.writing.reason == "full") and self.writing.succeeded():
            self._again("writing")
        return answer

    def aside(self, call: Callable[[Tier], T], default: T) -> T:
        """What the tier answers to what neither reads nor writes, whatever the breakers say; `default` if it fails."""
        if self._far:
            return self.read(call, default)
        tier = self.tier
        if tier is None or self.off:
            return default
        try:
            return call(tier)
        except Exception as error:
            kind = self._kind(error)
            self._count("claiming", kind, str(error), False)
            return default

    def probe(self) -> None:
        """Try again to read a far tier, if the pause is over."""
        tier = self.tier
        if isinstance(tier, FarTier) and not self.off and self.reading.reason is not None and self.reading.ready():
            begun = self._clock()
            try:
                tier.probe()
            except Exception as error:
                self._failed("reading", self.reading, error)
            else:
                self._timed("reading", self.reading, begun)

    def close(self) -> None:
        """Close the tier; it stays closed."""
        tier, self.tier = self.tier, None
        self._closed = True
        if tier is not None:
            try:
                tier.close()
            except Exception as error:
                self._count("closing", self._kind(error), str(error), False)

    def _open(self) -> None:
        for again in (True, False):
            try:
                tier = self._opener()
            except (StoreError, OSError) as error:
                renewed = again and isinstance(error, StoreError) and error.kind in RENEWED
                self._failed("not opened", self.writing, error, at_once=not renewed)
                if not renewed:
                    return
            else:
                break
        self._name = f"store {tier.name}"
        self.tier = tier
        if tier.damaged and self._first("opened", "damaged"):
            _log.warning("%s: rows of %d blocks or sessions are damaged, and were forgotten", self._name, tier.damaged)
        if self.writing.succeeded():
            self._again("not opened", "it is open now")

    def _timed(self, side: str, breaker: Breaker, begun: float) -> None:
        if self._clock() - begun > self._slow_s:
            opened = breaker.failed("slow")
            self._count(side, "slow", f"calls take longer than {self._slow_s:g} s", opened)
        elif breaker.succeeded():
            self._again(side)

    def _failed(self, side: str, breaker: Breaker, error: Exception, at_once: bool = False) -> StoreError:
        """Count it, log it once, and tell the breaker; returns it as a StoreError."""
        if not isinstance(error, StoreError | OSError | MemoryError):
            # No tier should raise this: its state is unknown, so that nothing of it is used any more.
            self.off = True
            with self._lock:
                self.errors["io"] += 1
            _log.error("%s: %s, in an unforeseen way; it is off for good", self._name, side, exc_info=error)
            return StoreUnavailable("io", f"{self._name} failed: {type(error).__name__}")
        kind = self._kind(error)
        opened = breaker.failed(kind, at_once=at_once or kind in LASTING)
        if kind in _FOR_GOOD:
            self.off = True
        self._count(side, kind, str(error), opened)
        if isinstance(error, StoreError):
            return error
        text = f"{self._name}: {error}"
        return StoreFull(text) if kind == "full" else StoreUnavailable("io", text)

    @staticmethod
    def _kind(error: Exception) -> str:
        if isinstance(error, StoreError):
            return error.kind
        return "full" if isinstance(error, OSError) and is_disk_full(error) else "io"

    def _count(self, side: str, kind: str, text: str, opened: bool) -> None:
        with self._lock:
            self.errors[kind] += 1
        first, out_of_use = self._first(side, kind), opened and self._first(side, "out of use")
        then = "; it is off for good" if self.off else "; it is out of use for a while" if opened else ""
        if opened and side == "reading":
            self.alarm()
        if first or out_of_use:
            _log.warning("%s: %s: %s: %s%s", self._name, side, kind, text, then)

    def _first(self, side: str, kind: str) -> bool:
        """Whether this is to be told: once, until all is well again."""
        with self._lock:
            news = (side, kind) not in self._told
            self._told.add((side, kind))
        return news

    def _again(self, side: str, how: str = "") -> None:
        with self._lock:
            self._told = {told for told in self._told if told[0] != side}
        _log.warning("%s: %s", self._name, how or f"{side} works again")
