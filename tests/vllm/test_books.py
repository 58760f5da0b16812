"""What the scheduler's side finds, loads and offers."""

from __future__ import annotations

import numpy as np
import pytest
from tests.memory_store import MemoryStore
from tests.vllm.fake import SIZE, Request

from kvpager.core.blocks import KeyMaker, packed, tenant
from kvpager.stored import BlockHead, StoredBlock
from kvpager.vllm.books import Books

TOKENS = list(range(100, 118))  # four blocks and two tokens


def books(store: MemoryStore, ranks: int = 1) -> Books:
    return Books(store, SIZE, [KeyMaker(f"rank {rank}", "") for rank in range(ranks)])


def keys(tokens: list[int], salt: bytes = b"", rank: int = 0) -> list[bytes]:
    found, parent = [], KeyMaker.root(salt)
    for start in range(0, len(tokens) // SIZE * SIZE, SIZE):
        parent = KeyMaker(f"rank {rank}", "").key(parent, packed(tokens[start : start + SIZE]), False)
        found.append(parent)
    return found


def put(store: MemoryStore, *wanted: bytes) -> None:
    for key in wanted:
        head = BlockHead(key, b"", bytes(16), 0, b"", False, "", 1, 1)
        store.put([StoredBlock(head, np.zeros((1, 1), np.uint8))])


def test_whole_blocks_are_found_up_to_the_first_that_is_missing() -> None:
    store = MemoryStore()
    put(store, *keys(TOKENS)[:2], *keys(TOKENS)[3:])
    assert books(store).matched(Request("a", TOKENS), 0) == 2 * SIZE
    assert books(store).matched(Request("a", TOKENS), SIZE) == SIZE
    assert books(store).matched(Request("a", TOKENS), 3 * SIZE) == SIZE, "vLLM has the missing one itself"
    assert books(store).matched(Request("a", TOKENS), 4 * SIZE) == 0


def test_the_last_token_is_left_to_compute() -> None:
    store = MemoryStore()
    put(store, *keys(TOKENS))
    assert books(store).matched(Request("a", TOKENS[: 4 * SIZE]), 0) == 3 * SIZE
    assert books(store).matched(Request("a", TOKENS[: 4 * SIZE + 1]), 0) == 4 * SIZE


def test_a_tenant_finds_its_own_only() -> None:
    store = MemoryStore()
    put(store, *keys(TOKENS, b"mine"))
    assert books(store).matched(Request("a", TOKENS, cache_salt="mine"), 0) == 4 * SIZE
    assert books(store).matched(Request("b", TOKENS, cache_salt="yours"), 0) == 0
    assert books(store).matched(Request("c", TOKENS), 0) == 0


def test_a_block_is_there_when_all_ranks_have_it() -> None:
    store = MemoryStore()
    put(store, *keys(TOKENS), *keys(TOKENS, rank=1)[:3])
    assert books(store, ranks=2).matched(Request("a", TOKENS), 0) == 3 * SIZE


@pytest.mark.parametrize(
    "more", [{"lora_request": object()}, {"mm_features": [object()]}, {"prompt_embeds": object()}, {"resumable": True}]
)
def test_requests_whose_tokens_do_not_say_all_are_left_alone(more: dict[str, object]) -> None:
    store = MemoryStore()
    put(store, *keys(TOKENS))
    request = Request("a", TOKENS, **more)
    found = books(store)
    assert found.matched(request, 0) == 0
    assert found.plan({"a": len(TOKENS)}, lambda name: list(range(5)), ()).saves == []


def test_nothing_is_found_or_saved_before_the_workers_have_told_who_they_are_or_after_a_reset() -> None:
    store = MemoryStore()
    put(store, *keys(TOKENS))
    found = books(store)
    found.makers = ()
    assert found.matched(Request("a", TOKENS), 0) == 0
    found = books(store)
    assert found.matched(Request("a", TOKENS), 0) > 0
    found.forget()
    assert found.matched(Request("a", TOKENS), 0) == 0
    assert found.plan({"a": len(TOKENS)}, lambda name: list(range(5)), ()).saves == []


def test_what_was_promised_is_loaded_into_the_blocks_behind_vllms_own() -> None:
    store = MemoryStore()
    put(store, *keys(TOKENS))
    found, request = books(store), Request("a", TOKENS)
    assert found.matched(request, SIZE) == 3 * SIZE
    found.allocated(request, [7, 3, 9, 4], 3 * SIZE)
    (load,) = found.plan({}, lambda name: [], ()).loads
    assert [key for (key,) in load.keys] == keys(TOKENS)[1:]
    assert load.blocks == [3, 9, 4]
    assert not found.plan({}, lambda name: [], ()).loads, "once"


def test_a_request_whose_load_failed_is_computed() -> None:
    store = MemoryStore()
    put(store, *keys(TOKENS))
    found, request, other = books(store), Request("a", TOKENS), Request("b", TOKENS)
    for one, blocks in ((request, [1, 2, 3, 4]), (other, [5, 6, 7, 8])):
        found.allocated(one, blocks, found.matched(one, 0))
    found.failed({3})
    assert found.matched(request, 0) == 0
    assert found.matched(other, 0) == 4 * SIZE
    found.loaded("b")
    found.failed({6})
    assert found.matched(other, 0) == 4 * SIZE, "its blocks have another owner by now"


def test_each_full_block_is_offered_once_and_again_after_a_preemption() -> None:
    found, request = books(MemoryStore()), Request("a", TOKENS, cache_salt="s")
    found.matched(request, 0)
    blocks = [5, 6, 7, 8, 9]

    def offered(count: int, ended: tuple[str, ...] = ()) -> list[tuple[int, int]]:
        plan = found.plan({"a": count}, lambda name: blocks, ended)
        request.num_computed_tokens += count
        return [(save.depth, save.block) for save in plan.saves]

    assert offered(6) == [(0, 5)]
    assert offered(1) == []
    assert offered(8) == [(1, 6), (2, 7)]
    request.num_computed_tokens = 0
    assert offered(SIZE, ended=("a",)) == [(0, 5)]
    request.num_computed_tokens = 17
    assert offered(9) == [(1, 6), (2, 7), (3, 8)], "tokens that are not known yet are not offered"


def test_an_offer_says_all_that_is_stored_of_a_block() -> None:
    found, request = books(MemoryStore()), Request("a", TOKENS, cache_salt="s")
    found.matched(request, 0)
    first, second = found.plan({"a": 2 * SIZE}, lambda name: [3, 8], ("b",)).saves
    assert first.parents == (KeyMaker.root(b"s"),)
    assert (first.keys, second.parents) == ((keys(TOKENS, b"s")[0],),) * 2
    assert second.tokens == packed(TOKENS[SIZE : 2 * SIZE])
    assert second.tenant == tenant(b"s")


def test_what_ended_is_not_followed_any_more() -> None:
    found, request = books(MemoryStore()), Request("a", TOKENS)
    found.matched(request, 0)
    found.finished("a")
    plan = found.plan({}, lambda name: [], {"a"})
    assert (list(plan.ended), plan.saves, plan.idle) == (["a"], [], True)
