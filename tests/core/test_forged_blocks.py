"""A stored block that somebody forged, its checksums right, is a miss, or what it says of itself is not believed."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpager.errors import PageLost
from kvpager.kernels.native import NativeKernel
from kvpager.kernels.reference import ReferenceKernel
from kvpager.stored import BlockHead, StoredBlock
from tests.core.fed import Fed, text
from tests.memory_store import MemoryStore

PROMPT = text(75)
NEXT = PROMPT + text(60, seed=2)
KERNELS = {"reference": ReferenceKernel, "native": NativeKernel}
NAMES = [field.name for field in fields(BlockHead) if field.name not in ("key", "digest")]
WHOLE = [0, 1, 3, 2**31, 2**63 - 1]
SHAPES = [(0, 256), (1, 512), (3, 512), (5, 512), (8, 512), (4, 256), (4, 511), (2, 1024)]


def fed(store: MemoryStore, kernel: str, budget: int | None, pool: int) -> Fed:
    return Fed(store, kernel=KERNELS[kernel], budget=budget, pool=pool)


@cache
def left(kernel: str, budget: int | None) -> tuple[MemoryStore, Any]:
    """A store with a prompt's blocks, and what the pager gives that goes on with them."""
    store = MemoryStore()
    one = fed(store, kernel, budget, 400)
    sequence = one.open(PROMPT)
    one.run(sequence, PROMPT)
    one.pager.shutdown()
    again = fed(store.reopened(), kernel, budget, 400)
    sequence = again.open(NEXT)
    assert sequence.length == 64 + 8 * (budget is None)
    outputs = again.run(sequence, NEXT)
    again.pager.shutdown()
    return store, outputs


def changed(data: st.DataObject, block: StoredBlock) -> StoredBlock:
    """The block with one thing of its head, or its payload's shape, as it can't have been."""
    name = data.draw(st.sampled_from([*NAMES, "payload"]))
    if name == "payload":
        shape = data.draw(st.sampled_from(SHAPES))
        return replace(block, payload=np.zeros(shape, np.uint8))
    value = getattr(block.head, name)
    if name == "scores":
        mark = value.index(b"\0") + 1
        size = data.draw(st.sampled_from([len(value) - mark, 0, 1, len(value)]))
        fill = st.sampled_from([b"\xff", b"\x7f", b"\x80", b"\x00\x80", b"\xff\x7f"])
        made: Any = value[:mark] + (data.draw(fill) * size)[:size]
    elif isinstance(value, bool):
        made = not value
    elif isinstance(value, int):
        made = data.draw(st.sampled_from([one for one in WHOLE if one != value]))
    elif isinstance(value, str):
        made = data.draw(st.sampled_from(["", value + "x"]))
    else:
        made = data.draw(st.sampled_from([b"", bytes(len(value)), value + b"x", value[:-1]]))
    return replace(block, head=replace(block.head, **{name: made}))


@pytest.mark.promise(4)
@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from(sorted(KERNELS)), st.sampled_from([None, 48]), st.sampled_from([40, 400]))
def test_a_forged_block_is_a_miss_or_changes_nothing(
    data: st.DataObject, kernel: str, budget: int | None, pool: int
) -> None:
    store, wanted = left(kernel, budget)
    shelf = replace(store.shelf, blocks=dict(store.shelf.blocks), sums={}, claims={}, tick=store.shelf.tick)
    key = data.draw(st.sampled_from(sorted(shelf.blocks)))
    shelf.blocks[key] = changed(data, shelf.blocks[key])
    one = fed(Unchecked(shelf), kernel, budget, pool)
    outputs = read(one)
    size = min(len(outputs), len(wanted))
    if budget is None:
        np.testing.assert_allclose(outputs[-size:], wanted[-size:], atol=1e-5)
    else:
        np.testing.assert_array_equal(outputs[-size:], wanted[-size:])


def read(one: Fed) -> Any:
    """The outputs of what follows on what was found, begun anew where pages turn out to be lost."""
    for _ in range(12):
        sequence = one.open(NEXT)
        try:
            outputs = one.run(sequence, NEXT)
        except PageLost:
            one.pager.close(sequence)
            one.pager.check()
            continue
        one.pager.close(sequence)
        one.pager.shutdown()
        return outputs
    raise AssertionError("pages are lost again and again")


class Unchecked(MemoryStore):
    """Hands out what is on the shelf, whatever it is."""

    def _get(self, key: bytes, whole: bool = True) -> Any:
        block = self.shelf.blocks.get(key)
        return None if block is None else block.payload
