"""Sessions over HTTP: a conversation goes on over restarts, one request at a time, and a caller can have it erased."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from kvpager import PagerConfig, build
from kvpager.engine.engine import Engine, EngineConfig
from kvpager.engine.outputs import Output
from kvpager.server.service import Served
from kvpager.stored import BlockStore
from kvpager.stores import open_store, redis_tier
from tests.memory_store import MemoryStore
from tests.redis_rig import free_port
from tests.server.harness import NAME, LiveServer, error_of, fake_server
from tests.small_llm import CONTEXT

KEYS = ("first-key", "second-key")
FIRST, SECOND = ({"Authorization": f"Bearer {key}"} for key in KEYS)
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom."


def stored_server(folder: str, store: BlockStore, **options: Any) -> LiveServer:
    """A server over the tiny model whose engine keeps what it computes."""

    def make() -> Served:
        loaded = build.load_model(folder, weights="unpacked")
        engine = Engine(loaded, PagerConfig(pool=512), EngineConfig(), store=store)
        return Served(engine, loaded.tokenizer, CONTEXT)

    return LiveServer(make, **options)


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_conversation_goes_on_after_a_restart(folder: str) -> None:
    store = MemoryStore()
    settings = {"max_tokens": 20, "temperature": 0, "session": "talk", "ignore_eos": True}
    with stored_server(folder, store) as server:
        first = server.complete(TEXT, **settings)
        assert server.client.get("/ready").json() == {"status": "ready", "store": "ok"}
        assert server.client.get("/health").json() == {"status": "ok", "state": "ready", "store": "ok"}
    with stored_server(folder, store.reopened()) as server:
        text = TEXT + first["choices"][0]["text"] + " And?"
        second = server.complete(text, **settings)
        assert cached(second) >= 64  # bytes that are no text come back as others: it goes on from the last tile
        figures = server.client.get("/stats").json()
        assert figures["sessions"] == {"held": 0, "resumed": 1, "saved": 1, "lost": 0}
        assert figures["store"]["blocks"] > 0
    with stored_server(folder, MemoryStore()) as server:
        assert server.complete(text, **settings)["choices"][0]["text"] == second["choices"][0]["text"]


def test_both_tiers_of_a_store_are_told(folder: str, tmp_path: Path) -> None:
    far = redis_tier(f"redis://:s3cret@127.0.0.1:{free_port()}")
    store = open_store(tmp_path / "store.db", limit_bytes=2**26, far=far)
    with stored_server(folder, store) as server:
        server.complete(TEXT, max_tokens=4, temperature=0)
        states = {"store": "io", "stores": {"local": "ok", "shared": "io"}}
        assert server.client.get("/health").json() == {"status": "ok", "state": "ready", **states}
        assert server.client.get("/ready").json() == {"status": "ready", **states}
        told = server.client.get("/stats")
        tiers = told.json()["store"]["tiers"]
        assert (tiers["local"]["state"], tiers["shared"]["state"]) == ("ok", "io")
        assert tiers["shared"]["errors"]["io"] >= 1
        assert "s3cret" not in told.text


def test_an_answer_whose_reader_left_is_written_on_for_the_same_request(folder: str) -> None:
    store = MemoryStore()
    body = {"prompt": TEXT, "max_tokens": 200, "session": "talk", "ignore_eos": True, "seed": 5}
    with stored_server(folder, store) as server:
        whole = server.complete(**{**body, "session": "other"})["choices"][0]["text"]
        with server.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            lines = (line for line in answer.iter_lines() if line)
            said = [next(lines) for _ in range(10)]
        server.until(lambda: not server.engine.has_work)
        assert len(said) == 10
    with stored_server(folder, store.reopened()) as server:
        again = server.complete(**body)
        assert again["choices"][0]["text"] == whole
        assert cached(again) == again["usage"]["prompt_tokens"]


def test_a_request_that_the_servers_end_cut_short_goes_on_after_it(folder: str) -> None:
    store = MemoryStore()
    body = {"prompt": TEXT, "max_tokens": 300, "session": "talk", "ignore_eos": True, "seed": 5}
    with stored_server(folder, store) as server:
        whole = server.complete(**{**body, "session": "other"})["choices"][0]["text"]
        with server.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            lines = (line for line in answer.iter_lines() if line)
            for _ in range(5):
                next(lines)
            server.stop()
            assert "engine_stopped" in list(lines)[-1]
    assert store.closed
    with stored_server(folder, store.reopened()) as server:
        again = server.complete(**body)
        assert again["choices"][0]["text"] == whole
        assert cached(again) == again["usage"]["prompt_tokens"]


def test_a_session_that_is_in_use_is_a_conflict(folder: str) -> None:
    with stored_server(folder, MemoryStore()) as server:
        body = {"prompt": TEXT, "max_tokens": 30, "session": "talk", "ignore_eos": True, "stream": True}
        step, left, released = server.engine.step, [1, 2, 3], threading.Event()

        def held(done: Callable[[], None]) -> list[Output]:
            """A few steps, then none until it is released."""
            if not left and not released.wait(0.005):
                return []
            del left[:1]
            return list(step(done))

        server.engine.step = held
        with server.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            refused = [
                server.post("/v1/completions", {"prompt": TEXT, "session": "talk"}),
                server.client.delete("/v1/sessions/talk"),
            ]
            released.set()
            for busy in refused:
                assert busy.status_code == 409
                error = error_of(busy)
                assert (error["code"], error["param"], error["type"]) == ("session_busy", "session", "conflict_error")
                assert busy.headers["retry-after"] == "1"
        server.until(lambda: not server.engine.has_work)
        server.complete(TEXT, session="talk")


def test_a_session_can_be_forgotten_and_a_caller_have_all_erased(folder: str) -> None:
    with stored_server(folder, MemoryStore(), api_keys=KEYS) as server:
        for headers in (FIRST, SECOND):
            for name in ("talk", "a/b c", "c"):
                answer = server.post("/v1/completions", {"prompt": TEXT, "session": name}, headers=headers)
                assert answer.status_code == 200, answer.text
        for name in ("talk", "a%2Fb%20c"):
            gone = server.client.delete(f"/v1/sessions/{name}", headers=FIRST)
            assert (gone.status_code, gone.content) == (204, b"")
            missing = server.client.delete(f"/v1/sessions/{name}", headers=FIRST)
            assert missing.status_code == 404
            assert error_of(missing)["code"] == "session_not_found"
        assert server.client.delete("/v1/store").status_code == 401
        erased = server.client.delete("/v1/store", headers=FIRST).json()["erased"]
        assert erased > 1
        assert server.client.delete("/v1/store", headers=FIRST).json() == {"erased": 0}
        assert server.client.delete("/v1/sessions/talk", headers=SECOND).status_code == 204
        for headers, hit in ((FIRST, False), (SECOND, True)):
            answer = server.post("/v1/completions", {"prompt": TEXT}, headers=headers).json()
            assert (cached(answer) > 0) == hit


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2},
        {"echo": True, "logprobs": 1},
        {"prompt": ["a", "b"]},
        {"session": ""},
        {"session": "x" * 129},
        {"session": "a\nb"},
        {"session": 5},
    ],
)
def test_what_cannot_be_of_a_session_is_refused(folder: str, more: dict[str, Any]) -> None:
    with stored_server(folder, MemoryStore()) as server:
        answer = server.post("/v1/completions", {"prompt": TEXT, "session": "talk", **more})
        assert answer.status_code == 400
        assert error_of(answer)["param"] == "session"


def test_without_a_store_sessions_are_refused() -> None:
    with fake_server() as server:
        refused = [
            server.post("/v1/completions", {"prompt": TEXT, "session": "talk"}),
            server.client.delete("/v1/sessions/talk"),
            server.client.delete("/v1/store"),
        ]
        for answer in refused:
            assert answer.status_code == 400
            assert "there is no store" in error_of(answer)["message"]
        assert "store" not in server.client.get("/ready").json()


def test_openai_names_a_session_in_its_extra_body(folder: str) -> None:
    with (
        stored_server(folder, MemoryStore()) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        talk: list[Any] = [{"role": "user", "content": "hello, hello, hello" * 5}]
        for turn in range(3):
            answer = client.chat.completions.create(
                model=NAME, messages=talk, max_tokens=10, temperature=0, extra_body={"session": "talk"}
            )
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            assert bool(answer.usage.prompt_tokens_details.cached_tokens) == bool(turn)
            talk += [{"role": "assistant", "content": answer.choices[0].message.content or ""}]
            talk += [{"role": "user", "content": "and then?"}]
