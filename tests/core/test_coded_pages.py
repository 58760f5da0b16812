"""Pages of int8, which are coded when they are full: answers stay the same under pressure and after a rollback."""

from __future__ import annotations

import numpy as np
import pytest

from kvpager import KVShape, Pager, PagerConfig
from kvpager.kernels.native import NativeKernel
from kvpager.kernels.reference import ReferenceKernel

SHAPE = KVShape(layers=2, kv_heads=2, query_heads=4, head_dim=8, dtype="int8")
KERNELS = [ReferenceKernel, NativeKernel]


def history(kernel, pool, rolled_back, budget=48):
    """What a sequence and a fork of it answer, some steps rolled back first where `rolled_back`."""
    rng = np.random.default_rng(7)
    pager = Pager(SHAPE, PagerConfig(pool=pool, page_size=8, tile=16, group_pages=4, budget=budget), kernel=kernel())

    def step(sequence, tokens, answers):
        numbers = rng.standard_normal((2, 3, 4, tokens, 8)).astype(np.float32)
        for turn in range(2 if rolled_back else 1):
            pager.begin([sequence], [tokens])
            for layer, (keys, values, queries) in enumerate(numbers):
                # what is rolled back is something else
                factor = np.float32(-3 if turn == 0 and rolled_back else 1)
                pager.append(sequence, layer, factor * keys[:2], values[:2])
                output = pager.attend(sequence, layer, queries).output
                if turn == rolled_back:
                    answers.append(output)
            if turn == rolled_back:
                pager.commit()
            else:
                pager.rollback()

    answers = []
    one = pager.open()
    for tokens in (70, 3, 1, 1, 1, 5, 16, 1, 9, 30):
        step(one, tokens, answers)
    two = pager.fork(one)
    pager.crop(one, 100)
    for sequence in (one, two, one, two):
        for tokens in (1, 11):
            step(sequence, tokens, answers)
    pager.check()
    answers += [*pager.read(one, 1), *pager.read(two, 0)]
    recalls = pager.stats().recalls
    pager.shutdown()
    return answers, recalls


@pytest.mark.promise(1)
@pytest.mark.parametrize("kernel", KERNELS)
def test_int8_answers_are_the_same_in_any_pool_and_after_rollbacks(kernel):
    wanted, recalls = history(kernel, 400, rolled_back=False)
    assert not recalls
    for pool, rolled_back in ((20, False), (27, True), (400, True)):
        found, recalls = history(kernel, pool, rolled_back)
        assert bool(recalls) == (pool < 400)
        assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_int8_kernels_agree():
    found, _ = history(NativeKernel, 400, rolled_back=False, budget=None)
    wanted, _ = history(ReferenceKernel, 400, rolled_back=False, budget=None)
    assert all(np.abs(a - b).max() < 2e-2 * np.abs(b).max() for a, b in zip(found, wanted, strict=True))


def test_open_pages_of_closed_sequences_hold_no_memory():
    pager = Pager(SHAPE, PagerConfig(pool=400, page_size=8, tile=16, group_pages=4), kernel=ReferenceKernel())
    before = pager.stats().pool_bytes
    for _ in range(3):
        sequence = pager.open()
        keys = np.ones((2, 11, 8), np.float32)
        for layer in range(2):
            pager.append(sequence, layer, keys, keys)
        assert pager._state.residency.storage.nbytes > before
        pager.close(sequence)
        assert pager._state.residency.storage.nbytes == before
