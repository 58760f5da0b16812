"""Keeps a lease: a thread that renews it, and says when it is lost or asked for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvpager.replication.lease import Lease
from kvpager.replication.link import Unreachable

__all__ = ["LeaseKeeper"]

log = logging.getLogger(__name__)


class LeaseKeeper:
    """Renews a lease that was acquired, three times as often as it would expire.

    on_lost   called once, when another has the lease; the thread ends then
    on_asked  called once, when somebody asks for it; who is asked ends what it does, then calls `close(release=True)`

    Where Redis can't be reached nothing is called: the lease is not `held` once its time is over, and when Redis is
    back and nobody took it meanwhile it is acquired again, with a new epoch.
    """

    def __init__(self, lease: Lease, on_lost: Callable[[], None], on_asked: Callable[[], None]) -> None:
        self._lease, self._on_lost, self._on_asked = lease, on_lost, on_asked
        self._stop = threading.Event()
        self._asked = False
        self._thread = threading.Thread(target=self._run, name="kvpager-lease", daemon=True)
        self._thread.start()

    def close(self, release: bool = False) -> None:
        """Stop renewing; with `release`, give the lease up at once where Redis can be reached. May be called by both
        callbacks.
        """
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(self._lease.ttl_s + 5)
        if release and self._lease.held:
            try:
                self._lease.release()
            except Unreachable:
                log.warning("the lease %s could not be released; it expires", self._lease.keys.name)

    def _run(self) -> None:
        while not self._stop.wait(self._lease.ttl_s / 3):
            try:
                if not self._renew():
                    return
            except Unreachable:
                continue  # tried again, until its time is over and after

    def _renew(self) -> bool:
        """Renew it, or have it again; False once another has it."""
        lease = self._lease
        state = lease.renew()
        if state == "vacant" and lease.acquire():
            log.warning("the lease %s had expired; it was acquired again with epoch %d", lease.keys.name, lease.epoch)
        elif state in ("vacant", "lost"):
            if state == "vacant" and lease.watch() is None:
                return True  # asked to leave it to another
            log.warning("the lease %s is another's now", lease.keys.name)
            self._on_lost()
            return False
        elif state == "asked" and not self._asked:
            self._asked = True
            self._on_asked()
        return True
