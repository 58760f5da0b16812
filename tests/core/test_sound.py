"""A saved sequence whose parts don't fit together is nothing to go on from: never an error, never another answer."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpager.core.saving import SavedSequence
from kvpager.kernels.native import NativeKernel
from kvpager.kernels.reference import ReferenceKernel
from tests.core.fed import SMALL, Fed, text
from tests.forged import forged
from tests.memory_store import MemoryStore

PROMPT = text(75)
ANSWERED = PROMPT + text(30, seed=1)
NEXT = ANSWERED + text(20, seed=2)
KERNELS = {"reference": ReferenceKernel, "native": NativeKernel}


def kind(kernel: str, dtype: str, budget: int | None) -> dict[str, Any]:
    return {"kernel": KERNELS[kernel], "shape": replace(SMALL, dtype=dtype), "budget": budget}


@cache
def saved(kernel: str, dtype: str, budget: int | None, length: int) -> tuple[MemoryStore, SavedSequence, Any]:
    """A store, what a sequence of so many tokens left, and what it gives to those that follow."""
    store = MemoryStore()
    fed = Fed(store, **kind(kernel, dtype, budget))
    sequence = fed.open(PROMPT)
    fed.run(sequence, PROMPT)
    fed.run(sequence, ANSWERED[:length], singly=True)
    left = fed.pager.save(sequence)
    outputs = fed.run(sequence, NEXT)
    fed.pager.shutdown()
    return store, left, outputs


@pytest.mark.promise(4)
@settings(max_examples=400, deadline=None)
@given(
    st.data(),
    st.sampled_from(sorted(KERNELS)),
    st.sampled_from(["float32", "bfloat16", "int8"]),
    st.sampled_from([None, 48]),
    st.sampled_from([104, 105]),
)
def test_a_forged_sequence_is_no_sequence(
    data: st.DataObject, kernel: str, dtype: str, budget: int | None, length: int
) -> None:
    store, left, wanted = saved(kernel, dtype, budget, length)
    what, (header, arrays) = forged(data.draw, dict(left.header), dict(left.arrays))
    fed = Fed(store.reopened(), **kind(kernel, dtype, budget))
    restored = fed.pager.restore(SavedSequence(header, arrays), NEXT)
    fed.pager.check()
    if restored is None:
        assert fed.pager.stats().sequences == 0
        return
    whole = restored.length == length
    outputs = fed.run(restored, NEXT)
    if what == "slots":
        pass  # its numbers are believed, as those of pages are
    elif whole:
        np.testing.assert_array_equal(outputs, wanted)
    elif budget is None:  # else what comes in other tiles selects otherwise
        np.testing.assert_allclose(outputs[-len(wanted) :], wanted, atol=1e-5)
    fed.pager.close(restored)
    fed.pager.check()


@pytest.mark.parametrize("kernel", sorted(KERNELS))
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
def test_an_open_block_of_no_numbers_is_none(kernel: str, dtype: str) -> None:
    store, left, _ = saved(kernel, dtype, None, 105)
    broken = left.arrays["slots"].copy()
    broken[0] = 0xFF
    fed = Fed(store.reopened(), **kind(kernel, dtype, None))
    assert fed.pager.restore(replace(left, arrays={**left.arrays, "slots": broken}), NEXT) is None
    fed.pager.check()
    assert fed.pager.stats().sequences == 0


def test_keys_of_another_text_or_tenant_are_told() -> None:
    """Blocks that follow on a sequence get their names from its keys: other texts' would be found under them."""
    store, left, _ = saved("reference", "float32", None, 105)
    other = Fed(store.reopened())
    sequence = other.open(text(90, seed=7))
    other.run(sequence, text(90, seed=7))
    keys = left.arrays["keys"].copy()
    keys[-1] = other.pager.save(sequence).arrays["keys"][-1]
    for made, salt in ((replace(left, arrays={**left.arrays, "keys": keys}), b""), (left, b"another tenant")):
        assert other.pager.restore(made, NEXT, salt) is None
    other.pager.check()


@pytest.mark.parametrize("change", [{"parent": bytes(32)}, {"depth": 3}, {"tokens": bytes(64)}, {"approximate": False}])
def test_a_block_of_an_answer_that_follows_on_another_is_not_taken(change: dict[str, Any]) -> None:
    """The keys of an answer's own blocks are made of their pages: what they follow on is looked at."""
    store, left, _ = saved("reference", "float32", 48, 105)
    key = left.arrays["keys"][-1].tobytes()
    shelf = MemoryStore(replace(store.shelf, blocks=dict(store.shelf.blocks), claims={}))
    block = shelf.shelf.blocks[key]
    shelf.shelf.blocks[key] = replace(block, head=replace(block.head, **change))
    fed = Fed(shelf, budget=48)
    restored = fed.pager.restore(left, NEXT)
    assert restored.length == 96
    fed.pager.check()


@pytest.mark.parametrize("budget", [None, 48])
@pytest.mark.parametrize("length", [8, 17, 64, 75, 76, 97, 104])
def test_what_was_forked_and_cropped_goes_on_as_well(length: int, budget: int | None) -> None:
    fed = Fed(MemoryStore(), budget=budget)
    sequence = fed.open(PROMPT)
    fed.run(sequence, PROMPT)
    fed.run(sequence, ANSWERED, singly=True)
    fork = fed.pager.fork(sequence)
    fed.pager.crop(fork, length)
    for one in (fork, sequence):
        left = fed.pager.save(one)
        again = fed.pager.restore(left, [*ANSWERED[: one.length], 5])
        assert again.length == one.length
        fed.pager.close(again)
    fed.pager.check()
