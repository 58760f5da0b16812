"""What the worker's side copies, reports and counts."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest
from tests.memory_store import MemoryStore

from kvpager.ports import Bytes
from kvpager.vllm.pages import Pages
from kvpager.vllm.plan import Load, Plan, Save
from kvpager.vllm.transfers import Transfers

SETTLED = 10.0
"""Seconds in which a load has certainly ended; nothing waits so long unless it is broken."""


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def layers(seed: int) -> list[Bytes]:
    return [np.random.default_rng([seed, layer]).integers(0, 256, (8, 16), dtype=np.uint8) for layer in range(3)]


def save(number: int, block: int, request: str = "a") -> Save:
    return Save(request, (key(number),), (b"",), block, number, b"tokens", bytes(16))


def stored(numbers: Sequence[int], store: MemoryStore) -> list[Bytes]:
    """A store with blocks of these numbers, each from vLLM's block of that number; what they came from."""
    source = layers(1)
    transfers = Transfers(store, Pages(source, "layout"))
    transfers.save(Plan(saves=[save(number, number) for number in numbers]))
    return source


def settle(transfers: Transfers) -> set[str]:
    """Names of the requests whose loads ended, when none goes on any more."""
    with transfers._changed:
        assert transfers._changed.wait_for(lambda: not transfers._going, SETTLED)
    return transfers.take_loaded()


def test_blocks_are_loaded_as_they_were_saved() -> None:
    store = MemoryStore()
    source, target = stored([1, 2, 3], store), layers(2)
    before = [layer.copy() for layer in target]
    transfers = Transfers(store, Pages(target, "layout"))
    transfers.load(Plan(loads=[Load("a", [(key(1),), (key(3),)], [5, 0])]))
    assert settle(transfers) == {"a"}
    assert transfers.take_lost() == set()
    for there, here, was in zip(source, target, before, strict=True):
        assert np.array_equal(here[5], there[1])
        assert np.array_equal(here[0], there[3])
        assert np.array_equal(here[[1, 2, 3, 4, 6, 7]], was[[1, 2, 3, 4, 6, 7]])
    counts = transfers.take_counts()
    assert (counts["loaded_blocks"], counts["loaded_bytes"], counts["lost_blocks"]) == (2, 96, 0)
    transfers.close()
    assert store.shelf.blocks[key(1)].head.hits == 2, "found, and told to be of use"
    assert store.shelf.blocks[key(2)].head.hits == 0


@pytest.mark.promise(4)
def test_a_loss_is_told_together_with_its_loads_end() -> None:
    """A load may end between the two calls of a step; told a step too early, its loss would be forgotten."""
    transfers = Transfers(MemoryStore(), Pages(layers(2), "layout"))
    assert transfers.take_loaded() == set()
    transfers.load(Plan(loads=[Load("a", [(key(1),), (key(2),)], [5, 0])]))
    with transfers._changed:
        assert transfers._changed.wait_for(lambda: not transfers._going, SETTLED)
    assert transfers.take_lost() == set()
    assert transfers.take_loaded() == {"a"}
    assert transfers.take_lost() == {5, 0}
    transfers.close()


@pytest.mark.promise(4)
@pytest.mark.parametrize("how", ["damaged", "missing", "layout", "broken", "raises"])
def test_a_block_that_fails_is_reported_with_all_behind_it(how: str) -> None:
    store = MemoryStore()
    stored(list(range(7)), store)
    target = layers(2)
    before = [layer.copy() for layer in target]
    transfers = Transfers(store, Pages(target, "other layout" if how == "layout" else "layout"))
    first = 5 if how in ("damaged", "missing") else 0
    if how == "damaged":
        store.damage(key(5))
    elif how == "missing":
        store.drop([key(5)])
    elif how == "broken":
        store.broken = True
    elif how == "raises":
        store.heads = None  # type: ignore[assignment]  # as a mistake in a store would
    transfers.load(Plan(loads=[Load("a", [(key(number),) for number in range(7)], [7, 6, 5, 4, 3, 2, 1])]))
    assert settle(transfers) == {"a"}
    lost = [7, 6, 5, 4, 3, 2, 1][first:]
    assert transfers.take_lost() == set(lost)
    assert transfers.take_lost() == set(), "once"
    for here, was in zip(target, before, strict=True):
        assert np.array_equal(here[lost], was[lost]), "nothing is written into a block that is lost"
    assert transfers.take_counts()["lost_blocks"] == len(lost)
    transfers.close()


def test_a_load_is_called_off_when_its_request_ends() -> None:
    store = MemoryStore()
    stored(list(range(7)), store)
    target, entered, gate = layers(2), threading.Event(), threading.Event()
    get = store.get

    def held(keys: Sequence[bytes]) -> list[Bytes | None]:
        entered.set()
        assert gate.wait(SETTLED)
        return get(keys)

    store.get = held  # type: ignore[method-assign]
    transfers = Transfers(store, Pages(target, "layout"))
    transfers.load(Plan(loads=[Load("a", [(key(number),) for number in range(7)], list(range(7)))]))
    assert entered.wait(SETTLED)
    transfers.begin(Plan(ended=["a", "unknown"]))
    assert transfers.take_loaded() == set(), "something is still being written"
    gate.set()
    assert settle(transfers) == {"a"}
    assert transfers.take_lost() == set()
    assert len(store.asked) < 7, "the rest was not read"
    transfers.close()


def test_a_step_with_nothing_to_compute_waits_for_what_is_loaded() -> None:
    store = MemoryStore()
    stored([1], store)
    transfers = Transfers(store, Pages(layers(2), "layout"))
    transfers.load(Plan(loads=[Load("a", [(key(1),)], [0])], idle=True))
    while not (ended := transfers.take_loaded()):
        transfers.load(Plan(idle=True))
    assert ended == {"a"}
    transfers.close()


def test_each_rank_takes_its_own_keys() -> None:
    store = MemoryStore()
    for rank in (0, 1):
        transfers = Transfers(store, Pages(layers(rank), "layout"), rank)
        transfers.save(Plan(saves=[Save("a", (key(10), key(11)), (b"", key(9)), 4, 0, b"t", bytes(16))]))
    assert np.array_equal(store.shelf.blocks[key(10)].payload[2], layers(0)[2][4])
    assert np.array_equal(store.shelf.blocks[key(11)].payload[2], layers(1)[2][4])
    assert store.shelf.blocks[key(11)].head.parent == key(9)


def test_what_is_there_is_not_copied_again() -> None:
    store = MemoryStore()
    stored([1], store)
    transfers = Transfers(store, Pages(layers(2), "layout"))
    transfers.save(Plan(saves=[save(1, 3)]))
    assert store.calls["put"] == 1
    assert "saved_blocks" not in transfers.take_counts()


def test_blocks_wait_in_their_order_until_there_is_room_and_no_longer_than_their_request_lives() -> None:
    store = MemoryStore(room=48)
    transfers = Transfers(store, Pages(layers(1), "layout"))
    store._room = 0
    transfers.save(Plan(saves=[save(1, 1), save(2, 2), save(3, 3, "b")]))
    assert not store.shelf.blocks
    transfers.begin(Plan(ended=["c"]))
    transfers.begin(Plan(ended=["a"]))
    assert transfers.take_counts()["skipped_blocks"] == 2
    store._room = 48
    transfers.save(Plan())
    assert list(store.shelf.blocks) == [key(3)]


def test_a_request_that_ends_is_saved_if_there_is_room_by_now() -> None:
    store = MemoryStore(room=48)
    transfers = Transfers(store, Pages(layers(1), "layout"))
    store._room = 0
    transfers.save(Plan(saves=[save(1, 1)]))
    store._room = 48
    transfers.begin(Plan(ended=["a"]))
    assert list(store.shelf.blocks) == [key(1)]
    assert transfers.take_counts().get("skipped_blocks", 0) == 0


def test_the_store_is_told_how_much_it_may_take_of_the_processors() -> None:
    told: list[float] = []
    transfers = Transfers(MemoryStore(), Pages(layers(1), "layout"), yields=told.append)
    for plan in (Plan(prompts=True), Plan(prompts=True), Plan(), Plan(idle=True)):
        transfers.begin(plan)
        transfers.save(plan)
    nothing, again, little, all_of_it = told
    assert (nothing, again, all_of_it) == (0, 0, 1), "between two parts of a prompt nothing is written either"
    assert 0 < little < 0.1


def test_gauges_are_told_when_they_change_and_the_store_is_asked_once_a_second() -> None:
    store, now = MemoryStore(), [0.0]
    transfers = Transfers(store, Pages(layers(1), "layout"), clock=lambda: now[0])
    assert transfers.take_counts()["store_usable"] == 1
    store.broken = True
    assert transfers.take_counts() == {}
    now[0] = 1.5
    assert transfers.take_counts() == {"store_usable": 0}
    now[0] = 3.0
    assert transfers.take_counts() == {}
