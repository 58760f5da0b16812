"""Random histories of a small vLLM: no step ever attends to a wrong page, and no block is lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.memory_store import MemoryStore, Shelf
from tests.vllm.fake import LAYERS, SIZE, TOKEN_BYTES, FakeVLLM, Request

BLOCK_BYTES = LAYERS * SIZE * TOKEN_BYTES
STEMS = [[0] * 22, [0] * 9 + [1] * 13]  # of few tokens, so that prompts share their beginnings
PROMPTS = st.builds(lambda stem, length: stem[:length], st.sampled_from(STEMS), st.integers(1, 22) | st.just(14))
ARRIVALS = st.tuples(PROMPTS, st.integers(0, 9), st.sampled_from([None, None, "one"]))
OTHERS = ["step", "step", "restart", "restart", "damage", "damage", "abort", "break", "mend", "drop", "full", "space"]
EVENTS = st.lists(st.one_of(ARRIVALS, st.sampled_from(OTHERS)), min_size=8, max_size=40)


@pytest.mark.promise(4)
@given(EVENTS)
@settings(max_examples=200)
def test_whatever_comes_no_step_reads_a_wrong_page(events: list[object]) -> None:
    store = MemoryStore(Shelf())
    vllm = FakeVLLM(store)
    for number, event in enumerate(events):
        if isinstance(event, tuple):
            tokens, wanted, salt = event
            vllm.add(Request(str(number), list(tokens), wanted, salt))
        elif event == "step":
            vllm.step()
        elif event == "abort" and vllm.waiting + vllm.running:
            request = (vllm.waiting + vllm.running)[number % len(vllm.waiting + vllm.running)]
            if not request.aborted:
                vllm.abort(request)
        elif event == "restart":
            vllm.run()
            vllm.transfers.close()
            store = MemoryStore(store.shelf)
            vllm = FakeVLLM(store)
        elif event in ("break", "mend"):
            store.broken = event == "break"
        elif event in ("full", "space"):
            store._room = 0 if event == "full" else 2**62
        elif event in ("damage", "drop") and store.shelf.blocks:
            key = sorted(store.shelf.blocks)[number % len(store.shelf.blocks)]
            store.damage(key) if event == "damage" else store.drop([key])
    vllm.run()
    assert sorted(vllm.free) == list(range(12)), "blocks were lost"
    assert not vllm.transfers._offered
    vllm.transfers.close()


def test_a_block_that_found_no_room_is_offered_until_its_request_ends() -> None:
    store = MemoryStore(room=BLOCK_BYTES)
    vllm = FakeVLLM(store)
    store._room = 0
    request = vllm.add(Request("a", [1] * 9, wanted=3))
    vllm.step()
    assert not store.shelf.blocks
    store._room = BLOCK_BYTES
    vllm.step()
    assert len(store.shelf.blocks) == 2
    store._room = 0
    vllm.run()
    assert request.num_computed_tokens == 12
    assert len(store.shelf.blocks) == 2
    assert vllm.transfers.take_counts()["skipped_blocks"] == 1
    vllm.transfers.close()


def test_preempted_requests_are_found_in_the_store_when_they_come_back() -> None:
    store = MemoryStore()
    vllm = FakeVLLM(store, blocks=8)
    requests = [vllm.add(Request(str(seed), [seed] * 14, wanted=10)) for seed in (1, 2)]
    vllm.run()
    assert vllm.preemptions
    assert max(request.cached for request in requests) > 0
    vllm.transfers.close()
