"""A store in a Redis Cluster, and in a primary that sentinels watch: also when one of them is gone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from kvpager.stored import Scores
from kvpager.stores import RedisSettings, open_store, redis_tier
from kvpager.stores.limits import Limits
from kvpager.stores.publishing import Publishing
from kvpager.stores.redis import RedisStore
from kvpager.stores.redis_desk import RedisDesk
from tests.redis_rig import RedisCluster, RedisSentinel, until
from tests.stores.fake import NOBODY, SETTLED, block
from tests.stores.made import made_block

BLOCKS = [made_block(seed) for seed in range(60)]
KEYS = [block.head.key for block in BLOCKS]
TIMEOUT_S = 5.0

pytestmark = pytest.mark.slow  # a cluster, or sentinels, take two seconds to come together


@pytest.fixture
def sharded(redis_cluster: RedisCluster) -> Iterator[RedisStore]:
    with closing(RedisStore(redis_cluster.url, RedisSettings(timeout_s=TIMEOUT_S))) as store:
        store.open()
        yield store


def found(store: RedisStore) -> list[bool]:
    """Which blocks are found; each must be right."""
    payloads = store.get(KEYS)
    for one, payload in zip(BLOCKS, payloads, strict=True):
        assert payload is None or np.array_equal(payload, one.payload)
    return [payload is not None for payload in payloads]


def test_a_cluster_is_a_store(sharded: RedisStore, redis_cluster: RedisCluster) -> None:
    assert sharded.put(BLOCKS) == len(BLOCKS)
    assert sharded.contains(KEYS) == [True] * len(KEYS)
    assert all(found(sharded))
    sharded.update([Scores(KEYS[0], b"newer", 1)], 3)
    with closing(RedisStore(redis_cluster.url, RedisSettings(timeout_s=TIMEOUT_S))) as other:
        other.open()
        assert other.tick == 3
        assert other.sizes().blocks == len(BLOCKS)
        assert other.heads(KEYS[1:]) == [one.head for one in BLOCKS[1:]]
        assert other.heads(KEYS[:1]) == [BLOCKS[0].head.rescored(b"newer", BLOCKS[0].head.hits + 1)]
        assert other.claim(KEYS[0])
        assert not sharded.claim(KEYS[0])
        other.save_record(KEYS[0], NOBODY, b"record")
        assert sharded.load_record(KEYS[0]) == b"record"
        sharded.save_record(KEYS[0], NOBODY, b"not the one that writes")
        assert other.load_record(KEYS[0]) == b"record"
    with closing(RedisDesk(redis_cluster.url, limit_bytes=2**40)) as desk:
        assert desk.verify().blocks == len(BLOCKS)
        assert desk.prune(older_seconds=1000) == 0
    held = [server.client().dbsize() for server in redis_cluster.servers]
    assert min(held) > 0
    assert sharded.erase(NOBODY) == len(BLOCKS) + 1
    assert sharded.books.forget(b"b", []) is None
    assert not any(found(sharded))


def test_a_cluster_stays_within_its_limit(redis_cluster: RedisCluster) -> None:
    blocks = [made_block(seed, page_bytes=1024, depth=0) for seed in range(300)]
    limit = 100 * 4000
    with closing(RedisStore(redis_cluster.url, RedisSettings(limit_bytes=limit, timeout_s=TIMEOUT_S))) as store:
        for start in range(0, len(blocks), 10):
            store.put(blocks[start : start + 10])
    with closing(RedisDesk(redis_cluster.url, limit_bytes=2**40)) as desk:
        sizes = desk.sizes()
    assert limit // 2 < sizes.bytes <= limit


def test_a_node_that_dies_takes_its_share_and_no_more(sharded: RedisStore, redis_cluster: RedisCluster) -> None:
    sharded.put(BLOCKS)
    owners = redis_cluster.owners()
    client = redis_cluster.client()
    theirs = [owners[client.keyslot(sharded.names.block(key))] for key in KEYS]
    redis_cluster.servers[1].kill()
    expected = [owner != 1 for owner in theirs]
    until(lambda: found(sharded) == expected, "more is missed than what the node had")
    assert [head is not None for head in sharded.heads(KEYS)] == expected
    assert sharded.contains(KEYS) == expected
    more = [made_block(seed) for seed in range(100, 140)]
    assert 0 < sharded.put(more) < len(more)
    for key in KEYS[:12]:  # wherever their claims belong
        assert sharded.claim(key)
        sharded.load_record(key)
    redis_cluster.servers[1].start()
    until(lambda: sharded.put(BLOCKS) + 1 and all(found(sharded)), "what was missed is not stored again")


def test_a_node_that_hangs_is_missed_alone(redis_cluster: RedisCluster) -> None:
    far = redis_tier(redis_cluster.url, RedisSettings(timeout_s=0.5), Publishing("all"))
    limits = Limits(pause_s=0.05, longest_pause_s=0.1, linger_s=0.001, close_s=0.5)
    chain = open_store(None, limit_bytes=2**30, limits=limits, far=far)
    assert chain.put(BLOCKS) == len(BLOCKS)
    assert chain.flush(SETTLED)
    owners, client = redis_cluster.owners(), redis_cluster.client()
    names = RedisStore(redis_cluster.url).names
    expected = [owners[client.keyslot(names.block(key))] != 2 for key in KEYS]
    redis_cluster.servers[2].pause()
    until(lambda: [one is not None for one in chain.get(KEYS)] == expected, "a hung node takes others with it")
    redis_cluster.servers[2].resume()
    until(lambda: all(one is not None for one in chain.get(KEYS)), "the node is not asked again")
    chain.close()


def test_after_a_failover_the_new_primary_is_used(redis_sentinel: RedisSentinel) -> None:
    far = redis_tier(redis_sentinel.url, RedisSettings(timeout_s=0.5), Publishing("all"))
    limits = Limits(pause_s=0.05, longest_pause_s=0.2, linger_s=0.001, close_s=0.5)
    chain = open_store(None, limit_bytes=2**30, limits=limits, far=far)
    blocks = [block(number) for number in range(20)]
    assert chain.put(blocks) == len(blocks)
    assert chain.flush(SETTLED)
    primary, keys = redis_sentinel.primary, [one.head.key for one in blocks]
    replica = next(server for server in redis_sentinel.servers if server is not primary)
    held = primary.client().dbsize()
    until(lambda: replica.client().dbsize() == held, "the replica does not follow")
    primary.kill()
    until(lambda: all(one is not None for one in chain.get(keys)), "what the replica has is not found")

    def stored() -> bool:
        chain.put([block(100)])
        chain.flush(0.5)
        return chain.get([block(100).head.key])[0] is not None and chain.stats().state == "ok"

    until(stored, "the new primary is not written to")
    chain.close()
