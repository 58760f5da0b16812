"""Random faults while requests run: what is said to be resumable is known to the last token, and nothing else is."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvpager.replication.keeper import LeaseKeeper
from kvpager.replication.limits import Limits
from tests.redis_rig import Proxy, RedisServer, until
from tests.replication.rig import SECONDS, Primary, accepted, caught_up, ended, grown, mirror, trying

LIMITS = Limits(bound_s=0.1, retry_s=0.005, longest_retry_s=0.02, look_s=0.02, stream_entries=24)


class Chaos:
    """A primary behind a proxy, and the tokens that its requests were told."""

    def __init__(self, server: RedisServer, proxy: Proxy, primary: Primary, seed: int) -> None:
        self.server, self.proxy, self.primary = server, proxy, primary
        self.random = random.Random(seed)
        self.tokens: dict[str, list[int]] = {}
        self.running: list[str] = []
        self.faults: list[Callable[[], None]] = [
            server.pause,
            proxy.blackhole,
            proxy.cut,
            lambda: proxy.corrupt(self.random.randrange(200)),
            lambda: proxy.delay(0.01),
            lambda: proxy.drip(3, 0.01),
            lambda: server.client().client_kill_filter(_type="normal", skipme=True),
            server.restart,
        ]

    def heal(self) -> None:
        """All is well again."""
        self.server.resume()
        self.proxy.heal()

    def step(self) -> None:
        """Each running request gains a token; some begin, some end."""
        if len(self.running) < 3 or self.random.random() < 0.2:
            id = f"request {len(self.tokens)}"
            self.primary.journal.accept(accepted(id))
            self.tokens[id] = []
            self.running.append(id)
        told = []
        for id in list(self.running):
            token, length = self.random.randrange(1000), 5 + len(self.tokens[id])
            if self.random.random() < 0.08:
                told.append(ended(id, 0, token))
                self.running.remove(id)
            else:
                told.append(grown(id, 0, length if self.tokens[id] else 0, length + 1, token))
            self.tokens[id].append(token)
        assert self.primary.step(*told).wait(SECONDS), "a step is never released"


@pytest.mark.parametrize("seed", range(3))
def test_what_is_resumable_is_there_to_the_last_token(redis_server: RedisServer, seed: int) -> None:
    with Proxy(redis_server.port) as proxy, Primary(proxy.port, LIMITS, ttl_s=0.3) as primary:
        keeper = LeaseKeeper(primary.lease, primary.journal.lose, lambda: None)
        chaos = Chaos(redis_server, proxy, primary, seed)
        reader = mirror(redis_server.port)
        for _ in range(12):
            for _ in range(chaos.random.randrange(1, 6)):
                chaos.step()
            chaos.random.choice(chaos.faults)()
            for _ in range(chaos.random.randrange(1, 4)):
                chaos.step()
            chaos.heal()
            until(lambda: primary.journal.stats().state == "good", "it does not recover")
            until(trying(lambda: reader.poll(0.0)))
            for id, known in reader.requests().items():
                assert chaos.tokens[id][: len(known.outputs[0])] == known.outputs[0]
        chaos.step()
        until(lambda: primary.journal.stats().state == "good", "it does not recover")
        chaos.step()
        resumable = {id for id in chaos.tokens if primary.journal.resumable(id)}
        assert resumable
        for one in (reader, mirror(redis_server.port)):
            until(lambda one=one: caught_up(one).requests().keys() == resumable, "it knows others")
            assert {id: known.outputs[0] for id, known in one.requests().items()} == {
                id: chaos.tokens[id] for id in resumable
            }
        assert not primary.lost.is_set()
        keeper.close()
