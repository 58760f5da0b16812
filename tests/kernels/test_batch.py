"""A ragged batch in one call: the compiled kernel beside the reference, and the same bits however it is run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpager import KVShape, Pager, PagerConfig
from kvpager.errors import InputError, StepError
from kvpager.kernels.numbers import narrowed, widened
from kvpager.kernels.reference import ReferenceKernel

_native = pytest.importorskip("kvpager._native")
from kvpager.kernels.native import NativeKernel  # noqa: E402

DTYPES = ("float32", "float16", "bfloat16", "int8")


def strided(numbers, dtype):
    """The same numbers, [heads, T, D], as a model lays them out: token after token, in another dtype."""
    by_token = np.ascontiguousarray(narrowed(numbers, dtype).swapaxes(0, 1))
    return by_token.swapaxes(0, 1)


class Run:
    """Steps of several sequences through `attend_step`; every output is poisoned before it is filled."""

    def __init__(self, case, kernel, pool, *, seed=0, each_alone=False):
        self.shape = KVShape(2, 2, 4, 16, windows=case["windows"], dtype=case["dtype"])
        config = PagerConfig(page_size=8, tile=16, group_pages=case["group"], budget=case["budget"], pool=pool)
        self.pager = Pager(self.shape, config, kernel=kernel)
        self.sequences = [self.pager.open() for _ in range(case["sequences"])]
        self.case, self.rng, self.each_alone = case, np.random.default_rng(seed), each_alone
        self.numbers = np.uint16 if case["bits"] else np.float32

    def step(self, counts):
        chosen = [(one, count) for one, count in zip(self.sequences, counts, strict=True) if count]
        total = sum(count for _, count in chosen)
        outputs = []
        self.pager.begin([one for one, _ in chosen], [count for _, count in chosen])
        for layer in range(2):
            queries, keys, values = (
                strided(self.rng.standard_normal((heads, total, 16)).astype(np.float32), self.numbers)
                for heads in (4, 2, 2)
            )
            output = np.full((total, 4, 16), 0x7FC0 if self.case["bits"] else np.nan, self.numbers).swapaxes(0, 1)
            if self.each_alone:
                self.alone(chosen, layer, queries, keys, values, output)
            else:
                softcap = self.case["softcap"]
                self.pager.attend_step(layer, queries, keys, values, softcap=softcap, output=output)
            outputs.append(widened(output).copy())
        self.pager.commit()
        return outputs

    def alone(self, chosen, layer, queries, keys, values, output):
        start = 0
        for sequence, count in chosen:
            part = slice(start, start := start + count)
            self.pager.append(sequence, layer, widened(keys[:, part]), widened(values[:, part]))
            result = self.pager.attend(sequence, layer, widened(queries[:, part]), softcap=self.case["softcap"])
            output[:, part] = narrowed(result.output, self.numbers)

    def all(self, steps):
        outputs = [output for counts in steps for output in self.step(counts)]
        self.pager.check()
        stats = self.pager.stats()
        self.pager.shutdown()
        return outputs, stats


@st.composite
def cases(draw):
    sequences = draw(st.integers(1, 4))
    counts = st.lists(st.sampled_from([0, 1, 1, 1, 5, 16, 30, 41]), min_size=sequences, max_size=sequences)
    steps = draw(st.lists(counts.filter(any), min_size=2, max_size=6))
    return {
        "sequences": sequences,
        "steps": [[37 * (1 + index % 2) for index in range(sequences)], *steps],
        "windows": draw(st.sampled_from([None, (20, None), (9, 40)])),
        "dtype": draw(st.sampled_from(DTYPES)),
        "budget": draw(st.sampled_from([None, 32, 48])),
        "softcap": draw(st.sampled_from([None, 5.0])),
        "group": draw(st.sampled_from([4, 7, 32])),
        "bits": draw(st.booleans()),
    }


def smallest(case):
    shape = KVShape(2, 2, 4, 16, windows=case["windows"], dtype=case["dtype"])
    config = PagerConfig(page_size=8, tile=16, group_pages=case["group"], budget=case["budget"], pool=4096)
    with Pager(shape, config, kernel=ReferenceKernel()) as pager:
        return pager.minimum_frames(case["sequences"])


@pytest.mark.promise(1)
@settings(max_examples=25, deadline=None)
@given(cases())
def test_pool_size_threads_and_company_never_change_a_bit(case):
    before = max(_native.threads(), 1)
    try:
        plenty, roomy = Run(case, NativeKernel(), 4096).all(case["steps"])
        assert roomy.recalls == 0
        for threads in (1, 2, 3):
            _native.set_threads(threads)
            for pool in (smallest(case), smallest(case) + 13):
                tight, stats = Run(case, NativeKernel(), pool).all(case["steps"])
                assert stats.pages_attended == roomy.pages_attended
                assert stats.tiles == roomy.tiles
                for one, other in zip(tight, plenty, strict=True):
                    np.testing.assert_array_equal(one, other)
        alone, _ = Run(case, NativeKernel(), 4096, each_alone=True).all(case["steps"])
        for one, other in zip(alone, plenty, strict=True):
            np.testing.assert_array_equal(one, other)
    finally:
        _native.set_threads(before)


@settings(max_examples=25, deadline=None)
@given(cases())
def test_the_compiled_kernel_is_close_to_the_reference(case):
    # two ways of rounding may choose other pages between near equals: compared where all are attended to
    case = {**case, "budget": None}
    ours, stats = Run(case, NativeKernel(), 4096).all(case["steps"])
    theirs, expected = Run(case, ReferenceKernel(), 4096).all(case["steps"])
    assert (stats.tiles, stats.pages_attended) == (expected.tiles, expected.pages_attended)
    tolerance = 0.05 if case["bits"] or case["dtype"] in ("bfloat16", "int8") else 5e-3
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance)


@pytest.mark.promise(1)
def test_the_smallest_pool_brings_pages_back_for_the_whole_batch_at_once():
    case = {
        "sequences": 4,
        "windows": None,
        "dtype": "bfloat16",
        "budget": 32,
        "softcap": None,
        "group": 4,
        "bits": True,
    }
    steps = [[80] * 4, *[[1] * 4] * 10]
    tight, stats = Run(case, NativeKernel(), smallest(case) + 40).all(steps)
    plenty, _ = Run(case, NativeKernel(), 4096).all(steps)
    assert stats.recalls > 0
    assert stats.recalls > stats.faults * 4  # more than a group at a time
    for one, other in zip(tight, plenty, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.promise(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_the_reference_kernel_gives_the_same_bits_in_the_smallest_pool(dtype):
    case = {
        "sequences": 2,
        "windows": (20, None),
        "dtype": dtype,
        "budget": 32,
        "softcap": None,
        "group": 4,
        "bits": True,
    }
    steps = [[70, 40], [1, 1], [1, 20], [1, 1]]
    tight, stats = Run(case, ReferenceKernel(), smallest(case)).all(steps)
    plenty, roomy = Run(case, ReferenceKernel(), 4096).all(steps)
    assert stats.recalls > roomy.recalls == 0
    for one, other in zip(tight, plenty, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.promise(6)
@pytest.mark.parametrize("kernel", [NativeKernel, ReferenceKernel])
@pytest.mark.parametrize("name", ["queries", "keys", "values"])
@pytest.mark.parametrize("bad", [0x7F80, 0xFF80, 0x7FC0])
def test_numbers_that_are_not_finite_are_refused_in_bfloat16_too(kernel, name, bad):
    pager = Pager(KVShape(1, 2, 4, 16, dtype="bfloat16"), PagerConfig(pool=64), kernel=kernel())
    sequence = pager.open()
    pager.begin([sequence], [3])
    states = {"queries": np.zeros((4, 3, 16), np.uint16), "keys": np.zeros((2, 3, 16), np.uint16)}
    states["values"] = np.zeros((2, 3, 16), np.uint16)
    states[name][1, 2, 5] = bad
    with pytest.raises(InputError, match=name):
        pager.attend_step(0, **states)
    states[name][1, 2, 5] = 0x7F7F if name == "queries" else 0
    pager.attend_step(0, **states)
    with pytest.raises(StepError, match="has had its keys"):
        pager.attend_step(0, **states)
    pager.commit()
    assert sequence.length == 3


def test_an_output_of_another_shape_or_dtype_is_refused():
    pager = Pager(KVShape(1, 2, 4, 16), PagerConfig(pool=64), kernel=NativeKernel())
    pager.begin([pager.open()], [1])
    states = [np.zeros((heads, 1, 16), np.float32) for heads in (4, 2, 2)]
    for output in (np.empty((4, 2, 16), np.float32), np.empty((4, 1, 16), np.int16)):
        with pytest.raises(InputError, match="output"):
            pager.attend_step(0, *states, output=output)
    assert np.isfinite(pager.attend_step(0, *states)).all()
