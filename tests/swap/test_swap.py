"""One table over both kinds of swap."""

import gc
import os
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpager.errors import InputError, PageLost, SwapError, SwapFull
from kvpager.swap import FallbackSwap, FileSwap, MemorySwap, open_swap
from kvpager.swap.slots import SLAB_BYTES, SlabSwap

Make = Callable[..., SlabSwap]


@pytest.fixture(params=["memory", "file"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    made: list[SlabSwap] = []

    def build(page_bytes: int = 64, limit_bytes: int = 2**30) -> SlabSwap:
        in_memory = request.param == "memory"
        swap = MemorySwap(page_bytes, limit_bytes) if in_memory else FileSwap(tmp_path, page_bytes, limit_bytes)
        made.append(swap)
        return swap

    yield build
    for swap in made:
        swap.close()
    assert list(tmp_path.iterdir()) == []


def some_pages(count: int, page_bytes: int = 64, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, page_bytes), dtype=np.uint8)


@pytest.mark.parametrize("page_bytes", [1, 64, 768, 1536, 4096, 12288, 2 * SLAB_BYTES + 1])
def test_pages_come_back_bit_for_bit_in_any_order(make: Make, page_bytes: int) -> None:
    swap = make(page_bytes)
    pages = some_pages(9, page_bytes)
    slots = np.concatenate([swap.write(pages[:4]), swap.write(pages[4:])])
    order = np.array([8, 0, 3, 3, 5])
    assert np.array_equal(swap.read(slots[order]), pages[order])
    assert swap.used == 9


def test_no_pages_are_no_slots(make: Make) -> None:
    swap = make()
    none = np.zeros(0, np.int64)
    assert swap.write(some_pages(0)).shape == (0,)
    assert swap.read(none).shape == (0, 64)
    swap.free(none)
    swap.prefetch(none)
    assert swap.used == swap.nbytes == swap.table_bytes == 0


def test_growing_moves_nothing_and_counts_every_byte(make: Make) -> None:
    swap = make(1536)
    per_slab = SLAB_BYTES // 1536
    pages = some_pages(3 * per_slab, 1536)
    slots = np.concatenate([swap.write(part) for part in np.array_split(pages, 40)])
    assert len(np.unique(slots)) == len(slots)
    shuffled = np.random.default_rng(1).permutation(len(slots))
    swap.prefetch(slots[shuffled])
    assert np.array_equal(swap.read(slots[shuffled]), pages[shuffled])
    assert pages.nbytes <= swap.nbytes <= pages.nbytes + 2 * SLAB_BYTES
    assert 0 < swap.table_bytes <= 13 * (swap.nbytes // 1536) + 8 * 16


def test_slabs_grow_with_what_is_there(make: Make) -> None:
    swap = make(4096)
    sizes = set()
    for _ in range(24):
        swap.write(some_pages(SLAB_BYTES // 4096, 4096))
        sizes.add(swap.nbytes)
    steps = np.diff([0, *sorted(sizes)])
    assert steps.min() == SLAB_BYTES
    assert steps.max() >= sorted(sizes)[-2] // 8 - 4096
    assert len(steps) < 24


def test_freed_slots_are_used_again_before_new_ones(make: Make) -> None:
    swap = make()
    slots = swap.write(some_pages(10))
    swap.free(slots[[7, 2, 5]])
    assert swap.used == 7
    assert set(swap.write(some_pages(3, seed=1)).tolist()) == set(slots[[2, 5, 7]].tolist())
    assert np.array_equal(swap.read(slots[[2, 5, 7]]), some_pages(3, seed=1))


@pytest.mark.parametrize("page_bytes", [64, 1536, 4096])
def test_limit_is_refused_with_sizes_before_anything_is_written(make: Make, page_bytes: int) -> None:
    swap = make(page_bytes, limit_bytes=10 * page_bytes + 1)
    slots = swap.write(some_pages(7, page_bytes))
    with pytest.raises(SwapFull, match=rf"4 pages of {page_bytes} bytes .* 3 more fit .* {10 * page_bytes + 1} bytes"):
        swap.write(some_pages(4, page_bytes, seed=1))
    assert swap.used == 7
    more = swap.write(some_pages(3, page_bytes, seed=2))
    assert swap.nbytes == 10 * page_bytes
    swap.free(slots)
    swap.write(some_pages(7, page_bytes, seed=3))
    assert np.array_equal(swap.read(more), some_pages(3, page_bytes, seed=2))
    assert swap.nbytes == 10 * page_bytes


def test_a_limit_below_one_page_holds_nothing(make: Make) -> None:
    with pytest.raises(SwapFull):
        make(64, limit_bytes=63).write(some_pages(1))


@pytest.mark.parametrize("byte", [0, 31, 63])
def test_one_damaged_byte_loses_its_page_and_no_other(make: Make, byte: int) -> None:
    swap = make()
    slots = swap.write(some_pages(5))
    swap._slabs.arrays[0][slots[3], byte] ^= 1
    with pytest.raises(PageLost, match=rf"slots {slots[3]} differ"):
        swap.read(slots)
    assert np.array_equal(swap.read(slots[:3]), some_pages(5)[:3])


@pytest.mark.parametrize("slot", [-1, 3, 10**6])
def test_a_slot_never_written_is_lost(make: Make, slot: int) -> None:
    swap = make()
    with pytest.raises(PageLost, match=str(slot)):
        swap.read(np.array([slot]))
    slots = swap.write(some_pages(2))
    with pytest.raises(PageLost, match=str(slot)):
        swap.read(np.append(slots, slot))


def test_a_freed_slot_is_lost(make: Make) -> None:
    swap = make()
    slots = swap.write(some_pages(2))
    swap.free(slots[:1])
    with pytest.raises(PageLost, match=f"slots {slots[0]} hold no page"):
        swap.read(slots)


@pytest.mark.parametrize("again", [[0], [0, 1], [1, 1], [-1], [99]])
def test_double_free_is_an_assertion_and_changes_nothing(make: Make, again: list[int]) -> None:
    swap = make()
    swap.write(some_pages(3))
    swap.free(np.array([0]))
    with pytest.raises(AssertionError):
        swap.free(np.array(again))
    assert swap.used == 2
    assert np.array_equal(swap.read(np.array([1, 2])), some_pages(3)[1:])


@pytest.mark.promise(6)
@pytest.mark.parametrize(
    "pages",
    [np.zeros((2, 63), np.uint8), np.zeros(64, np.uint8), np.zeros((2, 64), np.int8), np.zeros((1, 2, 64), np.uint8)],
)
def test_pages_of_another_shape_or_type_are_refused(make: Make, pages: np.ndarray) -> None:
    swap = make()
    with pytest.raises(InputError, match=r"uint8 \[n, 64\]"):
        swap.write(pages)
    assert swap.used == 0


@pytest.mark.parametrize(("page_bytes", "limit"), [(0, 100), (-1, 100), (64, -1)])
def test_sizes_out_of_range_are_refused(make: Make, page_bytes: int, limit: int) -> None:
    with pytest.raises(InputError, match=r"page_bytes|limit_bytes"):
        make(page_bytes, limit)


def test_given_pages_may_lie_anywhere_and_are_not_kept(make: Make) -> None:
    swap = make()
    wide = some_pages(6, 128)
    slots = swap.write(wide[::2, ::2])
    kept = wide[::2, ::2].copy()
    wide[:] = 0
    first = swap.read(slots)
    first[:] = 1
    assert np.array_equal(swap.read(slots), kept)


def test_close_is_idempotent_and_releases_everything(make: Make) -> None:
    swap = make()
    slots = swap.write(some_pages(3))
    swap.close()
    swap.close()
    assert swap.used == swap.nbytes == swap.table_bytes == 0
    for call in (lambda: swap.write(some_pages(1)), lambda: swap.read(slots), lambda: swap.free(slots)):
        with pytest.raises(SwapError, match="closed"):
            call()


actions = st.lists(st.tuples(st.sampled_from(["write", "free", "read"]), st.integers(0, 9)), max_size=40)


@pytest.mark.promise(3)
@pytest.mark.parametrize("kind", ["memory", "file"])
@settings(max_examples=60, deadline=None)
@given(history=actions, limit=st.integers(0, 30), seed=st.integers(0, 2**16))
def test_any_history_equals_a_dictionary(
    kind: str, tmp_path_factory: pytest.TempPathFactory, history: list[tuple[str, int]], limit: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    model: dict[int, bytes] = {}
    folder = tmp_path_factory.getbasetemp()
    swap = open_swap("memory" if kind == "memory" else folder, 48, limit * 48)
    for action, number in history:
        chosen = rng.permutation(np.array(sorted(model), np.int64))[:number]
        if action == "write":
            pages = rng.integers(0, 256, (number, 48), dtype=np.uint8)
            if len(model) + number > limit:
                with pytest.raises(SwapFull):
                    swap.write(pages)
            else:
                slots = swap.write(pages)
                assert not set(slots.tolist()) & set(model)
                model.update(zip(slots.tolist(), map(bytes, pages), strict=True))
        elif action == "free":
            swap.free(chosen)
            for slot in chosen.tolist():
                del model[slot]
        else:
            swap.prefetch(chosen)
            assert [bytes(page) for page in swap.read(chosen)] == [model[slot] for slot in chosen.tolist()]
        assert swap.used == len(model)
        assert swap.used * 48 <= swap.nbytes <= limit * 48
    swap.close()


def test_the_setting_names_the_swap(tmp_path: Path) -> None:
    assert isinstance(open_swap(None, 64, 640), MemorySwap)
    assert isinstance(open_swap("memory", 64, 640), MemorySwap)
    for place in (tmp_path / "a.swap", str(tmp_path / "b.swap"), tmp_path):
        swap = open_swap(place, 64, 640)
        assert isinstance(swap, FallbackSwap)
        swap.close()


def test_an_existing_file_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("precious")
    with pytest.raises(SwapError, match=r"mine\.txt exists already"):
        FileSwap(path, 64, 640)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(SwapError, match="exists already"):
        FileSwap(link, 64, 640)
    assert path.read_text() == "precious"


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(SwapError, match=r"no-such-folder/x\.swap can't be made: No such file"):
        FileSwap(tmp_path / "no-such-folder" / "x.swap", 64, 640)


@pytest.mark.parametrize("path", ["a\0b", "~no-such-user-here/swap"])
def test_a_path_that_is_none_is_named(path: str) -> None:
    with pytest.raises(SwapError, match="can't be made"):
        FileSwap(path, 64, 2**20)


def test_two_swaps_share_a_folder(tmp_path: Path) -> None:
    one, two = FileSwap(tmp_path, 64, 640), FileSwap(tmp_path, 64, 640)
    slots = one.write(some_pages(2)), two.write(some_pages(2, seed=1))
    assert np.array_equal(one.read(slots[0]), some_pages(2))
    assert np.array_equal(two.read(slots[1]), some_pages(2, seed=1))
    one.close()
    two.close()


def test_only_the_owner_may_read_the_file(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        swap = FileSwap(tmp_path / "x.swap", 64, 640)
    finally:
        os.umask(old)
    assert os.fstat(swap._fd).st_mode & 0o777 == 0o600
    swap.close()


def test_the_file_has_its_space_before_it_is_written(tmp_path: Path) -> None:
    swap = FileSwap(tmp_path, 4096, 2**30)
    swap.write(some_pages(1, 4096))
    status = os.fstat(swap._fd)
    assert status.st_size == swap.nbytes == SLAB_BYTES
    assert status.st_blocks * 512 >= SLAB_BYTES
    swap.close()


def test_no_room_on_the_disk_is_swap_full_and_what_is_stored_stays(tmp_path: Path) -> None:
    swap = FileSwap(tmp_path, 4096, 2**30)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A limit on the file's size fails like a full disk: the first slab is cut to what fits, then nothing fits.
    resource.setrlimit(resource.RLIMIT_FSIZE, (SLAB_BYTES // 2, hard))
    try:
        slots = swap.write(some_pages(100, 4096))
        assert swap.nbytes == 100 * 4096
        with pytest.raises(SwapFull, match=r"no room for \d+ more bytes"):
            swap.write(some_pages(100, 4096, seed=1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.fstat(swap._fd).st_size == swap.nbytes
    more = swap.write(some_pages(100, 4096, seed=1))
    assert np.array_equal(swap.read(slots), some_pages(100, 4096))
    assert np.array_equal(swap.read(more), some_pages(100, 4096, seed=1))
    swap.close()


def test_a_swap_that_is_dropped_gives_its_file_back(tmp_path: Path) -> None:
    swap = FileSwap(tmp_path, 64, 640)
    swap.write(some_pages(2))
    fd = swap._fd
    del swap
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


ENDINGS = {
    "exit": ("", 0),
    "exception": ("raise SystemExit(3)", 3),
    "killed": ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
}


# A file system that keeps an open file's name keeps it after a kill too: that one case is left out.
@pytest.mark.parametrize(
    ("ending", "nameless"),
    [("exit", True), ("exception", True), ("killed", True), ("exit", False), ("exception", False)],
)
def test_no_file_is_left_however_the_process_ends(tmp_path: Path, ending: str, nameless: bool) -> None:
    statement, code = ENDINGS[ending]
    script = f"""
        import os, numpy as np
        unlink = os.unlink
        def refuse(path): raise PermissionError(path)
        if not {nameless}: os.unlink = refuse
        from kvpager.swap import FileSwap
        swap = FileSwap({str(tmp_path)!r}, 64, 640)
        os.unlink = unlink
        assert len(os.listdir({str(tmp_path)!r})) == (0 if {nameless} else 1)
        if os.fork() == 0: raise SystemExit  # a child that ends leaves its parent's file alone
        os.wait()
        assert len(os.listdir({str(tmp_path)!r})) == (0 if {nameless} else 1)
        swap.write(np.ones((2, 64), np.uint8))
        {statement}
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False).returncode == code
    assert list(tmp_path.iterdir()) == []
