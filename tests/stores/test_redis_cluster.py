"""The store on a real cluster of three nodes: keys spread, slots move under it, a node that dies costs its share."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redis.crc import key_slot

from kvpager.build import StoreOptions
from kvpager.stored import Scores, StoredBlock
from kvpager.stores.redis import RedisSettings, RedisStore
from kvpager.stores.redis_names import Names
from tests.redis_rig import SLOTS, RedisCluster, until
from tests.server.harness import LiveServer, real_server
from tests.small_llm import save_folder
from tests.stores.made import made_block

pytestmark = pytest.mark.slow  # a cluster takes two seconds to come together

NAMES = Names("kvpager")
MINE = b"mine".ljust(16, b"\0")


@pytest.fixture
def store(redis_cluster: RedisCluster) -> Iterator[RedisStore]:
    made = RedisStore(redis_cluster.url, RedisSettings(timeout_s=2.0))
    yield made
    made.close()


def slot_of(block: StoredBlock) -> int:
    return int(key_slot(NAMES.block(block.head.key).encode()))


def blocks(count: int) -> list[StoredBlock]:
    return [made_block(seed, pages=2, tenant=MINE, parent=b"", depth=0) for seed in range(count)]


def in_one_slot(count: int) -> list[StoredBlock]:
    """Blocks whose keys a cluster puts together."""
    slot = slot_of(made_block(0))
    keys = (hashlib.sha256(b"slot %d" % number).digest() for number in range(10**9))
    found = (key for key in keys if key_slot(NAMES.block(key).encode()) == slot)
    made = [made_block(number, pages=2, parent=b"", depth=0) for number in range(count)]
    return [StoredBlock(replace(block.head, key=next(found)), block.payload) for block in made]


def keys(blocks: Sequence[StoredBlock]) -> list[bytes]:
    return [block.head.key for block in blocks]


def found(store: RedisStore, blocks: Sequence[StoredBlock]) -> list[bool]:
    """Which blocks are read; one that is has the bytes that were put."""
    pages = store.get(keys(blocks))
    for block, got in zip(blocks, pages, strict=True):
        assert got is None or np.array_equal(got, block.payload)
    return [got is not None for got in pages]


def test_keys_spread_within_a_tenth_of_even(store: RedisStore, redis_cluster: RedisCluster) -> None:
    made = blocks(3000)
    assert store.put(made) == len(made)
    counts = [len(list(server.client().scan_iter("kvpager:b:*", 500))) for server in redis_cluster.servers]
    assert sum(counts) == len(made)
    assert max(abs(count - 1000) for count in counts) <= 100


@pytest.mark.parametrize("nodes", [3, 10, 16])
def test_more_keys_spread_over_any_number_of_nodes(nodes: int) -> None:
    count = 2000 * nodes
    names = (NAMES.block(hashlib.sha256(b"%d" % number).digest()).encode() for number in range(count))
    shares = Counter(key_slot(name) * nodes // SLOTS for name in names)
    assert max(abs(share - 2000) for share in shares.values()) <= 200


@pytest.mark.promise(4)
def test_a_slot_moves_while_it_is_read_and_written(store: RedisStore, redis_cluster: RedisCluster) -> None:
    early, late = in_one_slot(40)[:6], in_one_slot(40)[6:]
    assert store.put(early) == len(early)
    slot = slot_of(early[0])
    source, steps = redis_cluster.owners()[slot], 0

    def between() -> None:
        nonlocal steps
        new = late[steps]
        store.put([new])
        store.update([Scores(new.head.key, b"later", 1)], steps + 1)
        assert all(found(store, [*early, *late[: steps + 1]])), f"not all was found after step {steps}"
        heads = store.heads(keys([*early, new]))
        assert all(head is not None for head in heads)
        steps += 1

    redis_cluster.migrate(slot, (source + 1) % 3, between)
    assert steps >= 10  # its keys moved one by one
    assert redis_cluster.owners()[slot] == (source + 1) % 3
    assert all(found(store, [*early, *late[:steps]]))
    store.drop(keys(early))
    assert not any(found(store, early))


@pytest.mark.promise(4)
def test_a_node_that_dies_costs_its_share_and_nothing_fails(store: RedisStore, redis_cluster: RedisCluster) -> None:
    made, owners = blocks(300), redis_cluster.owners()
    assert store.put(made) == len(made)
    store.save_record(b"r" * 32, MINE, b"a record")
    lost = [owners[slot_of(block)] == 1 for block in made]
    assert 70 < sum(lost) < 130
    redis_cluster.servers[1].kill()
    assert found(store, made) == [not gone for gone in lost]
    assert [head is None for head in store.heads(keys(made))] == lost
    assert store.load_record(b"r" * 32) in (None, b"a record")
    # what is new is stored where it can be, before and after the others know that the node is gone
    more = [made_block(seed, pages=2, parent=b"", depth=0) for seed in range(1000, 1100)]
    there = [owners[slot_of(block)] != 1 for block in more]
    assert store.put(more) == sum(there)
    survivor = redis_cluster.servers[0].client()
    until(lambda: "fail" in str(survivor.execute_command("CLUSTER", "NODES")), "the node was not given up")
    assert found(store, more) == there
    assert found(store, made) == [not gone for gone in lost]


@pytest.mark.promise(4)
def test_a_node_that_comes_back_empty_is_used_again(store: RedisStore, redis_cluster: RedisCluster) -> None:
    made, owners = blocks(60), redis_cluster.owners()
    store.put(made)
    redis_cluster.servers[2].kill()
    found(store, made)
    redis_cluster.servers[2].restart()
    theirs = [block for block in made if owners[slot_of(block)] == 2]

    def again() -> bool:
        store.put(theirs)
        return all(found(store, theirs))

    until(again, "what the node has was not stored again")
    assert all(found(store, made))


@pytest.mark.promise(4)
def test_a_node_that_hangs_is_left_alone(store: RedisStore, redis_cluster: RedisCluster) -> None:
    made, owners = blocks(60), redis_cluster.owners()
    store.put(made)
    redis_cluster.servers[0].pause()
    expected = [owners[slot_of(block)] != 0 for block in made]
    assert found(store, made) == expected
    assert found(store, made) == expected  # without waiting for it once more
    redis_cluster.servers[0].resume()
    until(lambda: all(found(store, made)), "the node was not used again")


def answer(server: LiveServer, number: int) -> tuple[str, int]:
    """What a prompt of its own is answered with, and how many of its tokens had been computed before."""
    prompt = f"{number}: the cat sat on the mat and thought of another mat. " * 4
    told = server.complete(prompt, max_tokens=8, temperature=0, ignore_eos=True)
    return told["choices"][0]["text"], told["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.promise(4)
def test_no_request_fails_while_slots_move_and_a_node_dies(redis_cluster: RedisCluster, tmp_path: Path) -> None:
    folder = str(save_folder(tmp_path / "model"))
    options = StoreOptions(url=redis_cluster.url, publish="all", timeout_s=2.0)
    with real_server(folder, store=options) as computes:
        expected = [answer(computes, number)[0] for number in range(12)]
        clients = [server.client() for server in redis_cluster.servers]
        until(lambda: sum(_blocks(client) for client in clients) > 100, "nothing was published")
    with real_server(folder, store=options) as reads:
        got = [answer(reads, number) for number in range(4)]
        names = iter(clients[0].scan_iter("kvpager:b:*"))
        for number in range(4, 8):
            slot = int(key_slot(next(names)))
            redis_cluster.migrate(slot, 1, lambda: clients[0].ping())
            got.append(answer(reads, number))
        redis_cluster.servers[2].kill()
        got += [answer(reads, number) for number in range(8, 12)]
    assert [text for text, _ in got] == expected
    for stage in (got[:4], got[4:8], got[8:]):
        assert sum(cached for _, cached in stage) > 0


def _blocks(client: Any) -> int:
    return len(list(client.scan_iter("kvpager:b:*", 500)))
