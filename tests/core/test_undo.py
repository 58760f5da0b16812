"""What fails, or is interrupted, leaves everything as it was; and what must not be called is refused."""

from __future__ import annotations

import numpy as np
import pytest

from kvpager import KVShape, Pager, PagerConfig
from kvpager.errors import InputError, PageLost, PoolExhausted, StepError, SwapError
from kvpager.swap import MemorySwap
from tests.core.rig import SMALL, Rig, fingerprint


class Breakable(MemorySwap):
    """Swap that takes so many more writes and reads."""

    writes_left = reads_left = 10**9

    def read(self, slots, into=None, rows=None):
        self.reads_left -= 1
        if self.reads_left < 0:
            raise PageLost("gone")
        return super().read(slots, into, rows)

    def write(self, pages, rows=None):
        self.writes_left -= 1
        if self.writes_left < 0:
            raise SwapError("the disk is on fire")
        return super().write(pages, rows)


def random(heads, tokens, seed=0, dim=8):
    return np.random.default_rng(seed).standard_normal((heads, tokens, dim)).astype(np.float32)


def test_an_append_that_fails_behind_another_layer_leaves_no_page_behind():
    swap = Breakable(SMALL.page_bytes(8), 2**20)
    pager = Pager(SMALL, PagerConfig(pool=16, page_size=8, tile=16, group_pages=4), swap=swap)
    sequence = pager.open()
    pager.append(sequence, 0, random(2, 100), random(2, 100))
    swap.writes_left = 2
    with pytest.raises(SwapError, match="on fire"):
        pager.append(sequence, 1, random(2, 100, 1), random(2, 100, 1))
    swap.writes_left = 10**9
    assert (pager.page_table(sequence)[:, 1] == -1).all()
    pager.check()
    keys = random(2, 100, 2)
    pager.append(sequence, 1, keys, keys)
    pager.attend(sequence, 0, random(4, 100))  # evicts layer 1
    np.testing.assert_array_equal(pager.read(sequence, 1)[0], keys)
    pager.check()


@pytest.mark.promise(6)
@pytest.mark.parametrize("settings", [{}, {"mode": "discard", "budget": 48}])
def test_a_rollback_puts_back_the_scores_of_pages_that_sequences_share(settings):
    rig = Rig(**settings)
    one = rig.open()
    rig.feed([one], [32])
    two = rig.fork(one)
    rig.feed([one, two], [3, 3])
    arrays, *_ = fingerprint(rig.pager)
    rig.feed([one, two], [3, 3], commit=False)
    assert fingerprint(rig.pager)[0] == arrays


CALLS = {
    "open": lambda pager, sequence: pager.open(),
    "begin": lambda pager, sequence: pager.begin([sequence], [1]),
    "append": lambda pager, sequence: pager.append(sequence, 1, random(2, 1), random(2, 1)),
    "attend": lambda pager, sequence: pager.attend(sequence, 1, random(4, 1)),
    "commit": lambda pager, sequence: pager.commit(),
    "rollback": lambda pager, sequence: pager.rollback(),
    "fork": lambda pager, sequence: pager.fork(sequence),
    "crop": lambda pager, sequence: pager.crop(sequence, 3),
    "crop_all": lambda pager, sequence: pager.crop_all([sequence], [3]),
    "close": lambda pager, sequence: pager.close(sequence),
}


@pytest.mark.promise(6)
@pytest.mark.parametrize("stepwise", [True, False])
@pytest.mark.parametrize("call", CALLS)
def test_an_observer_that_changes_the_pager_is_refused_and_the_step_is_undone(call, stepwise):
    rig = Rig()
    sequence = rig.open()
    rig.feed([sequence], [40])
    pager = rig.pager
    pager.observers[:] = [lambda event: CALLS[call](pager, sequence)]
    attend = (lambda: rig.feed([sequence], [20])) if stepwise else (lambda: pager.attend(sequence, 0, random(4, 20)))
    with pytest.raises(StepError, match=f"{call}: called by an observer"):
        attend()
    pager.rollback()
    pager.observers[:] = [rig.events.append]
    assert sequence.length == 40
    pager.check()
    rig.check_reads(sequence)
    rig.feed([sequence], [20])


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_observer_may_look_and_may_raise(error):
    rig = Rig(pool=24)
    sequence = rig.open()
    rig.feed([sequence], [100])
    pager = rig.pager

    def look(event):
        pager.stats()
        pager.scores(sequence, 0)
        pager.page_table(sequence)
        pager.read(sequence, 1, 0, 90)
        if event.layer == 1:
            raise error("enough")

    pager.observers.append(look)
    with pytest.raises(error, match="enough"):
        rig.feed([sequence], [40])
    pager.rollback()
    pager.check()
    pager.observers[:] = [rig.events.append]
    rig.check_reads(sequence)
    rig.feed([sequence], [40])


def test_several_crops_are_all_done_or_none():
    rig = Rig(pool=2000, mode="discard", budget=32)
    whole, holed = rig.open(), rig.open()
    rig.feed([whole, holed], [20, 200])
    view = rig.pager._state.sequences[holed.id].view
    block = int(np.flatnonzero(~view.all(axis=(1, 2)))[0])
    before = fingerprint(rig.pager)
    with pytest.raises(InputError, match="were discarded"):
        rig.pager.crop_all([whole, holed], [5, block * 8 + 3])
    for lengths in ([5], [5, 201], [5, -1], 5):
        with pytest.raises(InputError, match=r"lengths?: "):
            rig.pager.crop_all([whole, holed], lengths)
    with pytest.raises(InputError, match="cropped twice"):
        rig.pager.crop_all([whole, whole], [5, 6])
    assert fingerprint(rig.pager) == before
    rig.pager.crop_all([whole, holed], [5, 0])
    assert (whole.length, holed.length) == (5, 0)
    rig.pager.check()


def test_a_page_lost_while_cropping_leaves_every_sequence_as_it_was():
    rig, swap = Rig(pool=28), Breakable(SMALL.page_bytes(8), 2**20)
    rig.pager = Pager(SMALL, rig.pager.config, swap=swap)
    rig.pager.observers.append(rig.events.append)
    sequences = [rig.open() for _ in range(3)]
    for sequence in sequences:
        rig.feed([sequence], [40])
    swap.reads_left = 3  # two layers of the first sequence, and one of the second
    with pytest.raises(PageLost, match="gone"):
        rig.pager.crop_all(sequences, [3, 3, 3])
    swap.reads_left = 10**9
    assert [sequence.length for sequence in sequences] == [40, 40, 40]
    rig.pager.check()
    for sequence in sequences:
        rig.check_reads(sequence)


@pytest.mark.promise(6)
@pytest.mark.parametrize(("dtype", "value"), [("float16", 7e4), ("bfloat16", 3.4e38)])
def test_numbers_beyond_what_pages_hold_are_refused(dtype, value):
    pager = Pager(KVShape(1, 1, 1, 8, dtype=dtype), PagerConfig(pool=64))
    sequence = pager.open()
    fine, beyond = np.ones((1, 4, 8), np.float32), np.full((1, 4, 8), value, np.float32)
    for pair in ((beyond, fine), (fine, -beyond)):
        with pytest.raises(InputError, match=f"beyond {dtype}"):
            pager.append(sequence, 0, *pair)
    assert sequence.length == 0


@pytest.mark.promise(6)
def test_layers_that_run_ahead_count_against_max_tokens():
    pager = Pager(SMALL, PagerConfig(pool=64, page_size=8, tile=16, max_tokens=10))
    sequence = pager.open()
    pager.append(sequence, 0, random(2, 10), random(2, 10))
    with pytest.raises(PoolExhausted, match="11 tokens would be held and max_tokens is 10"):
        pager.append(sequence, 0, random(2, 1), random(2, 1))
    pager.append(sequence, 1, random(2, 10), random(2, 10))
    assert sequence.length == 10


@pytest.mark.promise(6)
def test_a_prefix_beyond_max_tokens_is_refused():
    pager = Pager(SMALL, PagerConfig(pool=64, page_size=8, tile=16, max_tokens=40))
    first = pager.open(range(24))
    pager.begin([first], [24])
    for layer in range(2):
        pager.append(first, layer, random(2, 24), random(2, 24))
    pager.commit()
    assert pager.open(range(20)).length == 16
    with pytest.raises(PoolExhausted, match="max_tokens is 40"):
        pager.open(range(20))
    assert pager.stats().sequences == 2
    pager.check()


def fill(pager, tokens):
    sequence = pager.open(tokens)
    pager.begin([sequence], [len(tokens) - sequence.length])
    for layer in range(2):
        count = len(tokens) - sequence.length
        pager.append(sequence, layer, random(2, count), random(2, count))
        pager.attend(sequence, layer, random(4, count))
    pager.commit()
    pager.close(sequence)


def test_blocks_kept_for_reuse_make_way_when_swap_is_full():
    room = 60 * SMALL.page_bytes(8)
    pager = Pager(
        SMALL, PagerConfig(pool=24, page_size=8, tile=16, group_pages=4, prefix_tokens=10_000, swap_limit=room)
    )
    for prompt in range(10):
        fill(pager, list(range(prompt * 100, prompt * 100 + 64)))
        pager.check()
    assert 0 < pager.stats().cached_blocks < 80
    assert pager.stats().swap_bytes <= room


@pytest.mark.promise(7)
def test_blocks_kept_for_reuse_stay_within_memory():
    config = PagerConfig(
        memory="40KiB", max_tokens=64, prefix_tokens=2048, budget=40, page_size=8, tile=16, group_pages=4
    )
    pager = Pager(SMALL, config)
    for prompt in range(20):
        fill(pager, list(range(prompt * 100, prompt * 100 + 64)))
        assert pager.stats().resident_bytes <= 40 * 2**10
    pager.check()
    assert pager.stats().cached_blocks > 0


def test_a_shutdown_in_the_middle_of_a_step_leaves_nothing_to_undo():
    rig = Rig(pool=24)
    sequence = rig.open()
    pager = rig.pager
    pager.begin([sequence], [150])
    pager.append(sequence, 0, random(2, 150), random(2, 150))
    pager.append(sequence, 1, random(2, 150), random(2, 150))
    assert pager.step is not None
    pager.shutdown()
    assert pager.step is None
    pager.rollback()
    pager.close(sequence)
    assert sequence.closed
    with pytest.raises(StepError, match="no step is open"):
        pager.commit()


def test_what_observers_and_callers_do_with_arrays_changes_nothing():
    rig = Rig()
    sequence = rig.open()
    rig.feed([sequence], [40])
    pager, queries = rig.pager, random(4, 40)
    expected = pager.attend(sequence, 0, queries)

    def scribble(event):
        event.page_mass[:] = 9
        event.selected[:] = False

    pager.observers[:] = [scribble]
    again = pager.attend(sequence, 0, queries)
    np.testing.assert_array_equal(again.output, expected.output)
    np.testing.assert_array_equal(again.page_mass, expected.page_mass)
    again.output[:], again.page_mass[:], queries[:] = 7, 7, 7
    for held in (*pager.read(sequence, 0), pager.page_table(sequence)):
        held[:] = 5
    rig.check_reads(sequence)
    pager.check()
