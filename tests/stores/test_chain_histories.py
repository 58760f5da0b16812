"""Random histories: whatever has been written and whatever fails for a while, the chain reads as a plain dict would."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpager.errors import StoreLocked
from kvpager.stored import BlockHead, Scores
from kvpager.stores.chain import Chain
from kvpager.stores.limits import Limits
from tests.stores.fake import SETTLED, Clock, FakeTier, block, key_of

BLOCKS = st.integers(0, 7)
TENANTS = st.sampled_from([bytes(16), b"a" * 16, b"b" * 16])
WRITES = ("put", "update", "drop", "save_record", "drop_record", "erase")


class Histories(RuleBasedStateMachine):
    """A chain of one or two tiers that are locked now and then, beside dicts of what must be found."""

    def __init__(self) -> None:
        super().__init__()
        self.heads: dict[bytes, BlockHead] = {}
        self.records: dict[bytes, tuple[bytes, bytes]] = {}
        self.locked = False
        self.tick = 0

    @initialize(tiers=st.integers(1, 2))
    def open(self, tiers: int) -> None:
        self.clock = Clock()
        self.tiers = [FakeTier() for _ in range(tiers)]
        limits = Limits(erase_s=SETTLED, slow_s=SETTLED, linger_s=0.001, batch_bytes=300)
        self.chain = Chain([lambda tier=tier: tier for tier in self.tiers], limits, self.clock)  # type: ignore[misc]

    @rule(numbers=st.lists(BLOCKS, max_size=4), tenant=TENANTS)
    def put(self, numbers: list[int], tenant: bytes) -> None:
        blocks = [block(number, tenant=tenant) for number in numbers]
        assert self.chain.put(blocks) == len(blocks)
        for one in blocks:
            self.heads.setdefault(one.head.key, one.head)

    @rule(numbers=st.lists(BLOCKS, max_size=4, unique=True), scores=st.binary(max_size=2), hits=st.integers(0, 3))
    def update(self, numbers: list[int], scores: bytes, hits: int) -> None:
        self.tick += 1
        self.chain.update([Scores(key_of(number), scores, hits) for number in numbers], self.tick)
        for number in numbers:
            head = self.heads.get(key_of(number))
            if head is not None:
                self.heads[head.key] = head.rescored(scores, head.hits + hits)

    @rule(numbers=st.lists(BLOCKS, max_size=4))
    def drop(self, numbers: list[int]) -> None:
        self.chain.drop([key_of(number) for number in numbers])
        for number in numbers:
            self.heads.pop(key_of(number), None)

    @rule(number=BLOCKS, tenant=TENANTS, record=st.binary(max_size=8))
    def save(self, number: int, tenant: bytes, record: bytes) -> None:
        assert self.chain.save_record(key_of(number), tenant, record)
        self.records[key_of(number)] = (tenant, record)

    @rule(number=BLOCKS)
    def drop_record(self, number: int) -> None:
        self.chain.drop_record(key_of(number))
        self.records.pop(key_of(number), None)

    @precondition(lambda self: not self.locked)
    @rule(tenant=TENANTS)
    def erase(self, tenant: bytes) -> None:
        self.settle()
        blocks = [key for key, head in self.heads.items() if head.tenant == tenant]
        records = [key for key, (owner, _) in self.records.items() if owner == tenant]
        assert self.chain.erase(tenant).wait() == len(blocks) + len(records)
        for key in blocks:
            del self.heads[key]
        for key in records:
            del self.records[key]

    @rule(numbers=st.lists(BLOCKS, max_size=4))
    def prefetch(self, numbers: list[int]) -> None:
        self.chain.prefetch([key_of(number) for number in numbers])

    @rule()
    def lock(self) -> None:
        self.locked = True
        for tier in self.tiers:
            tier.fails = dict.fromkeys(WRITES, StoreLocked("another process writes"))

    @rule()
    def unlock(self) -> None:
        self.locked = False
        for tier in self.tiers:
            tier.fails = {}
        self.clock.now += 100

    @precondition(lambda self: not self.locked)
    @rule()
    def settle(self) -> None:
        self.clock.now += 100
        assert self.chain.flush(SETTLED)
        stored = {key: held.head for key, held in self.tiers[0].blocks.items()}
        assert stored == self.heads
        assert self.tiers[0].records == self.records
        assert self.chain.stats().waiting_bytes == 0

    @invariant()
    def reads_as_if_all_were_written(self) -> None:
        if not hasattr(self, "chain"):
            return
        keys = [key_of(number) for number in range(8)]
        assert self.chain.contains(keys) == [key in self.heads for key in keys]
        assert self.chain.heads(keys) == [self.heads.get(key) for key in keys]
        for number, payload in enumerate(self.chain.get(keys)):
            assert (payload is not None) == (keys[number] in self.heads)
            assert payload is None or np.array_equal(payload, block(number).payload)
        records = [self.records.get(key, (b"", None))[1] for key in keys]
        assert [self.chain.load_record(key) for key in keys] == records
        assert self.chain.tick == self.tick
        assert self.chain.stats().errors.keys() <= {"locked"}

    def teardown(self) -> None:
        if hasattr(self, "chain"):
            self.unlock()
            self.settle()
            self.chain.close()


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
