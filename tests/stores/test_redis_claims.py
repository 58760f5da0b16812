"""One writer a record over a real Redis: also where claims run out, Redis was away, or a process was paused."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvpager.stores.redis import RedisStore
from kvpager.stores.redis_settings import RedisSettings
from tests.redis_rig import RedisServer, until
from tests.stores.fake import NOBODY, key_of

KEY = key_of(1)
Open = Callable[..., RedisStore]


@pytest.fixture
def store_in(redis_server: RedisServer) -> Iterator[Open]:
    made: list[RedisStore] = []

    def build(claim_s: float = 10.0) -> RedisStore:
        store = RedisStore(redis_server.url, RedisSettings(timeout_s=5.0), claim_s=claim_s)
        made.append(store)
        return store

    yield build
    for store in made:
        store.close()


def test_one_at_a_time(store_in: Open) -> None:
    one, other = store_in(), store_in()
    assert one.claim(KEY)
    assert not one.claim(KEY)
    assert not other.claim(KEY)
    other.release(KEY)  # which it does not hold
    assert not other.claim(KEY)
    assert other.claim(key_of(2))
    one.release(KEY)
    until(lambda: other.claim(KEY))
    assert not one.claim(KEY)


def test_a_claim_that_was_given_back_can_be_taken_again_at_once(store_in: Open) -> None:
    store = store_in()
    for _ in range(200):
        assert store.claim(KEY)
        store.release(KEY)


def test_a_renewal_that_comes_late_takes_nothing(store_in: Open, caplog: pytest.LogCaptureFixture) -> None:
    one, other = store_in(), store_in()
    assert one.claim(KEY)
    held = [(KEY, one._claims.token(KEY))]
    one.release(KEY)
    until(lambda: other.claim(KEY))
    other.release(KEY)
    until(lambda: other.claim(KEY))
    other.close()
    one._claims._renew(held)
    assert store_in().claim(KEY)
    assert not caplog.records


def test_closing_gives_all_back(store_in: Open) -> None:
    one, other = store_in(), store_in()
    assert one.claim(KEY)
    one.close()
    assert other.claim(KEY)


def test_a_claim_is_renewed_while_its_process_lives(store_in: Open, redis_server: RedisServer) -> None:
    one, other = store_in(claim_s=0.3), store_in()
    client = redis_server.client()
    assert one.claim(KEY)
    name = one.names.claim(KEY)
    left = client.pttl(name)
    until(lambda: client.pttl(name) > left)  # it has been renewed since
    assert not other.claim(KEY)


def test_a_claim_ends_with_its_process_and_its_record_is_the_later_ones(
    store_in: Open, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    lost, other = store_in(), store_in()
    client = redis_server.client()
    assert lost.claim(KEY)
    lost.save_record(KEY, NOBODY, b"first")
    client.delete(lost.names.claim(KEY))  # as when its time has run out while the process was paused
    lost.save_record(KEY, NOBODY, b"second")
    assert other.load_record(KEY) == b"second"  # nobody came in between
    client.delete(lost.names.claim(KEY))
    assert other.claim(KEY)
    other.save_record(KEY, NOBODY, b"third")
    other.release(KEY)
    until(lambda: not client.exists(other.names.claim(KEY)))
    lost.save_record(KEY, NOBODY, b"late")
    lost.drop_record(KEY)
    assert other.load_record(KEY) == b"third"
    assert "was not saved" in caplog.text
    lost.release(KEY)
    until(lambda: other.claim(KEY))


def test_a_claim_that_ran_out_is_taken_again_if_nobody_had_it(store_in: Open, redis_server: RedisServer) -> None:
    store, client = store_in(claim_s=0.3), redis_server.client()
    assert store.claim(KEY)
    client.delete(store.names.claim(KEY))
    until(lambda: client.exists(store.names.claim(KEY)))
    assert not store_in().claim(KEY)


def test_after_redis_was_empty_again_a_claim_holds_on(store_in: Open, redis_server: RedisServer) -> None:
    store = store_in()
    assert store.claim(KEY)
    redis_server.client().flushall()
    store.save_record(KEY, NOBODY, b"one")
    assert store.load_record(KEY) == b"one"


def test_who_could_not_claim_writes_while_nobody_else_holds(store_in: Open) -> None:
    away, other = store_in(), store_in()
    away.save_record(KEY, NOBODY, b"one")
    assert other.load_record(KEY) == b"one"
    assert other.claim(KEY)
    away.save_record(KEY, NOBODY, b"two")
    assert other.load_record(KEY) == b"one"
