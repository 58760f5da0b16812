"""A mirror over a journal that others have spoiled, and over one in parts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from kvpager.replication.entries import EntryWriter
from kvpager.replication.keys import Keys
from kvpager.replication.limits import Limits
from kvpager.replication.mirror import Mirror
from tests.redis_rig import RedisCluster, RedisServer, until
from tests.replication.rig import PAGE, Primary, accepted, caught_up, grown, mirror, slot

KEYS = Keys("pair")


def begin(primary: Primary, *ids: str) -> None:
    for id in ids:
        primary.journal.accept(accepted(id))
    primary.told(*[grown(id, 0, 0, 6, 1) for id in ids])


def forged(client: Any, write: Callable[[EntryWriter], None] | None = None, **fields: bytes) -> None:
    """An entry that no journal has written, at the stream's end, of the stretch that is there."""
    epoch, number = client.get(KEYS.tail).decode().split("-")
    first = client.xrange(KEYS.stream, count=1)[0][0].decode()
    writer = EntryWriter(first)
    if write is not None:
        write(writer)
    frame, slots = writer.pack()
    id = f"{epoch}-{int(number) + 1}"
    client.xadd(
        KEYS.stream, {b"entry": frame, b"slots": slots, **{name.encode(): fields[name] for name in fields}}, id=id
    )


def test_it_follows_by_itself_and_tells_its_lag(redis_server: RedisServer) -> None:
    with Primary(redis_server.port) as primary:
        one = mirror(redis_server.port)
        one.start()
        begin(primary, "one")
        until(lambda: "one" in one.requests())
        until(lambda: one.stats().lag_s < 0.2)
        redis_server.pause()
        until(lambda: one.stats().lag_s > 0.7)
        redis_server.resume()
        until(lambda: one.stats().lag_s < 0.2)
        assert one.stats().broken == 0
        one.close()
        one.close()


def test_finishing_gives_up_where_redis_is_gone(redis_server: RedisServer) -> None:
    with Primary(redis_server.port) as primary:
        begin(primary, "one")
        one = caught_up(mirror(redis_server.port))
        redis_server.kill()
        assert one.finish(0.1).keys() == {"one"}


JUNK: list[dict[str, bytes]] = [
    {"entry": b""},
    {"entry": b"junk" * 20},
    {"slots": b"more than there is"},
    {"surplus": b"field"},
]


@pytest.mark.parametrize("fields", JUNK)
def test_junk_in_the_stream_costs_what_is_in_it(
    redis_server: RedisServer, fields: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    client = redis_server.client()
    with Primary(redis_server.port) as primary:
        begin(primary, "one")
        early, late = caught_up(mirror(redis_server.port)), mirror(redis_server.port)
        forged(client, **fields)
        primary.told(grown("one", 0, 6, 7, 2))  # its place is taken: it begins anew
        for one in (early, late):
            assert caught_up(one).requests()["one"].outputs == [[1, 2]]


def test_entries_of_others_are_no_entries(redis_server: RedisServer) -> None:
    client = redis_server.client()
    with Primary(redis_server.port) as primary:
        begin(primary, "one")
        one = caught_up(mirror(redis_server.port))
        client.xadd(KEYS.stream, {"other": "thing"}, id=f"{primary.lease.epoch + 5}-50")
        until(lambda: one.poll(0.0) or one.stats().broken)
        assert "one" not in one.requests()  # it was not written in full yet, and something may be missing
        primary.told(grown("one", 0, 6, 7, 2))
        assert primary.journal.stats().beginnings == 2
        for reader in (one, mirror(redis_server.port)):
            assert caught_up(reader).requests()["one"].outputs == [[1, 2]]


PARTS: list[tuple[str, Callable[[EntryWriter], None]]] = [
    ("an answer that there is not", lambda writer: writer.grew(grown("one", 5, 6, 7, 2), 3, 1)),
    ("tokens from further on", lambda writer: writer.grew(grown("one", 0, 6, 7, 2), 3, 4)),
    ("another entry before it", lambda writer: writer.grew(grown("one", 0, 6, 7, 2), 2, 1)),
    ("too many answers", lambda writer: writer.taken(accepted("one", n=10**6), PAGE)),
    ("no prompt", lambda writer: writer.taken(accepted("one", 0), PAGE)),
    ("a name too long", lambda writer: writer.taken(accepted("one", n=1.5), PAGE)),
]


@pytest.mark.parametrize("write", [write for _, write in PARTS], ids=[what for what, _ in PARTS])
def test_a_part_that_makes_no_sense_costs_its_request(
    redis_server: RedisServer, write: Callable[[EntryWriter], None], caplog: pytest.LogCaptureFixture
) -> None:
    client = redis_server.client()
    with Primary(redis_server.port) as primary:
        begin(primary, "one", "two")
        one = caught_up(mirror(redis_server.port))
        forged(client, write)
        with caplog.at_level(logging.WARNING):
            assert caught_up(one).requests().keys() == {"two"}
        assert one.stats().broken == 1
        assert caplog.text.count("mirror:") == 1


def test_more_requests_than_it_takes_are_not_followed(redis_server: RedisServer) -> None:
    with Primary(redis_server.port) as primary:
        one = mirror(redis_server.port, Limits(requests=2))
        begin(primary, "one", "two", "three")
        assert len(caught_up(one).requests()) == 2


def test_what_is_missing_is_found_in_full_or_dropped(redis_server: RedisServer) -> None:
    client = redis_server.client()
    with Primary(redis_server.port, Limits(stream_entries=16)) as primary:
        begin(primary, "one", "two")
        one = caught_up(mirror(redis_server.port))
        primary.told(grown("one", 0, 6, 7, 2))
        client.xdel(KEYS.stream, client.get(KEYS.tail))
        primary.told(grown("one", 0, 7, 8, 3))
        assert "one" not in caught_up(one).requests()
        assert one.stats().broken >= 1
        for length in range(8, 30):  # until it is written in full
            primary.told(grown("one", 0, length, length + 1, length), grown("two", 0, length - 2, length - 1, 1))
        known = caught_up(one).requests()
        assert known["one"].outputs == [[1, 2, 3, *range(8, 30)]]
        assert known["one"].saved[0] is not None
        assert known["two"].outputs == [[1] * 23]


def test_damaged_slots_cost_the_pages_until_they_come_in_full(redis_server: RedisServer) -> None:
    client = redis_server.client()
    with Primary(redis_server.port, Limits(stream_entries=16)) as primary:
        begin(primary, "one")
        one = caught_up(mirror(redis_server.port))
        primary.told(grown("one", 0, 6, 7, 2))
        tail = client.get(KEYS.tail)
        ((_, fields),) = client.xrange(KEYS.stream, tail, tail)
        entries = client.xrange(KEYS.stream)
        client.delete(KEYS.stream)
        for id, was in entries:
            client.xadd(KEYS.stream, {**was, b"slots": was[b"slots"][::-1]} if id == tail else was, id=id)
        known = caught_up(one).requests()["one"]
        assert fields[b"slots"] == slot("one", 0, 6)
        assert known.outputs == [[1, 2]]
        assert known.saved == [None]
        for length in range(7, 30):
            primary.told(grown("one", 0, length, length + 1, length))
        known = caught_up(one).requests()["one"]
        assert known.saved[0] is not None
        assert known.saved[0].header == {"length": 30}


def test_a_primary_that_dies_while_it_begins_leaves_what_was_there(redis_server: RedisServer) -> None:
    client, epoch = redis_server.client(), 0
    for turn in range(2):
        primary = Primary(redis_server.port, owner=f"number {turn}")
        assert primary.lease.acquire()
        primary.journal.adopt(caught_up(mirror(redis_server.port)).requests())
        primary.journal.start()
        if not turn:
            begin(primary, "one", "two")
            early = caught_up(mirror(redis_server.port))
        until(lambda primary=primary: primary.journal.stats().beginnings)
        primary.journal.close()
        epoch = primary.lease.epoch
        assert primary.lease.release()
    for id, _ in client.xrange(KEYS.stream)[2:]:  # the second had begun, and not written that this is all
        client.xdel(KEYS.stream, id)
    for one in (early, mirror(redis_server.port)):
        assert caught_up(one).requests().keys() == {"one", "two"}
    writer = EntryWriter(f"{epoch}-1")
    writer.began(done=True)
    frame, slots = writer.pack()
    client.xadd(KEYS.stream, {b"entry": frame, b"slots": slots}, id=f"{epoch}-4")
    assert caught_up(early).requests().keys() == {"one", "two"}


def test_a_cluster_has_a_pair_at_one_node(redis_cluster: RedisCluster) -> None:
    from kvpager.replication.journal import Journal
    from kvpager.replication.lease import Lease

    lease = Lease(redis_cluster.client, "pair", "first", 60.0)
    assert lease.acquire()
    journal = Journal(redis_cluster.client, lease, PAGE, on_lost=lambda: None, limits=Limits(bound_s=15.0))
    journal.start()
    journal.accept(accepted("one"))
    journal.step([grown("one", 0, 0, 6, 1)], lambda: None)
    journal.close(20.0)
    one = Mirror(redis_cluster.client, "pair")
    until(lambda: one.poll(0.0))
    assert one.requests()["one"].outputs == [[1]]
    one.close()
    lease.close()
