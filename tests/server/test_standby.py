"""A server that is one of a pair: what it says on standby, and what clients get when it steps down."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kvpager.server.hosting import ServiceHost
from tests.engine.journal import MemoryJournal
from tests.server.comers import Comer
from tests.server.harness import SECONDS, LiveServer, error_of, fake_server, real_server
from tests.server.test_reattach import ASKED, TEXT

STATE = {"role": "standby", "epoch": 7}


def standby() -> LiveServer:
    return fake_server(replication=lambda: STATE)


def test_a_standby_says_so_and_takes_no_requests() -> None:
    with standby() as server:
        ready = server.client.get("/ready")
        assert error_of(ready)["code"] == "engine_standby"
        assert (ready.status_code, ready.headers["retry-after"]) == (503, "1")
        health = server.client.get("/health")
        assert (health.status_code, health.json()["replication"]) == (200, STATE)
        assert server.client.get("/stats").json()["replication"] == STATE
        refused = server.post(TEXT, {"prompt": "x"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        server.run(server.service.go_on([]))
        assert server.client.get("/ready").json()["replication"] == STATE
        server.complete("x", max_tokens=2)


def test_a_server_alone_says_nothing_of_a_pair() -> None:
    with fake_server() as server:
        assert "replication" not in server.client.get("/health").json()
        assert "replication" not in server.client.get("/ready").json()


@pytest.mark.parametrize("key", [True, False])
def test_who_reads_when_it_steps_down_is_told_to_connect_again(key: bool) -> None:
    with standby() as server:
        server.run(server.service.go_on([]))
        server.engine.gate.let(6)
        comer = Comer(TEXT, {"prompt": "the quick brown fox", "max_tokens": 12})
        reading = threading.Thread(target=comer.read, args=(server,))
        reading.start()
        server.until(lambda: bool(comer.chunks))
        stepping = threading.Thread(target=lambda: server.run(server.service.step_down(None)))
        stepping.start()
        server.until(lambda: server.service.engine.health.state == "standby")
        server.engine.gate.set()
        stepping.join(SECONDS)
        reading.join(SECONDS)
        assert comer.comments[-1] == "stepped_down"
        assert not comer.done
        assert not len(server.service.returning)
        assert server.client.get("/ready").status_code == 503
        server.run(server.service.go_on([]))
        again = Comer(TEXT, comer.body, key="mine" if key else "other").read(server)
        assert again.done
        assert again.text() == "the quick brown fox"[: len(again.text())]


def test_a_server_that_was_primary_goes_on_with_the_same_streams_when_it_is_again(folder: str, tmp_path: Path) -> None:
    journal, store = MemoryJournal(), tmp_path / "kv.db"
    path, asked = ASKED[0]
    with real_server(folder, store=store) as undisturbed:
        whole = Comer(path, asked).read(undisturbed)
    with real_server(folder, store=store, journal=journal, replication=lambda: STATE) as server:
        server.run(server.service.go_on([]))
        comer = Comer(path, asked)
        comer.read(server, 4)
        server.run(server.service.step_down(lambda: None))
        names = server.run(server.service.go_on(journal.resumables()))
        assert names == {one.accepted.id for one in journal.resumables()}
        comer.read(server)
        assert comer.done
        assert comer.text() == whole.text()
        assert len(comer.names) == 1


def test_a_host_of_a_server_that_has_ended_does_nothing() -> None:
    hosts: list[ServiceHost] = []

    async def make(service: object) -> None:
        hosts.append(ServiceHost(service, 16))  # type: ignore[arg-type]

    with standby() as server:
        server.run(make(server.service))
        (host,) = hosts
        assert host.page_size == 16
        assert host.go_on([]) == set()
        assert server.client.get("/ready").status_code == 200
    host.step_down(None)
    host.warm([b"k" * 32])
    assert host.go_on([]) == set()
