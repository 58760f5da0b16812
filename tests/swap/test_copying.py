"""Pages between memory and slabs, with and without the extension: bit for bit, and every change is seen."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from kvpager import _native
from kvpager.errors import PageLost
from kvpager.swap import FileSwap, MemorySwap, copying
from kvpager.swap.copying import Slabs
from kvpager.swap.file import HINTS


@pytest.fixture(params=["native", "numpy"])
def _how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(copying, "native", None)


@pytest.fixture(autouse=True)
def _isa_as_it_was():
    isa = _native.isa()
    yield
    _native.set_isa(isa)


def slabs(page_bytes: int, *sizes: int) -> Slabs:
    made = Slabs()
    for size in sizes:
        made.add(np.zeros((size, page_bytes), np.uint8))
    return made


def numbers(count: int, page_bytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, page_bytes), dtype=np.uint8)


@pytest.mark.usefixtures("_how")
@pytest.mark.parametrize("page_bytes", [1, 63, 64, 65, 255, 256, 300, 1536, 4096])
def test_rows_come_back_from_scattered_slots(page_bytes: int) -> None:
    rng = np.random.default_rng(page_bytes)
    held = slabs(page_bytes, 40, 3, 100, 57)
    memory, back = numbers(300, page_bytes), np.zeros((300, page_bytes), np.uint8)
    slots, rows, places = rng.permutation(200), rng.permutation(300)[:200], rng.permutation(300)[:200]
    stored = held.store(slots, memory, rows)
    assert np.array_equal(held.load(slots, back, places), stored)
    assert np.array_equal(back[places], memory[rows])
    assert not np.delete(back, places, axis=0).any()
    assert np.array_equal(np.concatenate(held.arrays)[slots], memory[rows])


@pytest.mark.usefixtures("_how")
@pytest.mark.parametrize("page_bytes", [7, 64, 300])
def test_every_flipped_bit_changes_the_checksum(page_bytes: int) -> None:
    page = numbers(1, page_bytes)
    bits = page_bytes * 8
    flipped = np.repeat(page, bits + 1, axis=0)
    flipped[np.arange(bits), np.arange(bits) // 8] ^= (1 << np.arange(bits) % 8).astype(np.uint8)
    sums = slabs(page_bytes, bits + 1).store(np.arange(bits + 1), flipped, np.arange(bits + 1))
    assert len(np.unique(sums)) == bits + 1


@pytest.mark.usefixtures("_how")
def test_lines_that_change_places_and_pairs_of_bits_change_the_checksum() -> None:
    page = numbers(1, 512)
    changed = [page.copy() for _ in range(64)]
    for index, one in enumerate(changed):
        first, second = index // 8 * 64, index % 8 * 64
        if first != second:
            one[0, first : first + 64], one[0, second : second + 64] = (
                page[0, second : second + 64],
                page[0, first : first + 64],
            )
        else:  # the highest bit of one number, and that of the next one in the same lane
            one[0, [first + 3, (first + 256 + 3) % 512]] ^= 128
    different = np.unique(np.concatenate([page, *changed]), axis=0)
    sums = slabs(512, len(different)).store(np.arange(len(different)), different, np.arange(len(different)))
    assert len(different) > 30
    assert len(np.unique(sums)) == len(different)


def test_the_checksum_is_the_same_with_every_instruction_set_and_number_of_threads() -> None:
    memory, found = numbers(200, 4096), []
    threads = _native.threads()
    for isa in _native.isas():
        _native.set_isa(isa)
        for count in (1, 3):
            _native.set_threads(count)
            found.append(slabs(4096, 200).store(np.arange(200), memory, np.arange(200)))
    _native.set_threads(max(threads, 1))
    assert all(np.array_equal(one, found[0]) for one in found)
    assert len(np.unique(found[0])) == 200


@pytest.mark.usefixtures("_how")
def test_swap_reads_into_rows_of_memory_and_loses_what_changed() -> None:
    swap = MemorySwap(64, 2**20)
    memory, back = numbers(10, 64), np.zeros((10, 64), np.uint8)
    slots = swap.write(memory, np.array([7, 2, 9]))
    assert swap.read(slots, back, np.array([1, 0, 5])) is back
    assert np.array_equal(back[[1, 0, 5]], memory[[7, 2, 9]])
    swap._slabs.arrays[0][slots[1], 63] ^= 128
    with pytest.raises(PageLost, match=rf"slots {slots[1]} differ"):
        swap.read(slots, back, np.array([1, 0, 5]))


def test_wrong_arguments_are_refused() -> None:
    place, memory, sums = np.zeros((4, 64), np.uint8), numbers(3, 64), np.zeros(1, np.int64)
    good = {
        "slabs": np.array([place.ctypes.data]),
        "starts": np.array([0]),
        "capacity": 4,
        "slots": np.array([3]),
        "memory": memory,
        "rows": np.array([2]),
        "to_slots": True,
        "sums": sums,
    }
    _native.copy_pages(**good)
    assert np.array_equal(place[3], memory[2])
    for name, wrong in {
        "slots": np.array([4]),
        "rows": np.array([3]),
        "starts": np.array([1]),
        "sums": np.zeros(2, np.int64),
        "memory": np.zeros((3, 64), np.int8),
    }.items():
        with pytest.raises(ValueError, match=name):
            _native.copy_pages(**{**good, name: wrong})
    memory.flags.writeable = False
    with pytest.raises(ValueError, match="memory"):
        _native.copy_pages(**{**good, "to_slots": False})


def test_hints_are_passed_on_only_while_something_comes_from_disk(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    swap = FileSwap(tmp_path, 4096, 2**24)
    slots = swap.write(numbers(200, 4096))
    waits, asked = [0], []
    monkeypatch.setattr("kvpager.swap.file.resource.getrusage", lambda _: SimpleNamespace(ru_majflt=waits[0]))
    real, swap._maps = swap._maps, [SimpleNamespace(madvise=lambda *which: asked.append(which))]
    swap._waits = 0
    for _ in range(2 * HINTS):
        swap.prefetch(slots[:3])
    assert len(asked) == HINTS
    waits[0] += 1
    for _ in range(2 * HINTS):
        swap.prefetch(slots[:3])
    assert len(asked) == 2 * HINTS
    swap._maps = real
    swap.close()
