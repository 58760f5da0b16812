"""When swap fails: a clear error, everything as before the step, and nothing lost that can be kept."""

from __future__ import annotations

import numpy as np
import pytest

from kvpager import PageLost, Pager, PagerConfig
from kvpager.core.pagetable import ABSENT
from kvpager.errors import SwapError, SwapFull
from kvpager.swap import MemorySwap
from tests.core.rig import SMALL, Rig


class FailingSwap(MemorySwap):
    fail_writes = False
    lose = False

    def write(self, pages, rows=None):
        if self.fail_writes:
            raise SwapError("the disk is on fire")
        return super().write(pages, rows)

    def read(self, slots, into=None, rows=None):
        if self.lose:
            raise PageLost(f"slot {int(slots[0])}: gone")
        return super().read(slots, into, rows)


def rig_over(swap, pool=24, **config):
    rig = Rig(pool=pool, **config)
    rig.pager = Pager(SMALL, rig.pager.config, swap=swap)
    rig.pager.observers.append(rig.events.append)
    return rig


def swap(limit=2**20):
    return FailingSwap(SMALL.page_bytes(8), limit)


def test_a_lost_page_fails_the_step_which_can_be_rolled_back():
    place = swap()
    rig = rig_over(place)
    sequence = rig.open()
    rig.feed([sequence], [100])
    place.lose = True
    with pytest.raises(PageLost, match="gone"):
        rig.feed([sequence], [5])
    assert sequence.length == 100
    with pytest.raises(RuntimeError, match="roll it back"):
        rig.pager.commit()
    rig.pager.rollback()
    rig.pager.check()
    place.lose = False
    rig.check_reads(sequence)
    rig.feed([sequence], [5])


def test_a_failed_write_is_an_error_only_when_the_frame_is_needed():
    place = swap()
    rig = rig_over(place, pool=40)
    sequence = rig.open()
    place.fail_writes = True
    rig.feed([sequence], [75])  # fits: writing ahead of need fails quietly
    assert rig.pager.stats().swap_writes == 0
    with pytest.raises(SwapError, match="on fire"):
        rig.feed([sequence], [60])
    rig.pager.rollback()
    rig.pager.check()
    rig.check_reads(sequence)
    place.fail_writes = False
    rig.feed([sequence], [60])
    rig.check_reads(sequence)


def test_swap_that_is_full_says_so_and_leaves_the_sequence_whole():
    rig = Rig(pool=24, swap_limit=30 * SMALL.page_bytes(8))
    sequence = rig.open()
    rig.feed([sequence], [80])
    with pytest.raises(SwapFull):
        rig.feed([sequence], [300])
    rig.pager.rollback()
    assert sequence.length == 80
    rig.pager.check()
    rig.check_reads(sequence)


def test_a_flipped_bit_in_swap_is_a_lost_page_not_a_wrong_answer(tmp_path):
    config = PagerConfig(pool=24, page_size=8, tile=16, group_pages=4, swap=str(tmp_path))
    rig = Rig(pool=24)
    rig.pager = Pager(SMALL, config)
    rig.pager.observers.append(rig.events.append)
    sequence = rig.open()
    rig.feed([sequence], [100])
    state = rig.pager._state
    slots = state.table.slot[sequence.rows, 1]
    absent = (state.table.frame[sequence.rows, 1] == ABSENT) & (slots != ABSENT)
    block, head = (int(index) for index in np.argwhere(absent)[0])
    slot = int(slots[block, head]) // 2  # the file's are the even ones
    state.swap._parts[0]._slabs.arrays[0][slot, 100] ^= 1
    with pytest.raises(PageLost, match=f"slots {slot} differ"):
        rig.pager.read(sequence, 1)
    with pytest.raises(PageLost):
        rig.feed([sequence], [1])
    rig.pager.rollback()
    assert sequence.length == 100
    rig.pager.check()
