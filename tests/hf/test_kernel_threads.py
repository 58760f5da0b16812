"""A whole model on the compiled kernels, packed and paged, gives the same bits for any number of their threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hf import tiny
from hf.runs import SMALL, forwards, paged
from kvpager import _native
from kvpager.hf.accelerate import accelerate


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    threads = _native.threads()
    yield
    _native.set_threads(max(threads, 1))


@pytest.mark.promise(1)
@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_any_number_of_threads_gives_the_same_logits(name: str, weights: str) -> None:
    model = tiny.build(tiny.CONFIGS[name]()).to(torch.bfloat16)
    accelerate(model, weights)
    ids = tiny.tokens(150, rows=2)
    got = []
    for threads in (1, 2, 3, 4):
        _native.set_threads(threads)
        with paged(model, SMALL, rows=2) as cache:
            got.append(forwards(model, ids, cache, [100, 40, *[1] * 10]))
            assert cache.stats().recalls > 0
    assert all(torch.equal(one, got[0]) for one in got[1:])
