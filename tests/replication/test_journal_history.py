"""Random histories: at every acknowledged point a mirror knows what a model knows, whenever it began to read."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvpager.journaled import Resumable, Saved, Told
from kvpager.replication.limits import Limits
from kvpager.replication.mirror import Mirror
from tests.redis_rig import RedisServer
from tests.replication.rig import PAGE, Primary, accepted, caught_up, ended, grown, key, mirror, slot

SMALL = Limits(stream_entries=24, stream_bytes=4000, request_bytes=400, batch_bytes=2000)


class Model:
    """Requests as they were told, and what a mirror must know of them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.requests: dict[str, Resumable] = {}
        self.lengths: dict[tuple[str, int], int] = {}
        self.made = 0

    def running(self) -> list[tuple[str, int]]:
        """Answers that have not ended."""
        return [(id, index) for id, one in self.requests.items() for index, end in enumerate(one.told) if end is None]

    def begin(self) -> Resumable:
        """A new request; now and then of a name that an ended one had."""
        over = [id for id, one in self.requests.items() if None not in one.told]
        id = self.random.choice(over) if over and self.random.random() < 0.2 else f"request {self.made} ü"
        self.made += 1
        count = self.random.choice([1, 1, 1, 2])
        taken = accepted(id, self.random.randint(1, 12), **({"n": count} if count > 1 else {}))
        one = Resumable(taken, [[] for _ in range(count)], [None] * count, [[] for _ in range(count)], [None] * count)
        self.requests[id] = one
        self.lengths.update({(id, index): 0 for index in range(count)})
        return one

    def step(self) -> list[Told]:
        """What some of the running answers gained, each once."""
        running = self.running()
        chosen = self.random.sample(running, self.random.randint(1, len(running)))
        return [self._gain(id, index) for id, index in chosen]

    def _gain(self, id: str, index: int) -> Told:
        one, old = self.requests[id], self.lengths[id, index]
        prompt, outputs = one.accepted.prompt, one.outputs[index]
        if self.random.random() < 0.06:
            told = ended(id, index, 99)
            outputs.append(99)  # type: ignore[attr-defined]
            one.told[index], one.saved[index] = told, None  # type: ignore[index]
            return told
        if old < len(prompt):
            new = self.random.randint(old + 1, len(prompt))
            tokens = (self.random.randrange(1000),) if new == len(prompt) else ()
        else:
            new, tokens = old + 1, (self.random.randrange(1000),)
        outputs.extend(tokens)  # type: ignore[attr-defined]
        self.lengths[id, index] = new
        begin = new // PAGE * PAGE
        keys = b"".join(key(id, index, block) for block in range(new // PAGE))
        slots = b"".join(slot(id, index, position) for position in range(begin, new))
        known = [*prompt, *outputs][:new]
        one.saved[index] = Saved({"length": new}, known, keys, slots)  # type: ignore[index]
        return grown(id, index, old, new, *tokens)

    def again(self, id: str, index: int) -> Told:
        """All that an answer has come to."""
        one, length = self.requests[id], self.lengths[id, index]
        end, tokens = one.told[index], tuple(one.outputs[index])
        if end is not None:
            return replace(end, tokens=tokens)
        return grown(id, index, 0, length, *tokens)

    def knows(self, one: Mirror) -> None:
        """Compare, ends by their reasons: usage and the like are compared elsewhere."""
        known = caught_up(one).requests()
        assert known.keys() == self.requests.keys()
        for id, want in self.requests.items():
            have = known[id]
            assert have.accepted == want.accepted
            assert have.outputs == want.outputs
            assert have.saved == want.saved
            assert [end and (end.finish_reason, end.usage) for end in have.told] == [
                end and (end.finish_reason, end.usage) for end in want.told
            ]


def histories(primary: Primary, model: Model, steps: int) -> Iterator[int]:
    """Tell the journal a random history; each time that all of it is acknowledged, its step's number."""
    for number in range(steps):
        if not model.running() or (len(model.running()) < 6 and model.random.random() < 0.15):
            primary.journal.accept(model.begin().accepted)
        done = primary.step(*model.step())
        if model.random.random() < 0.5:  # others follow at once, and share an entry
            assert done.wait(20)
            yield number
    assert done.wait(20)
    yield steps


@pytest.mark.parametrize("seed", range(6))
def test_a_mirror_knows_what_was_acknowledged(redis_server: RedisServer, seed: int) -> None:
    model = Model(seed)
    with Primary(redis_server.port, SMALL) as primary:
        early = mirror(redis_server.port)
        for number in histories(primary, model, 150):
            model.knows(early)
            if number % 10 == 0:
                model.knows(mirror(redis_server.port))  # that begins now
        assert early.stats().broken == 0
        assert primary.journal.stats().wholes > 10
        assert all(primary.journal.resumable(id) for id in model.requests)


@pytest.mark.parametrize("seed", range(3))
def test_a_mirror_that_is_late_finds_what_was_trimmed(redis_server: RedisServer, seed: int) -> None:
    model = Model(100 + seed)
    with Primary(redis_server.port, SMALL) as primary:
        late = mirror(redis_server.port)
        for number in histories(primary, model, 200):
            if number % 7 == 0:
                late.poll(0.0)  # so many at most, and then it sleeps
        model.knows(late)
        assert late.stats().broken == 0


@pytest.mark.parametrize("seed", range(3))
def test_who_takes_over_goes_on_with_the_same(redis_server: RedisServer, seed: int) -> None:
    model = Model(200 + seed)
    watcher = mirror(redis_server.port)
    for turn in range(4):
        standby = caught_up(mirror(redis_server.port))
        primary = Primary(redis_server.port, SMALL, owner=f"number {turn}")
        assert primary.lease.acquire()
        primary.journal.adopt(standby.finish())
        primary.journal.start()
        model.knows(watcher)
        for id, one in list(model.requests.items())[::2]:  # an engine tells these anew, and goes on with the others
            primary.journal.accept(one.accepted)
            primary.told(*[model.again(id, index) for index in range(len(one.outputs))])
        for _ in histories(primary, model, 40):
            model.knows(watcher)
        model.knows(mirror(redis_server.port))
        primary.journal.close()
        assert primary.lease.release()


@pytest.mark.parametrize("limits", [SMALL, Limits(stream_entries=200, stream_bytes=10**9)])
def test_the_stream_is_bounded_while_requests_run_for_long(redis_server: RedisServer, limits: Limits) -> None:
    """Two thousand tokens of one request, one that waits all the time, and many short ones beside."""
    client, longest, largest = redis_server.client(), 0, 0
    with Primary(redis_server.port, limits) as primary:
        for id in ("long", "waits"):
            primary.journal.accept(accepted(id, PAGE))
        primary.told(grown("long", 0, 0, PAGE, 1))
        for length in range(PAGE, 2000):
            told = [grown("long", 0, length, length + 1, length)]
            if length % 20 == 0:
                primary.journal.accept(accepted(f"short {length}", 2))
                told.append(ended(f"short {length}", 0, 5))
            done = primary.step(*told)
            if length % 50 == 0:
                assert done.wait(20)
                longest = max(longest, client.xlen(primary.lease.keys.stream))
                largest = max(largest, client.memory_usage(primary.lease.keys.stream, samples=0))
        assert done.wait(20)
        assert longest <= limits.stream_entries
        assert largest <= 4 * (limits.stream_bytes + 2 * limits.request_bytes)
        known = caught_up(mirror(redis_server.port)).requests()
        assert known["long"].outputs == [[1, *range(PAGE, 2000)]]
        assert known["waits"].outputs == [[]]
