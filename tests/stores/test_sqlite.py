"""The SQLite store: what is put comes back, bit for bit, also later and elsewhere."""

import shutil
import stat
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvpager.errors import ConfigError, InputError
from kvpager.stored import Scores, StoredBlock
from kvpager.stores.sqlite import SqliteStore
from tests.stores.fake import Clock, key_of
from tests.stores.made import blocks as any_blocks
from tests.stores.made import made_block
from tests.stores.sqlite_rig import MIB, MINE, YOURS, chain, found, keys, other_process, raw, said, store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "store.db"


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_what_is_put_comes_back_after_a_restart(path: Path, compression: str) -> None:
    blocks = chain(20)
    first = store(path, compression=compression)
    assert first.put(blocks[:12]) == 12
    assert first.put(blocks[8:]) == 8  # four are there
    assert found(first, blocks) == [True] * 20
    first.close()
    again = store(path)
    assert again.contains([key_of(1), *keys(blocks)]) == [False, *[True] * 20]
    assert again.heads([key_of(1), *keys(blocks)]) == [None, *[block.head for block in blocks]]
    assert found(again, blocks) == [True] * 20
    again.close()


@given(st.lists(any_blocks(), max_size=6, unique_by=lambda block: block.head.key))
@settings(max_examples=30, deadline=None)
def test_blocks_of_any_shape_come_back(tmp_path_factory: pytest.TempPathFactory, blocks: list[StoredBlock]) -> None:
    folder = tmp_path_factory.mktemp("any")
    tier = store(folder / "store.db")
    assert tier.put(blocks) == len(blocks)
    assert tier.heads(keys(blocks)) == [block.head for block in blocks]
    assert all(np.array_equal(a, b.payload) for a, b in zip(tier.get(keys(blocks)), blocks, strict=True))
    tier.close()
    shutil.rmtree(folder)


def test_no_page_is_read_to_find_blocks_after_a_restart(path: Path) -> None:
    blocks = chain(8)
    first = store(path)
    first.put(blocks)
    first.close()
    with raw(path) as connection:
        connection.execute("UPDATE payloads SET payload = x''")
    again = store(path)
    assert all(again.contains(keys(blocks)))
    assert again.heads(keys(blocks)) == [block.head for block in blocks]
    assert again.damaged == 0
    assert again.get(keys(blocks)) == [None] * 8
    assert again.damaged == 8
    again.close()


def test_some_pages_of_a_block_are_read_alone(path: Path) -> None:
    (block,) = chain(1)
    tier = store(path, compression="zstd")
    tier.put([block])
    pages = tier.get_pages(block.head.key, [15, 0, 3])
    assert pages is not None
    assert [page.tolist() for page in pages] == block.payload[[15, 0, 3]].tolist()
    assert tier.get_pages(block.head.key, []) == []
    assert tier.get_pages(key_of(1), [0]) is None
    tier.close()


def test_scores_hits_and_the_tick_come_back(path: Path) -> None:
    blocks = chain(3)
    tier = store(path)
    tier.put(blocks)
    assert tier.tick == 0
    tier.update([Scores(blocks[0].head.key, b"new", 2), Scores(key_of(1), b"none", 1)], tick=7)
    tier.update([Scores(blocks[0].head.key, b"newer", 1), Scores(blocks[1].head.key, b"", 0)], tick=5)
    tier.close()
    again = store(path)
    assert again.tick == 7
    heads = again.heads(keys(blocks))
    assert [(head.scores, head.hits) for head in heads if head] == [(b"newer", 3), (b"", 0), (blocks[2].head.scores, 0)]
    again.close()


def test_many_scores_are_told_at_once(path: Path) -> None:
    blocks = [made_block(seed, 1, 8, hits=0) for seed in range(1100)]
    tier = store(path)
    tier.put(blocks)
    tier.update([Scores(key, b"s%d" % at, at) for at, key in enumerate(reversed(keys(blocks)))], tick=1)
    heads = tier.heads(keys(blocks))
    assert [(head.scores, head.hits) for head in heads if head] == [(b"s%d" % at, at) for at in reversed(range(1100))]
    tier.close()


def test_dropped_blocks_are_gone_and_can_be_put_again(path: Path) -> None:
    blocks = chain(4)
    tier = store(path)
    tier.put(blocks)
    tier.drop([*keys(blocks[1:3]), key_of(1)])
    assert found(tier, blocks) == [True, False, False, True]
    assert tier.contains(keys(blocks)) == [True, False, False, True]
    assert tier.put(blocks) == 2
    assert found(tier, blocks) == [True] * 4
    tier.close()


def test_records_are_kept_replaced_and_dropped(path: Path) -> None:
    tier = store(path)
    assert tier.load_record(key_of(1)) is None
    tier.save_record(key_of(1), MINE, b"one")
    tier.save_record(key_of(2), MINE, b"two" * MIB)
    tier.save_record(key_of(1), MINE, b"")
    assert tier.sizes().records == 2
    tier.close()
    again = store(path)
    assert again.load_record(key_of(1)) == b""
    assert again.load_record(key_of(2)) == b"two" * MIB
    again.drop_record(key_of(2))
    again.drop_record(key_of(3))
    assert again.load_record(key_of(2)) is None
    assert again.sizes().records == 1
    again.close()


def test_sizes_are_counted_whatever_changes(path: Path) -> None:
    blocks = chain(6, tenant=MINE)
    tier = store(path)
    tier.put(blocks)
    tier.put(blocks[:2])
    tier.save_record(key_of(1), MINE, b"one")
    tier.save_record(key_of(1), MINE, b"two")
    tier.drop(keys(blocks[4:]))
    sizes = tier.sizes()
    assert (sizes.blocks, sizes.records, sizes.payload_bytes) == (4, 1, 4 * 16 * 4096)
    assert sizes.limit_bytes == 64 * MIB
    assert sizes.bytes == sum(file.stat().st_size for file in path.parent.iterdir())
    tier.erase(MINE)
    assert (tier.sizes().blocks, tier.sizes().records, tier.sizes().payload_bytes) == (0, 0, 0)
    tier.close()


def test_a_tenant_is_erased_and_its_bytes_are_nowhere(path: Path) -> None:
    mark = np.frombuffer(b"a secret of mine".ljust(4096, b"."), np.uint8)
    mine = [replace(block, payload=np.tile(mark, (16, 1))) for block in chain(40, 0, tenant=MINE)]
    yours = chain(40, 1, tenant=YOURS)
    tier = store(path)
    for at in range(0, 40, 8):
        tier.put(mine[at : at + 8])
        tier.put(yours[at : at + 8])
    tier.save_record(key_of(1), MINE, b"a secret of mine, too")
    tier.save_record(key_of(2), YOURS, b"none")
    tier.drop(keys(mine[30:]))  # what was dropped before is gone as well
    assert tier.erase(MINE) == 31
    assert tier.erase(MINE) == 0
    assert found(tier, mine) == [False] * 40
    assert found(tier, yours) == [True] * 40
    assert tier.load_record(key_of(1)) is None
    assert tier.load_record(key_of(2)) == b"none"
    for file in path.parent.iterdir():
        assert b"secret" not in file.read_bytes(), file.name
    tier.close()


def test_what_an_ended_process_had_to_erase_is_erased_with_the_next_block(path: Path) -> None:
    blocks = chain(4, tenant=MINE)
    tier = store(path)
    tier.put(blocks)
    tier.close()
    with raw(path) as connection:  # as a process leaves it that is killed between the two steps of `erase`
        connection.execute("INSERT INTO doomed SELECT id FROM blocks WHERE tenant = ?", (MINE,))
        connection.execute("DELETE FROM blocks")
    again = store(path)
    assert found(again, blocks) == [False] * 4
    again.put(chain(1, 1))
    again.close()
    assert not any(block.payload.tobytes()[:4096] in path.read_bytes() for block in blocks)


def test_only_the_owner_may_read_it(path: Path) -> None:
    tier = store(path)
    tier.put(chain(2))
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()} == {0o600}
    assert len(list(path.parent.iterdir())) == 5
    tier.close()
    path.chmod(0o644)
    again = store(path)
    again.open()
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()} == {0o600}
    again.close()


def test_close_can_be_called_again_and_a_closed_store_opens_when_it_is_used(path: Path) -> None:
    blocks = chain(2)
    tier = store(path)
    tier.close()
    assert not path.parent.exists()
    tier.put(blocks)
    tier.close()
    tier.close()
    assert sorted(file.name for file in path.parent.iterdir()) == ["store.db", "store.db.lock", "store.db.reserve"]
    assert found(tier, blocks) == [True] * 2
    tier.close()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"limit_bytes": 4 * MIB - 1}, "4194303"),
        ({"limit_bytes": 8 * MIB, "tenant_limit_bytes": 0}, "tenant is 0"),
        ({"limit_bytes": 8 * MIB, "synchronous": "off"}, "normal, full"),
        ({"limit_bytes": 8 * MIB, "compression": "zip"}, "none, zstd"),
    ],
)
def test_settings_out_of_their_range_are_refused(path: Path, settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SqliteStore(path, **settings)  # type: ignore[arg-type]
    assert not path.parent.exists()


def test_a_block_that_is_not_as_its_head_says_is_refused_and_nothing_is_written(path: Path) -> None:
    good, bad = chain(2)
    tier = store(path)
    with pytest.raises(InputError, match="payload"):
        tier.put([good, replace(bad, payload=bad.payload[1:])])
    assert found(tier, [good]) == [False]
    tier.close()


def test_what_another_store_adds_is_found_and_what_it_takes_away_is_a_miss(path: Path) -> None:
    blocks = chain(6)
    clock = Clock()
    one, two = store(path, clock=clock), store(path)
    assert found(one, blocks) == [False] * 6
    two.put(blocks)
    assert one.contains(keys(blocks)) == [False] * 6  # looked at not long ago
    clock.now += 0.2
    assert one.contains(keys(blocks)) == [True] * 6
    two.drop(keys(blocks[4:]))
    clock.now += 0.2
    assert one.contains(keys(blocks)) == [True] * 6  # nobody has told
    assert found(one, blocks[:5]) == [True] * 4 + [False]
    assert one.contains(keys(blocks)) == [True] * 4 + [False, True]
    clock.now += 5
    assert one.contains(keys(blocks)) == [True] * 4 + [False, False]
    assert one.put(blocks) == 2
    one.close()
    two.close()


WRITER = """
    import json, sys
    from pathlib import Path
    from tests.stores.sqlite_rig import chain, store
    tier = store(Path(sys.argv[1]), busy_ms=20000)
    count = sum(tier.put(chain(40, int(sys.argv[2]))[at : at + 4]) for at in range(0, 40, 4))
    count += sum(tier.put(chain(40, 9)[at : at + 4]) for at in range(0, 40, 4))
    tier.close()
    print(json.dumps(count))
"""


def test_processes_write_to_one_store_at_the_same_time(path: Path) -> None:
    processes = [other_process(WRITER, str(path), str(seed), PYTHONHASHSEED=str(seed)) for seed in range(3)]
    assert sum(said(process) for process in processes) == 160  # each block once
    tier = store(path)
    for seed in (0, 1, 2, 9):
        assert found(tier, chain(40, seed)) == [True] * 40
    assert tier.verify().damaged == ()
    tier.close()


def test_threads_read_beside_one_that_writes(path: Path) -> None:
    blocks = chain(200, pages=4)
    tier = store(path)
    written = 0
    failed: list[BaseException] = []
    done = threading.Event()

    def read() -> None:
        try:
            while not done.is_set():
                sure = written
                assert all(found(tier, blocks[:sure]))
                assert found(tier, blocks[150:]) in (
                    [False] * 50,
                    *([True] * n + [False] * (50 - n) for n in range(51)),
                )
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for at in range(0, 150, 5):
        tier.put(blocks[at : at + 5])
        written = at + 5
    done.set()
    for thread in threads:
        thread.join()
    assert failed == []
    tier.close()


class Histories(RuleBasedStateMachine):
    """Random calls of two stores over one file do what they would do to a dict."""

    blocks: ClassVar = [
        block for seed in range(3) for block in chain(4, seed, pages=2, page_bytes=64, tenant=(MINE, YOURS)[seed % 2])
    ]
    some = st.lists(st.sampled_from(blocks), max_size=6, unique_by=lambda block: block.head.key)
    which = st.integers(0, 1)
    numbers = st.integers(0, 3)

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.clock = Clock()
        self.stores = [self.opened(), self.opened()]
        self.held: dict[bytes, tuple[bytes, int]] = {}
        self.records: dict[bytes, tuple[bytes, bytes]] = {}
        self.tick = 0

    def opened(self) -> SqliteStore:
        return store(self.folder / "store.db", clock=self.clock)

    @rule(which=which, some=some)
    def put(self, which: int, some: list[StoredBlock]) -> None:
        new = [block for block in some if block.head.key not in self.held]
        assert self.stores[which].put(some) == len(new)
        self.held.update({block.head.key: (block.head.scores, 0) for block in new})

    @rule(which=which, some=some)
    def drop(self, which: int, some: list[StoredBlock]) -> None:
        self.stores[which].drop(keys(some))
        for block in some:
            self.held.pop(block.head.key, None)

    @rule(which=which, some=some, hits=numbers, scores=st.binary(max_size=5))
    def update(self, which: int, some: list[StoredBlock], hits: int, scores: bytes) -> None:
        self.tick += 1
        self.stores[which].heads([])  # a look at the index
        self.stores[which].update([Scores(key, scores, hits) for key in keys(some)], self.tick)
        for key in keys(some):
            if key in self.held:
                self.held[key] = (scores, self.held[key][1] + hits)

    @rule(which=which, number=numbers, tenant=st.sampled_from([MINE, YOURS]), record=st.binary(max_size=9))
    def save(self, which: int, number: int, tenant: bytes, record: bytes) -> None:
        self.stores[which].save_record(key_of(number), tenant, record)
        self.records[key_of(number)] = (tenant, record)

    @rule(which=which, number=numbers)
    def forget(self, which: int, number: int) -> None:
        self.stores[which].drop_record(key_of(number))
        self.records.pop(key_of(number), None)

    @rule(which=which, tenant=st.sampled_from([MINE, YOURS]))
    def erase(self, which: int, tenant: bytes) -> None:
        blocks = [
            block.head.key for block in self.blocks if block.head.tenant == tenant and block.head.key in self.held
        ]
        records = [key for key, (whose, _) in self.records.items() if whose == tenant]
        assert self.stores[which].erase(tenant) == len(blocks) + len(records)
        self.held = {key: value for key, value in self.held.items() if key not in blocks}
        self.records = {key: value for key, value in self.records.items() if key not in records}

    @rule(which=which)
    def restart(self, which: int) -> None:
        self.stores[which].close()
        self.stores[which] = self.opened()

    @invariant()
    def both_say_the_same(self) -> None:
        self.clock.now += 10
        for tier in self.stores:
            heads = tier.heads(keys(self.blocks))
            there = {head.key: (head.scores, head.hits) for head in heads if head is not None}
            assert there == self.held
            assert found(tier, self.blocks) == tier.contains(keys(self.blocks))
            assert {key_of(n): tier.load_record(key_of(n)) for n in range(4)} == {
                key_of(n): self.records.get(key_of(n), (b"", None))[1] for n in range(4)
            }
            sizes = tier.sizes()
            assert (sizes.blocks, sizes.records) == (len(self.held), len(self.records))

    def teardown(self) -> None:
        report = self.stores[0].verify()
        assert report.damaged == ()
        assert (report.blocks, report.records) == (len(self.held), len(self.records))
        for tier in self.stores:
            assert tier.damaged == 0
            tier.close()
        shutil.rmtree(self.folder)


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=40, stateful_step_count=20, deadline=None, derandomize=True)
