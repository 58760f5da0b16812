"""Books balance after any history (promise 3), and no history changes what a sequence holds."""

from __future__ import annotations

import tempfile

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpager import KVShape, Pager, PagerConfig
from kvpager.config import POLICIES
from kvpager.errors import InputError
from tests.core.rig import Rig

SHAPE = KVShape(layers=2, kv_heads=2, query_heads=4, head_dim=8, windows=(30, None))
MOST = 4  # sequences


class History(RuleBasedStateMachine):
    """Open, append, attend, fork, trim, park, close and recall in any order, over the smallest pool that serves."""

    mode = "recall"

    @initialize(
        policy=st.sampled_from(POLICIES),
        budget=st.sampled_from([None, 32, 56]),
        file=st.booleans(),
        cached=st.sampled_from([0, 64]),
        seed=st.integers(0, 2**16),
    )
    def start(self, policy, budget, file, cached, seed):
        if self.mode == "discard":
            budget, cached = budget or 40, 0
        settings = {"budget": budget, "policy": policy, "mode": self.mode, "page_size": 8, "tile": 16, "group_pages": 4}
        smallest = Pager(SHAPE, PagerConfig(pool=1, **settings)).minimum_frames(MOST)
        # in discard mode a step's whole chunk of new tokens comes on top, and a copy of an open block
        self.folder = tempfile.TemporaryDirectory()
        extra = 80 if self.mode == "discard" else 0
        swap = self.folder.name if file else "memory"
        self.rig = Rig(SHAPE, seed, pool=smallest + extra, swap=swap, prefix_tokens=cached, **settings)
        self.live = []
        self.next_token = 0

    def pick(self, data):
        sequence = data.draw(st.sampled_from(self.live))
        self.rig.pager.unpark(sequence)
        return sequence

    def words(self, count):
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    @precondition(lambda self: len(self.live) < MOST)
    @rule()
    def open(self):
        self.live.append(self.rig.open())

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 40), commit=st.booleans())
    def step_one(self, data, count, commit):
        sequence = self.pick(data)
        self.rig.feed([sequence], [count], commit=commit, token_ids=[self.words(count)])
        self.bury()

    @precondition(lambda self: len(self.live) > 1)
    @rule(counts=st.lists(st.integers(1, 12), min_size=MOST, max_size=MOST))
    def step_all(self, counts):
        for sequence in self.live:
            self.rig.pager.unpark(sequence)
        self.rig.feed(self.live, counts[: len(self.live)])

    @precondition(lambda self: self.live and self.mode == "recall")
    @rule(data=st.data())
    def look(self, data):
        sequence = self.pick(data)
        if sequence.length:
            self.rig.check_reads(sequence)
            self.rig.pager.scores(sequence, 0)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 3))
    def attend_outside_a_step(self, data, count):
        sequence = self.pick(data)
        if sequence.length >= count:
            queries = self.rig.random(4, count)
            self.rig.events.clear()
            result = self.rig.pager.attend(sequence, 1, queries)
            self.rig.compare(1, queries, self.rig.truth[sequence.id][1], result)

    @precondition(lambda self: 0 < len(self.live) < MOST)
    @rule(data=st.data())
    def fork(self, data):
        self.live.append(self.rig.fork(self.pick(data)))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), share=st.floats(0, 1))
    def trim(self, data, share):
        sequence = self.pick(data)
        try:
            self.rig.crop(sequence, int(sequence.length * share))
        except InputError:
            assert self.mode == "discard"

    @precondition(lambda self: self.live and self.mode == "recall")
    @rule(data=st.data())
    def park(self, data):
        self.rig.pager.park(data.draw(st.sampled_from(self.live)))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def close(self, data):
        sequence = data.draw(st.sampled_from(self.live))
        self.rig.pager.close(sequence)
        self.bury()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def a_step_left_open_is_rolled_back_by_the_next_call(self, data):
        sequence = self.pick(data)
        self.rig.pager.begin([sequence], [9])
        self.rig.pager.append(sequence, 0, self.rig.random(2, 9), self.rig.random(2, 9))
        self.rig.pager.crop(sequence, sequence.length)

    def bury(self):
        # in discard mode a rollback may have to close a sequence
        self.live = [sequence for sequence in self.live if not sequence.closed]

    @invariant()
    def books_balance(self):
        if hasattr(self, "rig"):
            self.rig.pager.check()
            stats = self.rig.pager.stats()
            resident = {
                frame
                for sequence in self.live
                for frame in self.rig.pager.page_table(sequence).ravel().tolist()
                if frame >= 0
            }
            assert stats.frames_used >= len(resident)
            assert stats.cached_blocks or stats.frames_used == len(resident)
            assert stats.tokens == sum(sequence.length for sequence in self.live)

    def teardown(self):
        if hasattr(self, "rig"):
            for sequence in self.live:
                self.rig.pager.close(sequence)
            self.rig.pager.check()
            stats = self.rig.pager.stats()
            assert stats.sequences == stats.tokens == 0
            assert stats.cached_blocks or stats.frames_used == 0
            self.rig.pager.shutdown()
            self.folder.cleanup()


class DiscardHistory(History):
    mode = "discard"


CALM = settings(max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))

TestRecall = pytest.mark.slow(pytest.mark.promise(3)(History.TestCase))
TestRecall.settings = CALM
TestDiscard = pytest.mark.slow(pytest.mark.promise(3)(DiscardHistory.TestCase))
TestDiscard.settings = CALM


def test_a_copy_on_write_history_that_once_mattered():
    """Fork, crop inside the shared block, and go on in both: each must keep its own tail."""
    rig = Rig(SHAPE, pool=40)
    one = rig.open()
    rig.feed([one], [16])
    two = rig.fork(one)
    rig.crop(two, 12)
    rig.feed([one, two], [3, 3])
    rig.check_reads(one)
    rig.check_reads(two)
    assert np.intersect1d(rig.pager.page_table(one)[1:], rig.pager.page_table(two)[1:]).tolist() in ([], [-1])
    rig.pager.check()
