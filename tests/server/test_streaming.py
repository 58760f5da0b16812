"""Streams: what comes is what a whole answer is; and clients that go away, or that read slowly."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.harness import LiveServer, fake_server
from tests.small_llm import tokenizer

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
TOKENIZER = tokenizer()


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text)["input_ids"])


def forced(text: str, **more: Any) -> LiveServer:
    """A server that writes just this text, a token (mostly a byte) at a time."""
    tokens = ids(text)
    return fake_server(write=lambda prompt: tokens, **more)


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


# ---- G21: characters of several tokens ----


@pytest.mark.parametrize("text", ["né 😀 汉字", "plain", "👩‍👩‍👧", "\u00a0é"])
def test_characters_come_whole(text: str) -> None:
    with forced(text) as server:
        body = {"prompt": "x", "max_tokens": len(ids(text))}
        assert server.complete(**body)["choices"][0]["text"] == text
        events = server.events(TEXT, body)
        assert text_of(events) == text
        assert not any("\ufffd" in event["choices"][0]["text"] for event in events)
        chat = server.events(CHAT, {"messages": [{"role": "user", "content": "x"}], "max_tokens": len(ids(text))})
        assert text_of(chat) == text


def test_an_answer_cut_in_a_character_is_the_same_streamed_and_whole() -> None:
    text = "né 😀 汉字"
    with forced(text) as server:
        for count in range(1, len(ids(text))):
            body = {"prompt": "x", "max_tokens": count}
            whole = server.complete(**body)["choices"][0]["text"]
            assert text_of(server.events(TEXT, body)) == whole == TOKENIZER.decode(ids(text)[:count])


def test_two_streams_do_not_mix_their_characters() -> None:
    with fake_server() as server:
        texts = ["né 😀 汉字 " * 3, "ä 🎉 漢語 " * 3]
        found: dict[str, str] = {}

        def read(text: str) -> None:
            found[text] = text_of(server.events(TEXT, {"prompt": text, "max_tokens": len(ids(text))}))

        together(*(lambda text=text: read(text) for text in texts))
        assert found == {text: text for text in texts}


def together(*tasks: Any) -> None:
    threads = [threading.Thread(target=task) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# ---- G22: stop strings over tokens ----


@pytest.mark.parametrize(
    ("stop", "shown"),
    [
        (["C D"], "A B "),
        (["A B C D E"], ""),
        (["B C", "C D"], "A "),
        (["C X"], "A B C D E"),
        (["D E", "C X"], "A B C "),
    ],
)
def test_nothing_of_a_stop_string_is_shown(stop: list[str], shown: str) -> None:
    with forced("A B C D E") as server:
        body = {"prompt": "x", "max_tokens": 9, "stop": stop}
        (whole,) = server.complete(**body)["choices"]
        events = server.events(TEXT, body)
        assert whole["text"] == text_of(events) == shown
        reason = "stop" if shown != "A B C D E" else "length"
        assert whole["finish_reason"] == events[-1]["choices"][0]["finish_reason"] == reason
        chat = server.events(CHAT, {"messages": [{"role": "user", "content": "x"}], **body})
        assert text_of(chat) == shown


# ---- G23: usage ----


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_usage_is_the_same_streamed_and_whole_and_comes_only_when_asked(live: LiveServer, path: str, n: int) -> None:
    prompt = {"messages": [{"role": "user", "content": "count"}]} if path == CHAT else {"prompt": "count"}
    body = {**prompt, "max_tokens": 7, "n": n, "seed": 5, "ignore_eos": True}
    whole = live.post(path, body).json()["usage"]
    assert whole["completion_tokens"] == 7 * n
    assert whole["total_tokens"] == whole["prompt_tokens"] + 7 * n
    events = live.events(path, {**body, "stream_options": {"include_usage": True}})
    assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["choices"] == []
    streamed = events[-1]["usage"]
    assert {**streamed, "prompt_tokens_details": None} == {**whole, "prompt_tokens_details": None}
    assert 0 <= streamed["prompt_tokens_details"]["cached_tokens"] <= streamed["prompt_tokens"]
    assert events[-1]["kvpager"]["pages_attended"] > 0
    assert all("usage" not in event for event in live.events(path, body))


def test_usage_counts_what_a_stop_string_hid_and_what_was_cached(live: LiveServer) -> None:
    prompt = "a shared beginning that is longer than some pages " * 4
    first = live.complete(prompt, max_tokens=2)["usage"]
    again = live.complete(prompt, max_tokens=2)["usage"]
    assert first["prompt_tokens"] == again["prompt_tokens"]
    assert 0 < again["prompt_tokens_details"]["cached_tokens"] < again["prompt_tokens"]
    with forced("A B C D E") as server:
        body = {"prompt": "x", "max_tokens": 9, "stop": "C D"}
        used = server.complete(**body)["usage"]
        assert used["completion_tokens"] == 7  # up to the D
        assert server.events(TEXT, {**body, "stream_options": {"include_usage": True}})[-1]["usage"] == used


# ---- the form of streams ----


def test_a_chats_stream_says_its_role_once_and_its_end_once(live: LiveServer) -> None:
    events = live.events(CHAT, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 6, "n": 2})
    assert len({event["id"] for event in events}) == 1
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    for index in (0, 1):
        choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
        assert [choice["delta"].get("role") for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
        reasons = [choice["finish_reason"] for choice in choices]
        assert reasons[-1] in ("length", "stop")
        assert set(reasons[:-1]) <= {None}


def test_log_probabilities_and_echo_are_the_same_streamed_and_whole(live: LiveServer) -> None:
    body = {"prompt": ["hi there", "other"], "max_tokens": 5, "temperature": 0, "logprobs": 2, "echo": True, "n": 2}
    whole = live.complete(**body)["choices"]
    events = live.events(TEXT, body)
    for index in range(4):
        told = [c["logprobs"] for e in events for c in e["choices"] if c["index"] == index and c["logprobs"]]
        assert text_of(events, index) == whole[index]["text"]
        for field in ("tokens", "text_offset"):
            assert [item for part in told for item in part[field]] == whole[index]["logprobs"][field]


def test_an_error_in_a_stream_is_an_event() -> None:
    with fake_server() as server:
        server.engine.gate.clear()
        result: list[str] = []
        reader = threading.Thread(target=lambda: result.append(server.post(TEXT, {"prompt": "a", "stream": True}).text))
        reader.start()
        server.until(lambda: bool(server.engine.requests))
        server.engine.fail.append(ValueError("secret"))
        server.engine.gate.set()
        reader.join()
        (line,) = [line for line in result[0].split("\n\n") if line]
        assert json.loads(line.removeprefix("data: "))["error"]["code"] == "internal_error"
        assert "secret" not in line


def test_what_is_refused_is_refused_before_a_stream_begins() -> None:
    with fake_server(max_queue=0) as server:
        answer = server.post(TEXT, {"prompt": "a", "stream": True})
        assert answer.status_code == 429
        assert answer.headers["retry-after"]


# ---- G17, G18: clients that go away ----


@pytest.fixture
def endless() -> Iterator[LiveServer]:
    with fake_server(chunk=4) as server:
        yield server


PHASES = ["reading a prompt", "before the first token", "after some tokens"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_client_that_goes_away_ends_its_request(endless: LiveServer, path: str, phase: str, stream: bool) -> None:
    engine = endless.engine
    engine.gate.clear()
    prompt = "y" * 400
    body = {"messages": [{"role": "user", "content": prompt}]} if path == CHAT else {"prompt": prompt}
    connection = endless.raw(path, {**body, "max_tokens": 100_000, "stream": stream})
    endless.until(lambda: bool(engine.requests))
    (request,) = engine.requests.values()
    wanted = {
        PHASES[0]: lambda: 40 <= request.read < 400,
        PHASES[1]: lambda: request.read >= 400,
        PHASES[2]: lambda: request.written >= 3,
    }[phase]
    step_until(endless, wanted)
    connection.close()
    endless.until(lambda: bool(endless.service.engine._calls))  # the abort is on its way
    before = engine.steps
    engine.gate.set()
    endless.until(lambda: not engine.requests)
    assert engine.aborts == 1
    assert engine.steps <= before + 2
    endless.until(lambda: endless.service.places.taken == 0)
    assert endless.complete("next", max_tokens=2)["usage"]["completion_tokens"] == 2


def step_until(server: LiveServer, condition: Any) -> None:
    """Let the engine take one step after another until something has come about."""
    while not condition():
        steps = server.engine.steps
        server.engine.gate.let(1)
        server.until(lambda before=steps: server.engine.steps > before)


def test_when_all_clients_go_away_nothing_runs_any_more(live: LiveServer) -> None:
    connections = [live.raw(TEXT, {"prompt": f"client {i}", "max_tokens": 400, "ignore_eos": True}) for i in range(20)]
    live.until(lambda: live.client.get("/stats").json()["running"] > 0)
    for connection in connections:
        connection.close()

    def idle() -> bool:
        stats = live.client.get("/stats").json()
        return bool(stats["running"] == stats["waiting"] == stats["preempted"] == stats["pager"]["sequences"] == 0)

    live.until(idle)
    stats = live.client.get("/stats").json()
    assert stats["pager"]["tokens"] == 0
    assert stats["requests"] == 1
    assert stats["finished"].get("abort", 0) > 0


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_of_one_request_go_to_the_engine_together(stream: bool) -> None:
    """One at a time, each would wait for a step: they would be served one after the other, not as a batch."""
    with fake_server() as server:
        server.engine.gate.clear()
        connection = server.raw(TEXT, {"prompt": ["one", "two", "three", "four"], "max_tokens": 2, "stream": stream})
        server.until(lambda: len(server.service.engine._streams) == 4)  # no step has ended yet
        assert server.engine.steps == 0
        server.engine.gate.set()
        assert b" 200 OK" in connection.recv(65536)
        connection.close()


def test_a_client_that_leaves_while_it_sends_does_no_harm(live: LiveServer) -> None:
    connection = live.raw(TEXT, {"prompt": "x"})
    connection.close()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n{"
    for part in (head[:30], head):
        with socket.create_connection(("127.0.0.1", live.port)) as half:
            half.sendall(part)
    assert live.complete("a", max_tokens=1)


def test_a_slow_reader_holds_up_nobody_and_gets_everything() -> None:
    text = "slowly " * 500
    slow = forced(text)
    slow._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # so that it is full early
    with slow as server:
        count = len(ids(text))
        connection = server.raw(TEXT, {"prompt": "x", "max_tokens": count, "stream": True})
        assert server.complete("other", max_tokens=5)["usage"]["completion_tokens"] == 5
        server.until(lambda: not server.engine.requests)  # the engine is done, and has not waited for the reader
        data = b""
        while b"[DONE]" not in data:
            data += connection.recv(65536)
        connection.close()
        lines = [line for line in data.decode().replace("\r\n", "\n").split("\n") if line.startswith("data: {")]
        assert text_of([json.loads(line.removeprefix("data: ")) for line in lines]) == text


def test_a_connection_serves_again_after_a_stream(live: LiveServer) -> None:
    with httpx.Client(base_url=live.url, timeout=60, limits=httpx.Limits(max_connections=1)) as client:
        for _ in range(3):
            answer = client.post(TEXT, json={"prompt": "a", "max_tokens": 3, "stream": True})
            assert answer.text.endswith("data: [DONE]\n\n")
