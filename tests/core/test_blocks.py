from __future__ import annotations

import subprocess
import sys

import pytest

from kvpager.core.blocks import Blocks, KeyMaker, Name, packed, tenant
from kvpager.core.pool import FramePool
from kvpager.errors import PoolExhausted


def blocks(namespace="n", cached=0, release=None, approximate="a"):
    return Blocks(KeyMaker(namespace, approximate), 4, cached, release or (lambda rows: None))


def register(table, row, parent, tokens, approximate=False, root=b""):
    key = table.keys.key(parent, packed(tokens), approximate)
    table.register(row, Name(key, parent, root, 0, packed(tokens), approximate))
    return key


def test_keys_say_everything_and_fields_cannot_run_together():
    maker = KeyMaker("model|tenant", "budget=3")
    plain = maker.key(b"", b"tokens", False)
    assert len(plain) == 32
    different = {
        plain,
        maker.key(b"", b"tokens", True),
        maker.key(plain, b"tokens", False),
        maker.key(b"", b"token", False),
        maker.key(b"t", b"okens", False),
        KeyMaker("model|tenan", "t").key(b"", b"tokens", False),
        KeyMaker("model|tenant", "budget=4").key(b"", b"tokens", True),
    }
    assert len(different) == 7
    assert KeyMaker("model|tenant", "budget=4").key(b"", b"tokens", False) == plain


def test_another_process_makes_the_same_key():
    program = "from kvpager.core.blocks import KeyMaker; print(KeyMaker('n', 'a').key(b'p', b'tt', True).hex())"
    made = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert made == {KeyMaker("n", "a").key(b"p", b"tt", True).hex()}


def test_a_match_leaves_the_last_token_out():
    table = blocks()
    rows = [table.take(), table.take()]
    key = register(table, rows[0], b"", [1, 2, 3, 4])
    register(table, rows[1], key, [5, 6, 7, 8])
    assert table.match([1, 2, 3, 4]).rows == []
    assert table.match([1, 2, 3, 4, 5]).rows == rows[:1]
    assert table.match([1, 2, 3, 4, 5, 6, 7, 8]).rows == rows[:1]
    assert table.match([1, 2, 3, 4, 5, 6, 7, 8, 9]).rows == rows
    assert table.match([1, 2, 3, 9, 5]).rows == []


def test_tokens_are_compared_even_if_keys_collide():
    class Colliding(KeyMaker):
        def key(self, parent, tokens, approximate):
            return bytes([super().key(parent, tokens, approximate)[0] & 1])

    table = Blocks(Colliding("n", "a"), 4, 0, lambda rows: None)
    for start in range(0, 80, 4):
        row = table.take()
        register(table, row, b"", list(range(start, start + 4)))
    for start in range(0, 80, 4):
        for row in table.match([*range(start, start + 4), 0]).rows:
            assert table._entries[row].tokens[:1] == bytes([start])


def test_cached_blocks_are_reclaimed_in_the_order_they_were_left():
    gone = []
    table = blocks(cached=8, release=gone.extend)
    rows = [table.take() for _ in range(3)]
    for index, row in enumerate(rows):
        register(table, row, b"", [index] * 4)
        table.drop(row)
    assert gone == [rows[0]]
    table.hold(rows[1])
    assert table.cached == 1
    assert table.reclaim()
    assert gone == [rows[0], rows[2]]
    assert not table.reclaim()
    assert table.match([0, 0, 0, 0, 1]).rows == []
    assert table.match([1, 1, 1, 1, 1]).rows == [rows[1]]
    table.check({rows[1]: 1})


def test_a_tenant_is_told_from_others_and_nothing_of_its_salt():
    assert tenant(b"") == bytes(16)
    assert len({tenant(salt) for salt in (b"", b"a", b"b", b"ab")}) == 4
    assert tenant(b"a") not in (KeyMaker.root(b"a")[:16], b"a".ljust(16, b"\0"))


def test_what_is_forgotten_is_not_found_again_but_stays_with_who_holds_it():
    gone = []
    table = blocks(cached=80, release=gone.extend)
    rows = [table.take() for _ in range(3)]
    for index, (row, root) in enumerate(zip(rows, (b"a", b"a", b"b"), strict=True)):
        register(table, row, root, [index] * 4, root=root)
    table.drop(rows[0])
    assert table.forget(b"a") == 2
    assert gone == rows[:1]
    assert table.match([1, 1, 1, 1, 0], b"a").rows == []
    assert table.match([2, 2, 2, 2, 0], b"b").rows == rows[2:]
    table.check({rows[1]: 1, rows[2]: 1})


def test_who_listens_hears_of_rows_while_they_have_their_names():
    heard = []
    table = blocks(cached=4)
    table.leaving = lambda rows: heard.extend(table.name(row).tokens for row in rows)
    rows = [table.take() for _ in range(2)]
    for index, row in enumerate(rows):
        register(table, row, b"", [index] * 4)
        table.drop(row)
    assert heard == [packed([0] * 4)]


def test_the_books_notice_a_wrong_count():
    table = blocks()
    row = table.take()
    with pytest.raises(AssertionError, match="1 references, 2 holders"):
        table.check({row: 2})


def test_a_pool_names_sizes_when_it_is_exhausted():
    import numpy as np

    pool = FramePool(4)
    frames = pool.allocate(np.arange(3))
    assert sorted(frames.tolist()) == [0, 1, 2]
    with pytest.raises(PoolExhausted, match="2 frames are needed and 1 of 4 are free"):
        pool.allocate(np.array([7, 8]))
    assert pool.used == 3
    pool.free(frames[:1])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(frames[:1])
    pool.check()
    asked = []
    with pytest.raises(PoolExhausted):
        pool.allocate(np.arange(10, 14), asked.append)
    assert asked == [2]
    assert pool.used == 2
