"""A store in a real Redis: what goes in comes out, whole or not at all, within its bounds, for all who share it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from kvpager.errors import ConfigError, StoreUnavailable
from kvpager.stored import Fence, Scores
from kvpager.stores.redis import RedisStore
from kvpager.stores.redis_books import KEY_BYTES_HELD
from kvpager.stores.redis_settings import RedisSettings
from tests.redis_rig import RedisServer
from tests.stores.fake import NOBODY, Clock
from tests.stores.made import flipped, made_block

BLOCKS = [made_block(seed) for seed in range(6)]
KEYS = [block.head.key for block in BLOCKS]
Open = Callable[..., RedisStore]


@pytest.fixture
def store_in(redis_server: RedisServer) -> Iterator[Open]:
    """Opens stores in one Redis, as several nodes do."""
    made: list[RedisStore] = []

    def build(fence: Fence | None = None, clock: Callable[[], float] | None = None, **settings: object) -> RedisStore:
        more = {} if clock is None else {"clock": clock}
        given = RedisSettings(**{"timeout_s": 5.0, **settings})  # type: ignore[arg-type]
        store = RedisStore(redis_server.url, given, fence=lambda: fence, **more)
        made.append(store)
        store.open()
        return store

    yield build
    for store in made:
        store.close()


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_what_goes_in_comes_out(store_in: Open, compression: str) -> None:
    assert store_in(compression=compression).put(BLOCKS) == len(BLOCKS)
    other = store_in()
    assert other.contains([*KEYS, bytes(32)]) == [True] * len(KEYS) + [False]
    assert other.heads([*KEYS, bytes(32)]) == [*(block.head for block in BLOCKS), None]
    for block, payload in zip(BLOCKS, other.get(KEYS), strict=True):
        assert payload is not None
        assert np.array_equal(payload, block.payload)
    assert other.get([bytes(32)]) == [None]
    assert other.sizes().blocks == len(BLOCKS)
    assert other.sizes().payload_bytes == sum(block.payload.nbytes for block in BLOCKS)


def test_headers_longer_than_what_is_read_at_first_are_read_whole(store_in: Open) -> None:
    long = [made_block(seed, digest=bytes(range(256)) * 20) for seed in range(3)]
    mixed = [*long, made_block(9)]
    store = store_in()
    store.put(mixed)
    for _ in range(2):  # then it knows how long they are
        assert store.heads([block.head.key for block in mixed]) == [block.head for block in mixed]


def test_many_blocks_take_several_round_trips(store_in: Open) -> None:
    large = [made_block(seed, pages=20, page_bytes=64 * 1024) for seed in range(5)]
    store = store_in()
    assert store.put(large) == len(large)
    for block, payload in zip(large, store.get([block.head.key for block in large]), strict=True):
        assert payload is not None
        assert np.array_equal(payload, block.payload)


def test_what_is_there_is_not_written_again(store_in: Open) -> None:
    assert store_in().put(BLOCKS[:2]) == 2
    assert store_in().put(BLOCKS[:3]) == 1


def test_scores_and_hits_are_shared(store_in: Open) -> None:
    one, other = store_in(), store_in()
    one.put(BLOCKS[:1])
    one.update([Scores(KEYS[0], b"newer", 2), Scores(KEYS[1], b"of none", 1)], 7)
    other.update([Scores(KEYS[0], b"newest", 3)], 5)
    head = store_in().heads(KEYS[:1])[0]
    assert head == BLOCKS[0].head.rescored(b"newest", BLOCKS[0].head.hits + 5)
    assert store_in().tick == 7
    assert store_in().heads(KEYS[1:2]) == [None]


def test_every_flipped_bit_is_a_miss(store_in: Open, redis_server: RedisServer) -> None:
    store, client = store_in(), redis_server.client()
    store.put(BLOCKS[:1])
    name = store.names.block(KEYS[0])
    whole = client.get(name)
    for bit in range(0, 8 * len(whole), 61):
        client.set(name, flipped(whole, bit))
        damaged = store.damaged
        assert store.get(KEYS[:1]) == [None]
        assert store.damaged == damaged + 1
        assert store.heads(KEYS[:1]) in ([None], [BLOCKS[0].head])  # a page's bit is not seen there
    for cut in (0, 1, 40, len(whole) - 1):
        client.set(name, whole[:cut])
        assert store.get(KEYS[:1]) == [None]


def test_another_blocks_bytes_are_a_miss(store_in: Open, redis_server: RedisServer) -> None:
    store, client = store_in(), redis_server.client()
    store.put(BLOCKS[:2])
    client.rename(store.names.block(KEYS[1]), store.names.block(KEYS[0]))
    assert store.get(KEYS[:1]) == [None]
    assert store.heads(KEYS[:1]) == [None]
    assert store.damaged == 2


def test_damaged_scores_are_no_scores(store_in: Open, redis_server: RedisServer) -> None:
    store = store_in()
    store.put(BLOCKS[:1])
    redis_server.client().hset(store.names.scores(KEYS[0]), mapping={"s": b"nonsense", "h": b"x"})
    assert store.heads(KEYS[:1]) == [BLOCKS[0].head.rescored(b"", BLOCKS[0].head.hits)]


def test_records_are_checked(store_in: Open, redis_server: RedisServer) -> None:
    store, client = store_in(), redis_server.client()
    store.save_record(KEYS[0], NOBODY, b"one")
    store.save_record(KEYS[0], NOBODY, b"two")
    assert store_in().load_record(KEYS[0]) == b"two"
    name = store.names.record(KEYS[0])
    client.set(name, flipped(client.get(name), 8 * 20))
    assert store.load_record(KEYS[0]) is None
    assert store.damaged == 1
    store.drop_record(KEYS[0])
    assert not client.exists(name)
    assert store.sizes().records == 1  # as it was told last
    store.books.look()
    assert store.sizes().records == 0


def test_all_nodes_together_stay_within_the_limit(store_in: Open, redis_server: RedisServer) -> None:
    block = made_block(0, page_bytes=1024, depth=0)
    size = 3 * 1024 + KEY_BYTES_HELD + 400
    one, other = store_in(limit_bytes=10 * size), store_in(limit_bytes=10 * size)
    client = redis_server.client()
    for seed in range(60):
        store = (one, other)[seed % 2]
        store.put([made_block(seed, page_bytes=1024, depth=0)])
        held = [client.strlen(name) for name in client.keys(store.names.all("b").replace("{*}", "*"))]
        assert sum(held) <= 10 * size
    assert len(held) >= 8
    assert other.sizes().dropped >= 45
    assert one.get([block.head.key]) == [None]


def test_what_was_used_last_stays_and_a_block_goes_before_those_it_follows(store_in: Open) -> None:
    run = [made_block(seed, depth=seed) for seed in range(6)]
    store = store_in()
    store.put(run)
    store.put([made_block(50, depth=0)])
    store.heads([block.head.key for block in run[:3]])
    store.update([], 1)  # use is noted with the next write
    kept = store.sizes().bytes // 7 * 4
    gone = store.books.shrink(kept)
    assert [key for _, key in gone] == [run[5].head.key, run[4].head.key, run[3].head.key]


def test_unused_things_end_by_themselves(store_in: Open, redis_server: RedisServer) -> None:
    client = redis_server.client()
    store = store_in(ttl_s=100)
    store.put(BLOCKS[:2])
    store.save_record(KEYS[0], NOBODY, b"record")
    store.update([Scores(KEYS[0], b"scores", 1)], 1)
    for name in client.keys("*"):
        assert 0 < client.ttl(name) <= 200
    client.expire(store.names.block(KEYS[0]), 5)
    client.expire(store.names.block(KEYS[1]), 5)
    store.heads(KEYS[:1])
    store.update([], 2)
    assert client.ttl(store.names.block(KEYS[0])) > 50
    assert client.ttl(store.names.block(KEYS[1])) <= 5


def test_erasing_finds_all_of_a_tenant(store_in: Open, redis_server: RedisServer) -> None:
    mine, yours = b"m" * 16, b"y" * 16
    store = store_in()
    store.put([replace(block, head=replace(block.head, tenant=mine)) for block in BLOCKS[:3]])
    store.put([replace(block, head=replace(block.head, tenant=yours)) for block in BLOCKS[3:]])
    store.save_record(KEYS[0], mine, b"mine")
    store.save_record(KEYS[1], yours, b"yours")
    redis_server.client().delete(*store.names.books(0))  # what the books don't know is found too
    assert store.erase(mine) == 4
    assert store.contains(KEYS) == [False] * 3 + [True] * 3
    assert store.load_record(KEYS[0]) is None
    assert store.load_record(KEYS[1]) == b"yours"
    assert not [
        name for name in redis_server.client().keys("*") if KEYS[0].hex().encode() in name and b":l:" not in name
    ]


def test_dropped_blocks_are_gone_for_all(store_in: Open) -> None:
    one, other = store_in(), store_in()
    one.put(BLOCKS)
    other.drop([*KEYS[:2], bytes(32)])
    assert store_in().contains(KEYS) == [False, False, True, True, True, True]
    one.books.look()
    assert one.sizes().blocks == 4


def test_lookups_are_remembered_for_a_while(store_in: Open, redis_server: RedisServer) -> None:
    clock = Clock()
    store, client = store_in(clock=clock), redis_server.client()
    store_in().put(BLOCKS[:1])
    assert store.known(KEYS[:2]) == [False, False]
    asked = client.info("commandstats").get("cmdstat_exists", {"calls": 0})["calls"]
    for _ in range(5):
        assert store.contains(KEYS[:2]) == [True, False]
    assert client.info("commandstats")["cmdstat_exists"]["calls"] == asked + 2
    assert store.known(KEYS[:2]) == [True, False]
    store_in().put(BLOCKS[1:2])
    clock.now += 2
    assert store.contains(KEYS[:2]) == [True, True]


def test_prefixes_and_databases_keep_stores_apart(store_in: Open, redis_server: RedisServer) -> None:
    store_in().put(BLOCKS)
    for url in (f"{redis_server.url}?prefix=other", redis_server.url[:-1] + "1"):
        other = RedisStore(url, RedisSettings(timeout_s=5.0))
        other.open()
        assert not any(other.contains(KEYS))
        other.close()


def test_a_writer_that_was_put_out_writes_nothing(store_in: Open, redis_server: RedisServer) -> None:
    client = redis_server.client()
    client.set("lease", 4)
    writer, late = store_in(Fence("lease", 4)), store_in(Fence("lease", 3))
    assert writer.put(BLOCKS[:1]) == 1
    writer.save_record(KEYS[0], NOBODY, b"record")
    before = {name: client.dump(name) for name in client.keys("*")}
    for call in (
        lambda: late.put(BLOCKS[1:2]),
        lambda: late.update([Scores(KEYS[0], b"late", 1)], 9),
        lambda: late.drop(KEYS[:1]),
        lambda: late.save_record(KEYS[0], NOBODY, b"late"),
        lambda: late.drop_record(KEYS[0]),
        lambda: late.erase(NOBODY),
    ):
        with pytest.raises(StoreUnavailable) as caught:
            call()
        assert caught.value.kind == "fenced"
    assert {name: client.dump(name) for name in client.keys("*")} == before
    assert late.get(KEYS[:1])[0] is not None  # it may still read


def test_the_fence_is_checked_with_the_write_itself(store_in: Open, redis_server: RedisServer) -> None:
    client = redis_server.client()
    client.set("lease", 1)
    store = store_in(Fence("lease", 1))
    asked: list[int] = []
    held = store._held

    def held_until_asked() -> Fence | None:
        fence = held()
        asked.append(client.incr("lease"))  # the writer is paused here, and another one takes over
        return fence

    store._held = held_until_asked  # type: ignore[method-assign]
    for call in (lambda: store.put(BLOCKS[:1]), lambda: store.save_record(KEYS[0], NOBODY, b"late")):
        client.set("lease", 1)
        with pytest.raises(StoreUnavailable, match="another node writes"):
            call()
    assert len(asked) == 2
    assert not client.exists(store.names.block(KEYS[0]), store.names.record(KEYS[0]))


@pytest.mark.parametrize(
    "settings", [{"limit_bytes": 0}, {"ttl_s": 0}, {"timeout_s": 0.0}, {"connections": 1}, {"compression": "lz4"}]
)
def test_bad_settings_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        RedisSettings(**settings)  # type: ignore[arg-type]
