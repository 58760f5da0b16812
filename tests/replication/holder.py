"""A primary in a process of its own: python -m tests.replication.holder PORT. Says what was released, and its end."""

from __future__ import annotations

import sys
import threading
import time
from functools import partial

from kvpager.replication.journal import Journal
from kvpager.replication.keeper import LeaseKeeper
from kvpager.replication.lease import Lease
from tests.replication.rig import PAGE, accepted, connector, grown


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    connect = connector(int(sys.argv[1]))
    lost = threading.Event()
    lease = Lease(connect, "pair", "holder", 0.5)
    assert lease.acquire()
    journal = Journal(connect, lease, PAGE, on_lost=lost.set)
    journal.start()
    LeaseKeeper(lease, journal.lose, lambda: None)
    journal.accept(accepted("one"))
    journal.step([grown("one", 0, 0, 6, 0)], lambda: say("released 0"))
    number = 1
    while not lost.is_set():
        journal.step([grown("one", 0, 5 + number, 6 + number, number)], partial(say, f"released {number}"))
        number += 1
        time.sleep(0.002)
    journal.step([grown("one", 0, 5 + number, 6 + number, number)], lambda: say("released after it was lost"))
    journal.accept(accepted("two"))
    say(f"lost {journal.stats().state} {journal.resumable('one')}")
    journal.close(0.2)


if __name__ == "__main__":
    main()
