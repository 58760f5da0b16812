"""What `/health` says of a store, also while no request comes."""

from __future__ import annotations

from tests.server.harness import fake_server


def test_health_tells_how_a_store_does_though_nothing_is_asked_of_it() -> None:
    with fake_server() as server:
        for state in ("io", "ok"):
            server.engine.store_states = {"shared": state}
            server.until(lambda state=state: server.client.get("/health").json().get("store") == state)
        server.engine.gate.clear()  # an engine that is busy keeps nobody waiting
        with server.client.stream("POST", "/v1/completions", json={"prompt": "x", "max_tokens": 9, "stream": True}):
            server.engine.store_states = {"shared": "io"}
            assert server.client.get("/health").json()["store"] == "ok"
            server.engine.gate.set()
