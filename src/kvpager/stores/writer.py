"""The thread that writes what waits, in batches, and bears with what fails."""

from __future__ import annotations

import logging
import threading
import time

from kvpager.errors import StoreError, StoreTooLarge
from kvpager.stores.backlog import Backlog, Drop, DropRecord, Erase, News, Save, Work
from kvpager.stores.guard import RENEWED, Guard
from kvpager.stores.limits import Limits
from kvpager.stores.tier import Tier

__all__ = ["Writer"]

_log = logging.getLogger("kvpager.stores")
_PIECES = 8  # that a batch is written in while the owner computes
_MOST_TRIES = 5  # of a record, or of forgetting something: what fails so often would hold up all that waits behind it


class Writer:
    """Writes a backlog to a tier, one batch at a time, in its own thread.

    Where writing fails, blocks are given up once the tier is out of use: nobody was told that they are stored, and
    memory is for those that can be. They wait on where another process holds the tier. Records, and what is to be
    forgotten, are tried again after each pause, erasing for as long as it takes. On a full disk forgetting does not
    wait for the pause.

    stored        blocks written for good; stored_bytes: of their pages
    skipped       blocks given up
    """

    def __init__(self, guard: Guard, backlog: Backlog, limits: Limits) -> None:
        self.stored = 0
        self.stored_bytes = 0
        self.skipped = 0
        self._guard = guard
        self._backlog = backlog
        self._limits = limits
        self._share = 1.0  # of a processor, that blocks may take
        self._yields_until = 0.0  # and no longer than till then
        self._spent_s = 0.0  # of a processor's time, on the last batch
        self._rests_from = 0.0
        self._hurried = 0  # how many wait for all to be written
        self._stopping = False
        self._forgets = True  # whether forgetting may be tried in a pause: it has not failed in this one
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """There is something to do: start the thread, if it does not run yet."""
        if self._thread is None and not self._stopping:
            self._thread = threading.Thread(target=self._run, name="kvpager-store-writer", daemon=True)
            self._thread.start()

    def yields(self, share: float) -> None:
        """Writing takes no more than this share of a processor, since the owner computes with all of them; 1 for all.

        At 0 blocks wait until three quarters of what may wait do; then, and when somebody waits, nothing is held back.
        The owner says so again and again: `yield_s` after it did so last it is taken to have stopped computing.
        """
        with self._backlog.changed:
            self._yields_until = time.monotonic() + self._limits.yield_s
            if share != self._share:
                self._share = share
                self._backlog.changed.notify_all()

    def flush(self, timeout: float) -> bool:
        """Wait until nothing waits, for so many seconds at most; returns whether that is so."""
        changed = self._backlog.changed
        with changed:
            self._hurried += 1
            changed.notify_all()
            try:
                return changed.wait_for(lambda: self._backlog.idle, timeout)
            finally:
                self._hurried -= 1

    def stop(self, timeout: float) -> bool:
        """End the thread after what it is doing; returns whether it has ended within so many seconds."""
        changed = self._backlog.changed
        with changed:
            self._stopping = True
            changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout)
            return not self._thread.is_alive()
        return True

    def _run(self) -> None:
        while self._wait():
            if self._guard.open() and not self._guard.off:
                # small pieces while the owner computes: none of its steps is to wait for long
                work = self._backlog.take(self._limits.batch_bytes // (_PIECES if self._shares else 1))
                if work is not None:
                    began, self._rests_from = time.thread_time(), time.monotonic()
                    self._do(work)
                    self._spent_s = time.thread_time() - began
            elif self._guard.off:
                self._abandon()
            self._backlog.left(self._give_back)

    def _give_back(self, key: bytes) -> None:
        self._guard.aside(lambda tier: tier.release(key), None)

    def _wait(self) -> bool:
        """Wait until there is something that may be done; returns whether to go on."""
        changed, backlog, guard = self._backlog.changed, self._backlog, self._guard
        with changed:
            while not self._stopping:
                pause = guard.writing.wait_s
                if pause > 0 and self._forgets and guard.writing.reason == "full" and backlog.forgets:
                    return True
                if pause > 0 and not guard.off:
                    changed.wait(pause)
                elif guard.tier is None and not guard.off:
                    return True
                elif backlog.idle:
                    changed.wait()
                elif (left := self._puts_off_s) > 0:
                    changed.wait(left)
                elif backlog.ripe(self._limits.batch_bytes) or self._hurried:
                    return True
                else:
                    self._linger()
                    return not self._stopping
        return False

    @property
    def _shares(self) -> bool:
        """Whether the owner computes, and what waits may wait on."""
        full = self._backlog.bytes >= self._limits.waiting_bytes * 3 // 4
        hurries = full or self._hurried or self._backlog.forgets
        return self._share < 1 and not hurries and time.monotonic() < self._yields_until

    @property
    def _puts_off_s(self) -> float:
        """For how long blocks wait on for the owner's sake, unless something changes."""
        if not self._shares:
            return 0.0
        rests_until = self._rests_from + self._spent_s / self._share if self._share else self._yields_until
        return min(rests_until, self._yields_until) - time.monotonic()

    def _linger(self) -> None:
        """Wait a little for more, so that a batch is worth its transaction."""
        ends = time.monotonic() + self._limits.linger_s
        while (left := ends - time.monotonic()) > 0:
            if self._stopping or self._hurried or self._backlog.ripe(self._limits.batch_bytes):
                return
            self._backlog.changed.wait(left)

    def _do(self, work: Work) -> None:
        forgets = isinstance(work, Drop | DropRecord | Erase)
        for again in (True, False):
            try:
                self._guard.write(lambda tier: self._write(tier, work), forgets)
            except StoreError as error:
                if again and error.kind in RENEWED:
                    continue  # the tier has been begun anew
                self._forgets = not forgets
                self._failed(work, error)
            else:
                self._forgets = True
                self._backlog.done()
            return

    def _write(self, tier: Tier, work: Work) -> None:
        match work:
            case Save():
                tier.save_record(work.key, work.tenant, work.record)
            case Drop():
                tier.drop(work.keys)
            case DropRecord():
                tier.drop_record(work.key)
            case Erase():
                work.count += tier.erase(work.tenant)
            case News():
                tier.update(work.scores, work.tick)
            case _:
                written = tier.put([put.block for put in work])
                self.stored += written
                self.stored_bytes += sum(put.block.payload.nbytes for put in work) * written // len(work)

    def _failed(self, work: Work, error: StoreError) -> None:
        if self._guard.off or isinstance(error, StoreTooLarge):
            self._give_up(work)
            return
        if isinstance(work, Save | Drop | DropRecord) and error.kind != "locked":
            work.tries += 1
            if work.tries >= _MOST_TRIES:
                self._give_up(work)
                return
        if isinstance(work, list) and error.kind != "locked" and self._guard.writing.reason is not None:
            self._give_up(work)
            return
        self._backlog.keep()

    def _give_up(self, work: Work) -> None:
        if isinstance(work, list):
            self.skipped += len(work)
        self._backlog.done()

    def _abandon(self) -> None:
        """Nothing will ever be written: nothing is kept for it."""
        while (work := self._backlog.take(self._limits.batch_bytes)) is not None:
            self._give_up(work)
