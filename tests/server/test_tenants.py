"""Two keys at one server: what one of them does to its sessions and to the store spoils nothing for the other."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from kvpager import PagerConfig, build
from kvpager.engine.engine import Engine, EngineConfig
from kvpager.server.service import Served
from kvpager.stores import open_store
from kvpager.stores.sqlite import LEAST_LIMIT_BYTES
from tests.server.harness import LiveServer
from tests.small_llm import CONTEXT

KEYS = ("first-key", "second-key")
FIRST, SECOND = ({"Authorization": f"Bearer {key}"} for key in KEYS)
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom."


def server_over(folder: str, path: Path, limit: int) -> LiveServer:
    """A server for two keys, its store on disk."""

    def make() -> Served:
        loaded = build.load_model(folder, weights="unpacked")
        engine = Engine(loaded, PagerConfig(pool=512), EngineConfig(), store=open_store(path, limit_bytes=limit))
        return Served(engine, loaded.tokenizer, CONTEXT)

    return LiveServer(make, api_keys=KEYS)


def asked(server: LiveServer, headers: dict[str, str], prompt: str, session: str | None) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "session": session}
    return server.post("/v1/completions", body, headers=headers)


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def cached(answer: httpx.Response) -> int:
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_sessions_of_one_key_go_on_while_another_erases_all_the_time(folder: str, tmp_path: Path) -> None:
    prompts = {f"talk {number}": f"{number}: {TEXT}" for number in range(6)}
    done = threading.Event()

    def erase(server: LiveServer) -> int:
        times = 0
        while not done.is_set():
            answer = server.client.delete("/v1/store", headers=SECOND)
            assert answer.status_code == 200, answer.text
            times += 1
        return times

    def talk(server: LiveServer, name: str) -> list[str]:
        said, prompt = [], prompts[name]
        for _ in range(4):
            asked(server, SECOND, prompt, name)  # the same, of the key that erases
            said.append(text_of(asked(server, FIRST, prompt, name)))
            prompt += said[-1] + " And?"
        return said

    with server_over(folder, tmp_path / "store.db", 2**28) as server, ThreadPoolExecutor(9) as threads:
        erasing = [threads.submit(erase, server) for _ in range(3)]
        try:
            talks = list(threads.map(lambda name: talk(server, name), prompts))
        finally:
            done.set()
        assert all(one.result() > 0 for one in erasing)
        assert server.client.delete("/v1/store", headers=SECOND).status_code == 200
        server.until(lambda: figures(server)["store"]["waiting"] == 0)
        store = figures(server)["store"]
        assert (store["state"], store["errors"], store["skipped"], store["records"]) == ("ok", {}, 0, len(prompts))
    with server_over(folder, tmp_path / "store.db", 2**28) as server:
        for name, said in zip(prompts, talks, strict=True):
            prompt = prompts[name]
            for words in said:
                prompt += words + " And?"
            other = asked(server, SECOND, prompt, name)
            mine = asked(server, FIRST, prompt, name)
            assert cached(other) == 0
            assert cached(mine) >= 64
            assert text_of(other) == text_of(mine)


def figures(server: LiveServer) -> dict[str, Any]:
    return dict(server.client.get("/stats", headers=FIRST).json())


def test_another_keys_session_is_not_there_whether_it_runs_or_not(folder: str, tmp_path: Path) -> None:
    with server_over(folder, tmp_path / "store.db", 2**28) as server:
        body = {"prompt": TEXT, "max_tokens": 400, "ignore_eos": True, "session": "talk", "stream": True}
        told = []
        with server.client.stream("POST", "/v1/completions", json=body, headers=FIRST) as answer:
            next(answer.iter_lines())
            for name in ("talk", "nobody's"):
                gone = server.client.delete(f"/v1/sessions/{name}", headers=SECOND)
                told.append((gone.status_code, gone.json()))
            assert asked(server, SECOND, TEXT, "talk").status_code == 200
        assert told[0] == told[1]
        assert told[0][0] == 404


def test_a_record_that_the_store_has_no_room_for_costs_nobody_an_answer(folder: str, tmp_path: Path) -> None:
    """The smallest store that there is, and prompts whose blocks are more than it holds."""
    with server_over(folder, tmp_path / "store.db", LEAST_LIMIT_BYTES) as server:
        for turn in range(4):
            for headers in (FIRST, SECOND):
                for name in "abc":
                    prompt = f"{name}{turn}" + "x" * (450 - 10 * turn)
                    whole = text_of(asked(server, headers, prompt, name))
                    assert text_of(asked(server, headers, prompt, None)) == whole
        server.until(lambda: figures(server)["store"]["waiting"] == 0)
        assert figures(server)["store"]["state"] == "ok"
        assert figures(server)["sessions"]["held"] == 0
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= LEAST_LIMIT_BYTES
