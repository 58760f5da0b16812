import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from kvpager.ports import Bytes
from kvpager.stores.prefetch import Prefetcher
from tests.stores.fake import SETTLED, key_of

SIZE = 100


class Source:
    """Blocks by key, all but those above 1000; `read` tells what was asked, and can be held up."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.count = threading.Semaphore(0)
        self.hold: Callable[[], None] = lambda: None

    def read(self, keys: Sequence[bytes]) -> list[Bytes | None]:
        self.asked += keys
        self.hold()
        for _ in keys:
            self.count.release()
        return [None if int.from_bytes(key, "big") > 1000 else np.full((1, SIZE), key[-1], np.uint8) for key in keys]

    def wait(self, blocks: int) -> None:
        for _ in range(blocks):
            assert self.count.acquire(timeout=SETTLED)


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def ahead(source: Source) -> Iterator[Prefetcher]:
    ahead = Prefetcher(source.read, 10 * SIZE, wait_s=SETTLED)
    yield ahead
    assert ahead.stop(SETTLED)


def numbers(payloads: list[Bytes | None]) -> list[int | None]:
    return [None if payload is None else int(payload[0, 0]) for payload in payloads]


def test_what_is_wanted_is_read_in_order_and_handed_out_once(source: Source, ahead: Prefetcher) -> None:
    ahead.want([key_of(3), key_of(1), key_of(2), key_of(1)])
    source.wait(3)
    assert numbers(ahead.take([key_of(1), key_of(3)])) == [1, 3]
    assert numbers(ahead.take([key_of(1), key_of(2)])) == [None, 2]
    assert source.asked == [key_of(3), key_of(1), key_of(2)]


def test_no_more_is_read_than_fits(source: Source, ahead: Prefetcher) -> None:
    ahead.want([key_of(i) for i in range(100)])
    source.wait(12)  # four at once, until there are at least ten
    assert numbers(ahead.take([key_of(i) for i in range(12)])) == list(range(12))
    source.wait(12)
    assert numbers(ahead.take([key_of(12)])) == [12]


def test_what_is_wanted_no_more_makes_way(source: Source, ahead: Prefetcher) -> None:
    ahead.want([key_of(i) for i in range(12)])
    source.wait(12)
    ahead.want([key_of(11), *(key_of(i) for i in range(20, 24))])
    source.wait(4)
    assert numbers(ahead.take([key_of(i) for i in (0, 11, 20, 21, 22, 23)])) == [None, 11, 20, 21, 22, 23]


def test_a_block_that_is_being_read_is_waited_for_and_not_read_twice(source: Source, ahead: Prefetcher) -> None:
    reading, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        reading.set()
        assert go_on.wait(SETTLED)

    source.hold = hold
    ahead.want([key_of(7)])
    assert reading.wait(SETTLED)
    threading.Timer(0.01, go_on.set).start()
    assert numbers(ahead.take([key_of(7)])) == [7]


def test_a_block_that_takes_too_long_is_not_waited_for(source: Source) -> None:
    reading, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        reading.set()
        assert go_on.wait(SETTLED)

    source.hold = hold
    ahead = Prefetcher(source.read, 10 * SIZE, wait_s=0.01)
    ahead.want([key_of(7)])
    assert reading.wait(SETTLED)
    assert ahead.take([key_of(7)]) == [None]
    assert not ahead.stop(0.01)
    go_on.set()
    assert ahead.stop(SETTLED)


def test_what_is_forgotten_while_it_is_read_is_not_handed_out(source: Source, ahead: Prefetcher) -> None:
    reading, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        reading.set()
        assert go_on.wait(SETTLED)

    source.hold = hold
    ahead.want([key_of(7), key_of(8)])
    assert reading.wait(SETTLED)
    ahead.forget([key_of(7)])
    go_on.set()
    source.wait(2)
    assert numbers(ahead.take([key_of(7), key_of(8)])) == [None, 8]


def test_a_miss_is_no_block_and_no_trouble(source: Source, ahead: Prefetcher) -> None:
    ahead.want([key_of(2000), key_of(5)])
    source.wait(2)
    assert numbers(ahead.take([key_of(2000), key_of(5)])) == [None, 5]


def test_when_it_has_stopped_nothing_is_read(source: Source) -> None:
    ahead = Prefetcher(source.read, 10 * SIZE, wait_s=SETTLED)
    assert ahead.stop(SETTLED)
    ahead.want([key_of(1)])
    assert ahead.take([key_of(1)]) == [None]
    assert source.asked == []
