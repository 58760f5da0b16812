"""What a journal is told of sequences, joined as a standby does it, goes on in another pager bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpager.core.telling import Mark, joined
from kvpager.errors import PageLost, StepError
from kvpager.journaled import Saved
from kvpager.kernels.native import NativeKernel
from kvpager.kernels.reference import ReferenceKernel
from tests.core.fed import SMALL, Fed, text
from tests.memory_store import MemoryStore

PROMPT = text(75)
ANSWERED = PROMPT + text(30, seed=1)
NEXT = ANSWERED + text(50, seed=2)
SIZE = 8


def mirrored(saved, gained, tokens):
    """A sequence as it is known after one more telling of it."""
    length = gained.header["length"]
    full, keys, slots = length // SIZE, b"", b""
    if saved is not None:
        keys = saved.keys
        old = saved.header["length"]
        if old // SIZE == full and saved.slots:
            slot = len(saved.slots) // (old % SIZE)
            slots = saved.slots[: (gained.slots_from - full * SIZE) * slot]
    keys = keys[: 32 * gained.first] + gained.keys
    return Saved(gained.header, tokens[:length], keys, slots + gained.slots, gained.scores)


def scores_of(fed, sequence, block):
    """What is known of the pages of one block."""
    return [[page for page in layer if page[0] == block] for layer in fed.order(sequence)]


@pytest.mark.parametrize("kernel", [ReferenceKernel, NativeKernel])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
@settings(max_examples=6, deadline=None)
@given(st.sampled_from([None, 48]), st.integers(0, 30), st.lists(st.booleans(), min_size=31, max_size=31))
def test_what_was_told_step_by_step_goes_on_as_the_sequence_does(kernel, dtype, budget, answered, told):
    kind = {"kernel": kernel, "budget": budget, "shape": replace(SMALL, dtype=dtype)}
    store = MemoryStore()
    fed = Fed(store, **kind)
    sequence, mark, saved = fed.open(PROMPT), Mark(), None
    fed.run(sequence, PROMPT)
    for step in range(answered + 1):
        if step:
            fed.run(sequence, ANSWERED[: 75 + step], singly=True)
        if told[step] or step == answered:
            gained = fed.pager.tell([(sequence, mark)], scores=True)[0]
            saved = mirrored(saved, gained, ANSWERED)
    length = 75 + answered
    assert len(saved.keys) == length // SIZE * 32
    assert store.published == [saved.keys[i : i + 32] for i in range(0, len(saved.keys), 32)]
    store.update([], fed.pager._state.residency.clock.tick)  # scores are of times on a clock that goes on
    again = Fed(store.reopened(), **kind)
    restored = again.pager.restore(joined(saved, SIZE), NEXT)
    again.pager.check()
    assert (restored.length, restored.tokens) == (length, ANSWERED[:length])
    np.testing.assert_array_equal(again.run(restored, NEXT), fed.run(sequence, NEXT))
    for layer in range(SMALL.layers):
        for here, there in zip(again.pager.read(restored, layer), fed.pager.read(sequence, layer), strict=True):
            np.testing.assert_array_equal(here, there)
    assert scores_of(again, restored, length // SIZE) == scores_of(fed, sequence, length // SIZE)


def test_a_step_tells_no_more_of_a_long_sequence_than_of_a_short_one():
    fed = Fed(MemoryStore(), budget=48)
    sequence, mark = fed.open(PROMPT), Mark()
    fed.run(sequence, PROMPT)
    whole = fed.pager.tell([(sequence, mark)])[0]
    assert (whole.first, len(whole.keys), whole.slots_from) == (0, 9 * 32, 72)
    slot = len(whole.slots) // 3
    assert fed.pager.tell([(sequence, mark)]) == [None]
    for position in range(75, 97):
        fed.run(sequence, ANSWERED[: position + 1], singly=True)
        gained = fed.pager.tell([(sequence, mark)], scores=position % 4 == 0)[0]
        filled = (position + 1) % SIZE == 0
        assert gained.header["length"] == position + 1
        assert (len(gained.keys), gained.first) == (32 * filled, position // SIZE)
        assert (len(gained.slots), gained.slots_from) == (0 if filled else slot, position + filled)
        assert bool(gained.scores) == (position % 4 == 0 and not filled)


def test_several_sequences_are_told_in_one_call_whatever_each_has_gained():
    fed = Fed(MemoryStore(), budget=48)
    marked = [(fed.pager.open(), Mark()) for _ in range(4)]
    for number, (sequence, _) in enumerate(marked[:3]):
        fed.run(sequence, text(20 + number, seed=number))
    fed.pager.park(marked[1][0])
    together = fed.pager.tell(marked)
    assert [gained is None for gained in together] == [False, True, False, True]
    for place in (0, 2):
        assert together[place] == fed.pager.tell([(marked[place][0], Mark())])[0]
    fed.pager.unpark(marked[1][0])
    assert fed.pager.tell(marked)[1].header["length"] == 21


def test_what_does_not_belong_together_is_not_gone_on_with():
    fed = Fed(MemoryStore(), budget=48)
    sequence = fed.open(PROMPT)
    fed.run(sequence, PROMPT)
    saved = mirrored(None, fed.pager.tell([(sequence, Mark())], scores=True)[0], PROMPT)
    assert joined(replace(saved, tokens=PROMPT[:-1]), SIZE) is None
    assert joined(replace(saved, keys=saved.keys[1:]), SIZE) is None
    for spoilt, kept in (
        (replace(saved, slots=saved.slots[:-1]), 64),
        (replace(saved, slots=b""), 64),
        (replace(saved, keys=saved.keys[:-64]), 48),
        (replace(saved, scores=saved.scores[1:]), 75),
        (replace(saved, scores=b""), 75),
    ):
        restored = fed.pager.restore(joined(spoilt, SIZE), NEXT)
        assert restored.length == kept
        fed.pager.close(restored)
    for slots in (saved.slots[:-3], saved.slots * 2):  # tokens of another size
        assert fed.pager.restore(joined(replace(saved, slots=slots), SIZE), NEXT) is None
    fed.pager.check()


def test_nothing_is_told_without_a_store_or_in_the_middle_of_a_step():
    fed = Fed(None)
    sequence = fed.open(PROMPT)
    fed.run(sequence, PROMPT)
    assert fed.pager.tell([(sequence, Mark())]) == [None]
    fed.pager.begin([sequence], [1])
    with pytest.raises(StepError, match="tell"):
        fed.pager.tell([(sequence, Mark())])


def test_after_a_page_could_not_be_read_all_is_told_anew(monkeypatch):
    fed = Fed(MemoryStore(), budget=48)
    sequence, mark = fed.open(PROMPT), Mark()
    fed.run(sequence, PROMPT)
    fed.pager.tell([(sequence, mark)])
    fed.run(sequence, ANSWERED[:90], singly=True)

    def lost(row):
        raise PageLost("it is gone")

    with monkeypatch.context() as patch:
        patch.setattr(fed.pager._state.residency, "pages_of", lost)
        assert fed.pager.tell([(sequence, mark)]) == [None]
    gained = fed.pager.tell([(sequence, mark)])[0]
    assert (gained.first, len(gained.keys)) == (0, 11 * 32)
    assert gained.slots_from == 88
