"""A client that comes back to a stream gets the rest of it: no token twice, and none missing."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpager.server.errors import ApiError
from kvpager.server.limits import Limits
from kvpager.server.returning import Position, Reply
from tests.server.comers import Comer
from tests.server.harness import SECONDS, LiveServer, error_of, fake_server
from tests.small_llm import tokenizer

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
WORDS = "né 😀 汉字, and so on"
IDS = list(tokenizer()(WORDS)["input_ids"])


def forced(**more: Any) -> LiveServer:
    """A server that writes WORDS."""
    return fake_server(write=lambda prompt: IDS, **more)


def body(path: str, **more: Any) -> dict[str, Any]:
    asked = {"prompt": "x"} if path == TEXT else {"messages": [{"role": "user", "content": "x"}]}
    return {**asked, "max_tokens": len(IDS), **more}


BODIES = [
    (TEXT, body(TEXT)),
    (TEXT, body(TEXT, n=3, logprobs=1, stream_options={"include_usage": True})),
    (TEXT, body(TEXT, prompt=["x", "y"], n=2, stop=["so"])),
    (TEXT, body(TEXT, echo=True)),
    (TEXT, body(TEXT, echo=True, max_tokens=0)),
    (CHAT, body(CHAT, logprobs=True, top_logprobs=1, stream_options={"include_usage": True})),
    (CHAT, body(CHAT, n=2)),
]


@pytest.fixture(scope="module")
def server() -> Any:
    with forced() as one:
        yield one


_numbers = iter(range(10**9))


def fresh() -> str:
    """A key that no other test has used."""
    return f"key-{next(_numbers)}"


@pytest.mark.parametrize(("path", "asked"), BODIES)
@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(0, 12), max_size=6))
def test_what_comes_over_several_connections_is_what_comes_over_one(
    server: LiveServer, path: str, asked: dict[str, Any], cuts: list[int]
) -> None:
    whole = Comer(path, asked, fresh()).read(server)
    cut = Comer(path, asked, fresh())
    for events in cuts:
        cut.read(server, events)
    cut.read(server)
    assert cut.done
    assert len(cut.names) == 1
    indexes = {one["index"] for one in whole.chunks}
    for index in indexes:
        assert cut.text(index) == whole.text(index)
        assert [one for one in cut.chunks if one["index"] == index] == [
            one for one in whole.chunks if one["index"] == index
        ]
    assert cut.usage == whole.usage
    assert set(cut.resumable) == {"true"}


def test_a_stream_goes_on_without_its_reader_and_is_the_same_for_who_comes_back() -> None:
    with forced() as server:
        server.engine.gate.let(4)
        comer = Comer(TEXT, body(TEXT), "mine").read(server, 2)
        assert comer.text()
        server.engine.gate.set()
        server.until(lambda: not server.engine.requests)
        assert server.engine.aborts == 0
        comer.read(server)
        assert comer.text() == WORDS
        assert server.engine.steps < 2 * len(IDS), "it was written twice"


@pytest.mark.parametrize("ended", [True, False])
def test_nobody_comes_back_in_time(ended: bool) -> None:
    with forced(resume_seconds=0.05) as server:
        server.engine.gate.let(10**6 if ended else 4)
        comer = Comer(TEXT, body(TEXT), "mine").read(server, 2)
        server.until(lambda: len(server.service.returning) == 0)
        server.engine.gate.set()
        server.until(lambda: not server.engine.requests)
        assert server.engine.aborts == (not ended)
        sent = {"Idempotency-Key": "mine", "Last-Event-ID": comer.last or ""}
        answer = server.post(TEXT, {**comer.body, "stream": True}, headers=sent)
        assert answer.status_code == 410
        assert error_of(answer)["code"] == "stream_gone"
        comer.last = None  # without it, it begins anew
        comer.chunks.clear()
        assert comer.read(server).text() == WORDS


def test_an_answer_is_kept_from_its_end_on_not_from_when_its_reader_left() -> None:
    with forced(resume_seconds=3600) as server:
        server.engine.gate.let(4)
        Comer(TEXT, body(TEXT), "mine").read(server, 2)
        (reply,) = server.service.returning._replies.values()
        server.until(lambda: reply.timer is not None)
        leaving = reply.timer
        assert leaving is not None
        server.engine.gate.set()
        server.until(lambda: reply.ended and reply.timer is not leaving)
        assert leaving.cancelled()


def test_who_comes_when_the_beginning_is_gone_hears_it(server: LiveServer) -> None:
    async def read() -> None:
        reply = Reply("", "", 0, base=3, kept=False)
        async for _ in server.service.returning.read(reply):
            pass

    with pytest.raises(ApiError) as caught:
        asyncio.run(read())
    assert (caught.value.status_code, caught.value.code) == (410, "stream_gone")


@pytest.mark.parametrize("had", ["999999999", "999999999."])
def test_who_says_to_have_had_more_than_there_is_hears_it(server: LiveServer, had: str) -> None:
    key = fresh()
    Comer(TEXT, body(TEXT), key).read(server)
    comer = Comer(TEXT, body(TEXT), key, last=had).read(server)
    assert (comer.comments, comer.chunks, comer.done) == (["invalid_value"], [], False)


def test_a_whole_answer_is_given_again_as_it_was() -> None:
    with forced() as server:
        answers = [server.post(TEXT, body(TEXT, n=2), headers={"Idempotency-Key": "a"}).json() for _ in range(2)]
        assert answers[0] == answers[1]
        assert answers[0]["choices"][1]["text"] == WORDS
        assert server.post(TEXT, body(TEXT, n=2), headers={"Idempotency-Key": "b"}).json()["id"] != answers[0]["id"]
        streamed = server.post(TEXT, body(TEXT, n=2, stream=True), headers={"Idempotency-Key": "a"})
        assert streamed.status_code == 422
        assert error_of(streamed)["code"] == "idempotency_key_reused"
        assert server.post(TEXT, body(TEXT, n=2)).headers.get("x-kvpager-resumable") is None


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ({"Idempotency-Key": "x" * 256}, 400),
        ({"Idempotency-Key": ""}, 400),
        ({"Last-Event-ID": "1,2"}, 400),
        ({"Last-Event-ID": "-1"}, 400),
        ({"Last-Event-ID": "1..", "Idempotency-Key": "k"}, 400),
        ({"Last-Event-ID": "1", "Idempotency-Key": "unknown"}, 410),
    ],
)
def test_headers_that_say_nothing_are_refused(server: LiveServer, sent: dict[str, str], status: int) -> None:
    headers = {"Idempotency-Key": "k", **sent}
    answer = server.post(TEXT, body(TEXT, stream=True), headers=headers)
    assert answer.status_code == status
    assert error_of(answer)["param"] in ("Idempotency-Key", "Last-Event-ID")


def test_an_event_id_says_nothing_without_a_key(server: LiveServer) -> None:
    answer = server.post(TEXT, body(TEXT, stream=True), headers={"Last-Event-ID": "1"})
    assert (answer.status_code, error_of(answer)["param"]) == (400, "Last-Event-ID")


def test_a_key_belongs_to_its_tenant() -> None:
    with forced(api_keys=("one", "two")) as server:
        comers = [
            Comer(TEXT, body(TEXT, user=name), "same", {"Authorization": f"Bearer {name}"}) for name in ("one", "two")
        ]
        for comer in comers:
            assert comer.read(server).text() == WORDS
        assert comers[0].names != comers[1].names
        answer = server.client.delete("/v1/store", headers={"Authorization": "Bearer one"})
        assert answer.status_code == 400  # there is no store, but what was kept here is gone
        assert len(server.service.returning) == 1


def test_who_comes_last_reads() -> None:
    with forced() as server:
        server.engine.gate.let(4)
        first, second = Comer(TEXT, body(TEXT)), Comer(TEXT, body(TEXT))
        reading = threading.Thread(target=first.read, args=(server,))
        reading.start()
        server.until(lambda: len(first.chunks) > 1)
        with_rest = threading.Thread(target=second.read, args=(server,))
        with_rest.start()
        reading.join(SECONDS)
        assert first.comments == ["taken_over"]
        assert not first.done
        server.engine.gate.set()
        with_rest.join(SECONDS)
        assert second.text() == WORDS


def test_where_no_more_can_be_kept_answers_are_plain() -> None:
    with forced(limits=Limits(replies=1)) as server:
        server.engine.gate.let(4)
        first = Comer(TEXT, body(TEXT), "a").read(server, 2)
        server.engine.gate.set()
        second = Comer(TEXT, body(TEXT), "b")
        second.read(server)
        assert second.text() == WORDS
        assert second.resumable in (["false"], ["true"])  # as the first had ended by then or not
        if second.resumable == ["false"]:
            assert first.read(server).text() == WORDS
    with forced(resume_seconds=0) as server:
        assert Comer(TEXT, body(TEXT), "a").read(server).resumable == ["false"]


def test_an_answer_that_is_too_large_goes_on_but_cannot_be_come_back_to() -> None:
    with forced(limits=Limits(reply_bytes=3000)) as server:
        server.engine.gate.let(4)
        comer = Comer(TEXT, body(TEXT))
        reading = threading.Thread(target=comer.read, args=(server,))
        reading.start()
        server.until(lambda: len(comer.chunks) > 1)
        server.engine.gate.set()
        reading.join(SECONDS)
        assert comer.text() == WORDS
        assert comer.resumable == ["true"]
        assert comer.comments == [": resumable false"]
        assert server.post(TEXT, body(TEXT), headers={"Idempotency-Key": "other"}).json()["choices"][0]["text"] == WORDS
        assert len(server.service.returning) == 0
        server.engine.gate.let(20)
        gone = Comer(TEXT, body(TEXT), "gone").read(server, 2)
        server.until(lambda: not server.service.engine._streams)
        server.engine.gate.let(1)
        server.until(lambda: server.engine.aborts == 1)
        assert gone.text()


class Degraded:
    """A journal that is lost after some steps."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self, told: Any, done: Any) -> None:
        self.steps += 1
        done()

    def resumable(self, id: str) -> bool:
        return self.steps < 8


def test_a_client_hears_when_its_stream_has_gone_on_without_the_journal() -> None:
    with forced(journal=Degraded()) as server:
        server.engine.gate.let(4)
        comer = Comer(TEXT, body(TEXT))
        reading = threading.Thread(target=comer.read, args=(server,))
        reading.start()
        server.until(lambda: len(comer.chunks) > 1)
        server.engine.gate.set()
        reading.join(SECONDS)
        assert comer.resumable == ["true"]
        assert comer.comments == [": resumable false"]
        assert comer.text() == WORDS
        assert Comer(TEXT, body(TEXT), "next").read(server).resumable == ["false"]


@given(st.lists(st.tuples(st.integers(0, 10**6), st.booleans()), min_size=1, max_size=9))
def test_positions_are_read_as_they_are_written(parts: list[tuple[int, bool]]) -> None:
    position = Position(len(parts))
    position.tokens = [tokens for tokens, _ in parts]
    position.ended = [ended for _, ended in parts]
    again = Position.parse(str(position), len(parts))
    assert (again.tokens, again.ended) == (position.tokens, position.ended)
