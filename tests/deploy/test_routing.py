"""What stands in front of nodes keeps clients at their nodes, finds others when one is gone, and holds nothing back."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.deploy.front import haproxy, nginx
from tests.proxy import Proxy
from tests.redis_rig import free_port, until
from tests.server.harness import LiveServer, fake_server

TEXT = "/v1/completions"
FRONTS = {"haproxy": haproxy, "nginx": nginx}


@dataclass
class Front:
    """Two nodes, a proxy to each that can cut it off, and what clients talk to."""

    url: str
    nodes: dict[str, LiveServer]
    cables: dict[str, Proxy]
    client: httpx.Client

    def ask(self, timeout_s: float = 30.0, **headers: str) -> str:
        """Which node answers."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = self.client.post(TEXT, json={"prompt": "hi", "max_tokens": 2}, headers=sent, timeout=timeout_s)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["model"])

    def owners(self, count: int = 40) -> dict[str, str]:
        """Which node has each of some affinities."""
        return {f"key{number}": self.ask(X_KVPager_Affinity=f"key{number}") for number in range(count)}

    def key_of(self, node: str) -> str:
        """An affinity that is at home at a node."""
        return next(key for key, owner in self.owners().items() if owner == node)


@contextmanager
def started(program: str, folder: Path) -> Iterator[Front]:
    with ExitStack() as stack:
        nodes = {name: stack.enter_context(fake_server(names=(name,), grace_s=60)) for name in ("one", "two")}
        cables = {name: stack.enter_context(Proxy(node.port, free_port())) for name, node in nodes.items()}
        url = stack.enter_context(FRONTS[program](folder, (cables["one"].port, cables["two"].port)))
        client = stack.enter_context(httpx.Client(base_url=url, timeout=30))
        yield Front(url, nodes, cables, client)


@pytest.fixture(params=sorted(FRONTS))
def front(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Front]:
    with started(request.param, tmp_path) as made:
        yield made


def test_the_same_affinity_goes_to_the_same_node_and_others_spread(front: Front) -> None:
    first = front.owners()
    assert front.owners() == first
    assert min(Counter(first.values())["one"], Counter(first.values())["two"]) >= 10


def test_without_an_affinity_the_session_decides_then_the_key_then_the_address(front: Front) -> None:
    keys = front.owners()
    one, two = (next(key for key, owner in keys.items() if owner == name) for name in ("one", "two"))
    # the same text has the same home, whichever header it comes in
    assert front.ask(X_Session_Id=one) == "one"
    assert front.ask(X_Session_Id=two) == "two"
    assert front.ask(X_Session_Id=two, X_KVPager_Affinity=one) == "one"
    assert front.ask(X_Session_Id=one, X_KVPager_Affinity=two) == "two"
    assert front.ask(Authorization=one, X_Session_Id=two) == "two"
    assert {front.ask(Authorization=f"Bearer {number}") for number in range(12)} == {"one", "two"}
    assert len({front.ask() for _ in range(6)}) == 1


def test_a_node_that_is_gone_is_replaced_at_once_and_comes_back_to_its_share(front: Front) -> None:
    before, cable = front.owners(), front.cables["one"]
    cable.__exit__()  # connections are refused from now on
    assert set(front.owners().values()) == {"two"}
    with Proxy(front.nodes["one"].port, cable.port):
        until(lambda: front.owners() == before, "the node did not get its share back")


def test_a_request_whose_node_dies_before_it_answers_is_asked_of_the_other(front: Front) -> None:
    key, node = front.key_of("one"), front.nodes["one"]
    node.engine.gate.clear()
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(front.ask, X_KVPager_Affinity=key)
        node.until(lambda: bool(node.engine.requests))
        front.cables["one"].cut()
        assert answer.result(60) == "two"
    node.engine.gate.set()


def test_a_node_that_is_not_ready_gets_nothing_and_its_streams_go_on(front: Front) -> None:
    key, engine = front.key_of("one"), front.nodes["one"].engine
    engine.gate.clear()
    body = {"prompt": "hello", "max_tokens": 4, "stream": True}
    with front.client.stream("POST", TEXT, json=body, headers={"X-KVPager-Affinity": key}) as stream:
        lines = stream.iter_lines()
        engine.gate.let(2)
        assert text_of(next(lines)) == "h"
        front.nodes["one"]._loop.call_soon_threadsafe(front.nodes["one"].service.engine.drain)
        front.nodes["one"].until(lambda: httpx.get(front.nodes["one"].url + "/ready").status_code == 503)
        assert {front.ask(X_KVPager_Affinity=key) for _ in range(3)} == {"two"}
        engine.gate.set()
        rest = "".join(text_of(line) for line in lines if line.startswith("data: {"))
    assert rest == "ell"


def text_of(line: str) -> str:
    """The text of one event of a stream."""
    return str(json.loads(line.removeprefix("data: "))["choices"][0]["text"])


def test_tokens_come_one_by_one(front: Front) -> None:
    key, engine = front.key_of("two"), front.nodes["two"].engine
    engine.gate.clear()
    body = {"prompt": "abc", "max_tokens": 3, "stream": True}
    with front.client.stream("POST", TEXT, json=body, headers={"X-KVPager-Affinity": key}) as stream:
        lines = (line for line in stream.iter_lines() if line.startswith("data: {"))
        for steps, letter in zip((2, 1, 1), "abc", strict=True):  # the first step reads the prompt
            engine.gate.let(steps)
            assert text_of(next(lines)) == letter  # comes while the engine waits
        engine.gate.set()


def test_a_client_that_goes_away_ends_its_request(front: Front) -> None:
    key, node = front.key_of("one"), front.nodes["one"]
    body = {"prompt": "a", "max_tokens": 500_000, "stream": True}
    with front.client.stream("POST", TEXT, json=body, headers={"X-KVPager-Affinity": key}) as stream:
        lines = stream.iter_lines()  # kept: an iterator that is dropped closes the stream
        next(lines)
        assert node.engine.requests
    node.until(lambda: not node.engine.requests)


@pytest.mark.slow
def test_haproxy_notices_a_node_that_hangs(tmp_path: Path) -> None:
    """What is sent to it before that waits; nginx would go on sending."""
    with started("haproxy", tmp_path) as front:
        key = front.key_of("one")
        front.cables["one"].blackhole()

        def answered() -> str | None:
            with suppress(httpx.TimeoutException):
                return front.ask(0.5, X_KVPager_Affinity=key)
            return None

        assert until(answered, "it was not noticed") == "two"
        front.cables["one"].heal()
        until(lambda: front.ask(X_KVPager_Affinity=key) == "one", "it did not come back")
