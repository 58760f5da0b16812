"""Ending in good order: what runs finishes within the grace time, the rest is told, the process ends with 0."""

from __future__ import annotations

import json
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvpager.errors import ConfigError, ModelNotFound
from kvpager.server.run import RunOptions, listen
from tests.server.harness import LiveServer, error_of, fake_server
from tests.server.processes import process

TEXT = "/v1/completions"


@pytest.mark.parametrize("stream", [True, False])
def test_a_drain_lets_answers_finish_and_takes_nothing_new(stream: bool) -> None:
    with fake_server(grace_s=60) as server, httpx.Client(base_url=server.url, timeout=60) as kept:
        server.engine.gate.clear()
        kept.get("/ready")
        answers: list[httpx.Response] = []
        body = {"prompt": "a", "max_tokens": 50, "stream": stream}
        reader = threading.Thread(target=lambda: answers.append(httpx.post(server.url + TEXT, json=body, timeout=60)))
        reader.start()
        server.until(lambda: bool(server.engine.requests))
        server._loop.call_soon_threadsafe(server.service.engine.drain)
        server.until(lambda: kept.get("/ready").status_code == 503)
        late = kept.post(TEXT, json={"prompt": "late"})
        assert late.status_code == 503
        assert error_of(late)["code"] == "engine_draining"
        assert late.headers["retry-after"]
        assert kept.get("/health").status_code == 200
        server.stop()
        server.engine.gate.set()
        reader.join()
    (answer,) = answers
    assert answer.status_code == 200
    assert answer.text.endswith("data: [DONE]\n\n") if stream else answer.json()["usage"]["completion_tokens"] == 50
    assert server.engine.closed


@pytest.mark.parametrize("stream", [True, False])
def test_what_does_not_finish_in_time_is_told(stream: bool) -> None:
    with fake_server(grace_s=0.05) as server:
        answers: list[httpx.Response] = []
        body = {"prompt": "a", "max_tokens": 500_000, "stream": stream}
        reader = threading.Thread(target=lambda: answers.append(httpx.post(server.url + TEXT, json=body, timeout=60)))
        reader.start()
        server.until(lambda: bool(server.engine.requests))
        server.stop()
        reader.join()
    (answer,) = answers
    if stream:
        last = json.loads(answer.text.rstrip().split("\n\n")[-1].removeprefix("data: "))
        assert last["error"]["code"] == "engine_stopped"
    else:
        assert answer.status_code == 503
        assert error_of(answer)["code"] == "engine_stopped"


def test_a_model_that_is_not_there_ends_the_server_with_its_error() -> None:
    def make() -> Any:
        raise ModelNotFound("nothing is there")

    server = LiveServer(make)
    caught: list[BaseException] = []
    run = server._run

    def catching() -> None:
        try:
            run()
        except BaseException as error:
            caught.append(error)

    server._thread = threading.Thread(target=catching)
    with server:
        server._thread.join(60)
    assert [str(error) for error in caught] == ["nothing is there"]


def test_a_port_in_use_is_told_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"can't listen on 127.0.0.1 port {port}: "):
            listen("127.0.0.1", port)
    with pytest.raises(OSError, match="can't listen on no-such-host"):
        listen("no-such-host.invalid", 0)


def test_files_that_tls_can_not_use_are_told(tmp_path: Path) -> None:
    import asyncio

    from kvpager.server.run import serve

    (tmp_path / "cert").write_text("no certificate")
    server = fake_server()
    options = RunOptions(0, ssl_keyfile=str(tmp_path / "key"), ssl_certfile=str(tmp_path / "cert"))
    with pytest.raises(ConfigError, match="ssl_certfile"):
        asyncio.run(serve(server.service, server._listener, options, stopping=asyncio.Event()))
    server._listener.close()
    server.client.close()


def test_a_server_may_end_while_its_model_is_loaded() -> None:
    import asyncio

    from kvpager.server.run import serve

    go = threading.Event()

    def make() -> Any:
        go.wait()
        raise ModelNotFound("nobody wants it any more")

    server = LiveServer(make)

    async def main() -> None:
        stopping = asyncio.Event()
        asyncio.get_running_loop().call_later(0.1, stopping.set)
        await serve(server.service, server._listener, RunOptions(60), stopping=stopping)

    asyncio.run(main())
    go.set()
    server.client.close()


# ---- the process ----


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_process_in_good_order(folder: str, tmp_path: Path, number: int) -> None:
    with process(folder, tmp_path, "--grace", "60") as (running, url):
        body = {"prompt": "a", "max_tokens": 300, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", url + TEXT, json=body, timeout=120) as answer:
            lines = answer.iter_lines()
            next(lines)
            running.send_signal(number)
            rest = list(lines)
        assert "data: [DONE]" in rest
        assert running.wait(60) == 0
        err = (tmp_path / "err").read_text()
        assert "memory: weights" in err
        assert "no API key" in err
        assert err.endswith("stopped\n")
        logged = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
        assert [line["completion_tokens"] for line in logged] == [300]


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once(folder: str, tmp_path: Path) -> None:
    with process(folder, tmp_path, "--grace", "600") as (running, url):
        body = {"prompt": ["a"] * 64, "max_tokens": 400, "ignore_eos": True, "stream": True, "n": 8}
        with httpx.stream("POST", url + TEXT, json=body, timeout=120) as answer:
            lines = answer.iter_lines()
            next(lines)
            running.send_signal(signal.SIGTERM)
            running.send_signal(signal.SIGINT)
            rest = "".join(lines)
        assert "engine_stopped" in rest
        assert running.wait(60) == 0
