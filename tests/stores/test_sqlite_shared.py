"""A SQLite store that several stores, processes and threads use at once, and random histories of two of them."""

import shutil
import tempfile
import threading
from pathlib import Path
from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvpager.stored import Scores, StoredBlock
from kvpager.stores.sqlite import SqliteStore
from tests.stores.fake import Clock, key_of
from tests.stores.sqlite_rig import MINE, YOURS, chain, found, keys, other_process, said, store


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
