"""Pagers with compiled kernels, and threads: the kernels' own, Python's, and a process that forks."""

from __future__ import annotations

import os
import signal
import threading
import traceback
import warnings
from collections.abc import Iterator

import numpy as np
import pytest

from kvpager import KVShape, Pager, PagerConfig, _native
from kvpager.config import DTYPES
from kvpager.errors import ThreadError

LAYERS, KV_HEADS, HEADS, DIM = 2, 2, 6, 32
COUNTS = (300, 64, 17, *[1] * 12)


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    threads = _native.threads()
    _native.set_threads(2)
    yield
    _native.set_threads(max(threads, 1))


class History:
    """A prompt and some decoding under a budget, in a pool that has to evict; the same seed gives the same bits."""

    def __init__(self, seed: int, dtype: str = "bfloat16") -> None:
        shape = KVShape(LAYERS, KV_HEADS, HEADS, DIM, dtype=dtype)
        self.pager = Pager(shape, PagerConfig(pool=80, budget=160, group_pages=8, kernel="native"))
        self.sequence = self.pager.open()
        self.rng = np.random.default_rng(seed)
        self.outputs: list[bytes] = []

    def step(self, count: int) -> None:
        for layer in range(LAYERS):
            keys, values = self.rng.standard_normal((2, KV_HEADS, count, DIM), dtype=np.float32)
            queries = self.rng.standard_normal((HEADS, count, DIM), dtype=np.float32)
            self.pager.append(self.sequence, layer, keys, values)
            result = self.pager.attend(self.sequence, layer, queries)
            assert np.isfinite(result.output).all()
            self.outputs += [result.output.tobytes(), result.page_mass.tobytes()]

    def run(self, counts: tuple[int, ...] = COUNTS) -> list[bytes]:
        """The outputs and page masses of all steps, as bytes."""
        for count in counts:
            self.step(count)
        return self.outputs

    def close(self) -> None:
        assert self.pager.stats().recalls > 0
        self.pager.check()
        self.pager.shutdown()


def whole(seed: int, dtype: str = "bfloat16") -> list[bytes]:
    history = History(seed, dtype)
    outputs = history.run()
    history.close()
    return outputs


@pytest.mark.promise(1)
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_of_threads_gives_the_same_bits(dtype: str) -> None:
    _native.set_threads(1)
    alone = whole(0, dtype)
    for threads in (2, 3, 4):
        _native.set_threads(threads)
        assert whole(0, dtype) == alone


def test_two_pagers_in_two_threads_give_what_each_gives_alone() -> None:
    alone = {seed: whole(seed) for seed in (1, 2)}
    got: dict[int, list[bool]] = {1: [], 2: []}

    def run(seed: int) -> None:
        got[seed].extend(whole(seed) == alone[seed] for _ in range(5))

    threads = [threading.Thread(target=run, args=(seed,)) for seed in got]
    for thread in threads:
        thread.start()
    for number in (4, 1, 3, 2) * 5:  # the kernels' threads change while they work
        _native.set_threads(number)
    for thread in threads:
        thread.join()
    assert got == {1: [True] * 5, 2: [True] * 5}


def test_one_pager_in_two_threads_is_refused_and_goes_on_unharmed() -> None:
    alone = whole(3)
    history = History(3)
    stop = threading.Event()
    outcomes: list[str] = []

    def intrude() -> None:
        keys = np.full((KV_HEADS, 1, DIM), np.nan, np.float32)
        queries = np.full((HEADS, 1, DIM), np.nan, np.float32)
        while True:
            for call in (
                lambda: history.pager.append(history.sequence, 0, keys, keys),
                lambda: history.pager.attend(history.sequence, 0, queries),
            ):
                try:
                    call()
                    outcomes.append("accepted")
                except ThreadError:
                    outcomes.append("refused")
            if stop.wait(0.0005):
                return

    thread = threading.Thread(target=intrude)
    thread.start()
    try:
        outputs = history.run()
    finally:
        stop.set()
        thread.join()
    history.close()
    assert outputs == alone
    assert set(outcomes) == {"refused"}


def test_a_forked_child_goes_on_with_the_pager_and_the_kernels() -> None:
    alone = whole(4)
    history = History(4)
    history.run(COUNTS[:2])  # the kernels' threads are awake, and exist in the parent only
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of any fork beside threads
        child = os.fork()
    if child == 0:
        signal.alarm(60)  # a child that waits for threads that it has not must end
        code = 1
        try:
            code = 0 if history.run(COUNTS[2:]) == alone and whole(4) == alone else 2
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert history.run(COUNTS[2:]) == alone
    history.close()
