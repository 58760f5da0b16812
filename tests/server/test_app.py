"""Endpoints over the tiny model: shapes, defaults, refusals; and a good request works after every bad one."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import patch

import pytest

from kvpager import __version__
from tests.server.harness import NAME, LiveServer, error_of, fake_server
from tests.small_llm import CONTEXT, tokenizer

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def hello(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hello"}], **more}


def test_a_chat_has_the_shape_that_clients_expect(live: LiveServer) -> None:
    answer = live.chat(max_tokens=5, temperature=0)
    assert answer["object"] == "chat.completion"
    assert answer["model"] == NAME
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "length"
    usage = answer["usage"]
    assert usage["completion_tokens"] == 5
    assert usage["total_tokens"] == 5 + usage["prompt_tokens"]
    assert set(answer["kvpager"]) == {
        "pages_attended",
        "pages_recalled",
        "pages_evicted",
        "estimated_mass_coverage",
    }
    assert answer["kvpager"]["pages_attended"] > 0
    assert answer["kvpager"]["estimated_mass_coverage"] == 1.0


def test_the_same_prompt_by_all_its_ways_gives_the_same_text(live: LiveServer) -> None:
    ids = tokenizer()("hi there")["input_ids"]
    settings = {"max_tokens": 6, "temperature": 0}
    by_text = live.complete("hi there", **settings)["choices"][0]["text"]
    assert live.complete(ids, **settings)["choices"][0]["text"] == by_text
    several = live.complete(["hi there", "other", "hi there"], **settings)["choices"]
    assert [choice["index"] for choice in several] == [0, 1, 2]
    assert several[0]["text"] == several[2]["text"] == by_text != several[1]["text"]
    listed = live.complete([ids, ids], n=2, **settings)["choices"]
    assert [choice["text"] for choice in listed] == [by_text] * 4


def test_echo_shows_the_prompt_with_its_log_probabilities(live: LiveServer) -> None:
    plain = live.complete("hi there", max_tokens=3, temperature=0)["choices"][0]["text"]
    answer = live.complete("hi there", max_tokens=3, temperature=0, echo=True, logprobs=2)
    (choice,) = answer["choices"]
    assert choice["text"] == "hi there" + plain
    told = choice["logprobs"]
    assert len(told["tokens"]) == answer["usage"]["total_tokens"] == len(told["text_offset"])
    assert told["token_logprobs"][0] is None
    assert all(value < 0 for value in told["token_logprobs"][1:])
    assert told["top_logprobs"][0] is None
    assert all(2 <= len(top) <= 3 for top in told["top_logprobs"][1:])
    assert told["text_offset"][:4] == [0, 1, 2, 3]
    assert "".join(told["tokens"]).startswith("hi there")
    alone = live.complete("hi there", max_tokens=0, echo=True, logprobs=0)
    assert alone["choices"][0]["text"] == "hi there"
    assert alone["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(
        told["token_logprobs"][: alone["usage"]["prompt_tokens"]], abs=1e-4
    )
    assert alone["usage"]["completion_tokens"] == 0


def test_log_probabilities_of_a_chat(live: LiveServer) -> None:
    (choice,) = live.chat(max_tokens=4, temperature=0, logprobs=True, top_logprobs=3)["choices"]
    entries = choice["logprobs"]["content"]
    assert len(entries) == 4
    for entry in entries:
        assert len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]  # greedy: the likeliest was taken
    joined = bytes(byte for entry in entries for byte in entry["bytes"])
    assert joined.decode("utf-8", "replace") == choice["message"]["content"]


def test_the_same_seed_gives_the_same_text(live: LiveServer) -> None:
    texts = [live.complete("once", max_tokens=8, seed=seed)["choices"][0]["text"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_settings_reach_the_engine(live: LiveServer) -> None:
    biased = live.complete("x", max_tokens=4, temperature=0, logit_bias={"40": 100})
    assert biased["choices"][0]["text"] == tokenizer().decode([40]) * 4
    stopped = live.complete("x", max_tokens=4, temperature=0, logit_bias={"40": 100}, stop_token_ids=[40])
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["choices"][0]["stop_reason"] == 40
    least = live.complete("x", max_tokens=4, temperature=0, logit_bias={"1": 100}, min_tokens=3)
    assert least["usage"]["completion_tokens"] >= 3
    assert live.complete("x", max_tokens=2, logit_bias={"1": 100})["choices"][0]["finish_reason"] == "stop"
    ignored = live.complete("x", max_tokens=2, logit_bias={"1": 100}, ignore_eos=True)
    assert ignored["choices"][0]["finish_reason"] == "length"


def test_json_is_written_where_it_is_asked_for(live: LiveServer) -> None:
    import json

    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    (choice,) = live.chat(max_tokens=60, response_format=form, seed=3)["choices"]
    assert json.loads(choice["message"]["content"])["a"] in ("x", "y")
    assert choice["finish_reason"] == "stop"


def test_models_are_listed_and_found(live: LiveServer) -> None:
    (card,) = live.client.get("/v1/models").json()["data"]
    assert card["id"] == NAME
    assert card["object"] == "model"
    assert card["max_model_len"] == CONTEXT
    assert live.client.get(f"/v1/models/{NAME}").json() == card
    answer = live.client.get("/v1/models/other/one")
    assert answer.status_code == 404
    assert error_of(answer)["code"] == "model_not_found"


def test_text_and_tokens_go_both_ways(live: LiveServer) -> None:
    answer = live.post("/tokenize", {"prompt": "thé 😀", "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == CONTEXT
    assert live.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "thé 😀"}
    unknown = live.post("/detokenize", {"tokens": [99999]})
    assert unknown.status_code == 400
    assert error_of(unknown)["param"] == "tokens"
    both = live.post("/tokenize", {"prompt": "a", "messages": []})
    assert both.status_code == 400
    chat = live.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json()
    assert chat["count"] == live.chat("hi", max_tokens=1)["usage"]["prompt_tokens"]


def test_long_lists_of_tokens_do_not_hold_up_the_event_loop(live: LiveServer) -> None:
    threads: list[str] = []
    told = live.service.texts.token

    def token(one: int) -> tuple[str, bytes]:
        threads.append(threading.current_thread().name)
        return told(one)

    with patch.object(live.service.texts, "token", token):
        live.post("/tokenize", {"prompt": "ab", "return_token_strs": True})
    assert len(threads) == 2
    assert all(name.startswith("kvpager-texts") for name in threads)


def test_watchers_get_their_answers(live: LiveServer) -> None:
    assert live.client.get("/health").json() == {"status": "ok", "state": "ready"}
    assert live.client.get("/ready").status_code == 200
    assert live.client.get("/version").json() == {"version": __version__}
    stats = live.client.get("/stats").json()
    assert stats["running"] == stats["waiting"] == 0
    assert stats["pager"]["sequences"] == 0


BAD = {
    "empty prompt": (TEXT, {"prompt": ""}, "prompt", None),
    "an empty prompt in a list": (TEXT, {"prompt": [""]}, "prompt", None),
    "no prompts": (TEXT, {"prompt": []}, "prompt", None),
    "no tokens": (TEXT, {"prompt": [[]]}, "prompt", None),
    "no messages": (CHAT, {"messages": []}, "messages", "invalid_value"),
    "messages missing": (CHAT, {}, "messages", "missing_required_parameter"),
    "no tokens wanted": (TEXT, {"prompt": "a", "max_tokens": 0}, "max_tokens", "invalid_value"),
    "fewer than none wanted": (CHAT, hello(max_tokens=-1), "max_tokens", "invalid_value"),
    "a token out of the vocabulary": (TEXT, {"prompt": [5, 260]}, "prompt", "invalid_value"),
    "a token below zero": (TEXT, {"prompt": [5, -1]}, "prompt", None),
    "text for a number": (CHAT, hello(max_tokens="5"), "max_tokens", "invalid_type"),
    "truth for a number": (CHAT, hello(n=True), "n", "invalid_type"),
    "temperature": (CHAT, hello(temperature=-0.5), "temperature", "invalid_value"),
    "top_p": (CHAT, hello(top_p=0), "top_p", "invalid_value"),
    "too many answers": (CHAT, hello(n=17), "n", "invalid_value"),
    "too many stops": (CHAT, hello(stop=["x"] * 17), "stop", "invalid_value"),
    "an empty stop": (CHAT, hello(stop=""), "stop", "invalid_value"),
    "a long stop": (CHAT, hello(stop="x" * 257), "stop", "invalid_value"),
    "too many log-probabilities": (CHAT, hello(logprobs=True, top_logprobs=21), "top_logprobs", "invalid_value"),
    "alternatives to nothing": (CHAT, hello(top_logprobs=2), "top_logprobs", "invalid_value"),
    "bias of no token": (CHAT, hello(logit_bias={"x": 1}), "logit_bias", "invalid_value"),
    "bias out of the vocabulary": (CHAT, hello(logit_bias={"260": 1}), "logit_bias", "invalid_value"),
    "bias out of range": (CHAT, hello(logit_bias={"5": 101}), "logit_bias", "invalid_value"),
    "a long prompt": (TEXT, {"prompt": "a" * 600}, "prompt", "context_length_exceeded"),
    "a long answer": (CHAT, hello(max_tokens=CONTEXT), "messages", "context_length_exceeded"),
    "an unknown role": (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages", "invalid_value"),
    "no content": (CHAT, {"messages": [{"role": "user"}]}, "messages", "missing_required_parameter"),
    "a picture": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        "messages",
        "unsupported_content",
    ),
    "tools": (CHAT, hello(tools=[{"type": "function", "function": {"name": "f"}}]), "tools", "unsupported_parameter"),
    "a tool's choice": (CHAT, hello(tool_choice="required"), "tool_choice", "unsupported_parameter"),
    "functions": (CHAT, hello(functions=[{"name": "f"}]), "functions", "unsupported_parameter"),
    "sound": (CHAT, hello(modalities=["text", "audio"]), "modalities", "unsupported_parameter"),
    "a suffix": (TEXT, {"prompt": "a", "suffix": "b"}, "suffix", "unsupported_parameter"),
    "the best of more": (TEXT, {"prompt": "a", "best_of": 3}, "best_of", "unsupported_parameter"),
    "beams": (TEXT, {"prompt": "a", "use_beam_search": True}, "use_beam_search", "unsupported_parameter"),
    "a schema missing": (CHAT, hello(response_format={"type": "json_schema"}), "response_format", None),
    "a schema that is none": (
        CHAT,
        hello(response_format={"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}),
        "response_format",
        "invalid_value",
    ),
    "an unknown form": (CHAT, hello(response_format={"type": "xml"}), "response_format", None),
    "usage without a stream": (CHAT, hello(stream_options={"include_usage": True}), "stream_options", "invalid_value"),
    "half a character": (TEXT, {"prompt": "a\ud800"}, "prompt", "invalid_value"),
    "half a character in a list": (TEXT, {"prompt": ["a", "\udfff"]}, "prompt", "invalid_value"),
    "half a character in a chat": (
        CHAT,
        {"messages": [{"role": "user", "content": "\ud800"}]},
        "messages",
        "invalid_value",
    ),
    "half a character in a part": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud83d"}]}]},
        "messages",
        "invalid_value",
    ),
    "half a character to stop at": (CHAT, hello(stop="\ud800"), "stop", "invalid_value"),
    "not an object": (CHAT, [1, 2], None, None),
}


@pytest.mark.promise(6)
@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_told_and_does_no_harm(live: LiveServer, name: str) -> None:
    path, body, param, code = BAD[name]
    answer = live.post(path, body)
    assert answer.status_code == 400, answer.text
    error = error_of(answer)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert code is None or error["code"] == code
    assert live.chat(max_tokens=1)["usage"]["completion_tokens"] == 1


def test_a_bad_request_does_not_disturb_a_good_one() -> None:
    with fake_server() as server:
        server.engine.gate.clear()
        connection = server.raw(TEXT, {"prompt": "good", "max_tokens": 40})
        server.until(lambda: bool(server.engine.requests))
        server.engine.gate.set()
        for path, body, _, _ in BAD.values():
            assert server.post(path, body).status_code in (200, 400)
        answer = connection.recv(65536)
        connection.close()
        assert b" 200 OK" in answer
        assert server.client.get("/health").status_code == 200


def test_another_models_name_is_not_found(live: LiveServer) -> None:
    answer = live.post(CHAT, hello(model="gpt-4"))
    assert answer.status_code == 404
    assert error_of(answer) == {
        "message": f"There is no model 'gpt-4'; this server has {NAME}.",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
    assert live.chat(model=NAME, max_tokens=1)


def test_other_errors_have_the_same_shape(live: LiveServer) -> None:
    assert error_of(live.client.get("/nowhere"))["code"] == "not_found"
    slash = live.client.post(f"{CHAT}/", json=hello(), headers={"Host": "elsewhere.example"})
    assert slash.status_code == 404
    assert error_of(slash)["code"] == "not_found"
    wrong = live.client.get(CHAT)
    assert wrong.status_code == 405
    assert error_of(wrong)["code"] == "method_not_allowed"
    assert wrong.headers["allow"] == "POST"
    as_json = {"Content-Type": "application/json"}
    for content in (b"", b"{", b'{"prompt": "\xff"}', b"[" * 100_000, b'{"prompt": ' + b"9" * 5000 + b"}"):
        broken = live.client.post(TEXT, content=content, headers=as_json)
        assert broken.status_code == 400, (content[:20], broken.text)
        assert error_of(broken)["code"] == "invalid_json"
    other = live.client.post(TEXT, content=b"prompt=a", headers={"Content-Type": "application/x-www-form-urlencoded"})
    assert other.status_code == 415
    assert error_of(other)["code"] == "unsupported_media_type"
    infinite = live.client.post(TEXT, content=b'{"prompt": "a", "temperature": NaN}', headers=as_json)
    assert infinite.status_code == 400
    assert error_of(infinite)["param"] == "temperature"
    lone = live.client.post(TEXT, content=b'{"prompt": "a", "model": "\\ud800"}', headers=as_json)
    assert lone.status_code in (400, 404)
    error_of(lone)


def test_harmless_fields_are_ignored(live: LiveServer) -> None:
    plain = live.chat(max_tokens=3, temperature=0)["choices"]
    more = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "tools": [], "unheard_of": 1}
    more |= {"tool_choice": "auto", "modalities": ["text"], "parallel_tool_calls": True, "n": None, "stop": None}
    assert live.chat(max_tokens=3, temperature=0, **more)["choices"] == plain


def test_a_fault_of_ours_is_told_without_its_details() -> None:
    with fake_server() as server:
        server.engine.gate.clear()
        server.engine.fail.append(ValueError("secret"))
        server.engine.gate.set()
        answer = server.post(TEXT, {"prompt": "a", "max_tokens": 3})
        assert answer.status_code == 500
        assert error_of(answer)["code"] == "internal_error"
        assert "secret" not in answer.text
        assert server.complete("a", max_tokens=3)
        server.service.engine.submit = None  # type: ignore[method-assign, assignment]
        broken = server.post(TEXT, {"prompt": "a"})
        assert broken.status_code == 500
        assert error_of(broken)["type"] == "server_error"


def test_an_engine_that_failed_is_seen_from_outside() -> None:
    with fake_server() as server:
        server.engine.broken = True
        server.engine.fail.append(ValueError("x"))
        answer = server.post(TEXT, {"prompt": "a"})
        assert answer.status_code == 503
        assert error_of(answer)["code"] == "engine_stopped"
        assert server.client.get("/health").status_code == 503
        assert server.client.get("/ready").status_code == 503
        later = server.post(TEXT, {"prompt": "a"})
        assert later.status_code == 503
        assert later.headers["retry-after"]


def test_before_the_model_is_there_the_server_is_alive_but_not_ready() -> None:
    import threading

    from kvpager.server.service import Served
    from tests.server.harness import LiveServer as Server

    go = threading.Event()

    def make() -> Served:
        go.wait()
        from tests.engine.fake import FakeEngine

        engine: Any = FakeEngine(tokenizer())
        return Served(engine, tokenizer(), 512)

    server = Server(make)
    server.until = lambda condition: None  # type: ignore[method-assign]  # don't wait for it
    with server:
        assert server.client.get("/health").status_code == 200
        assert server.client.get("/ready").status_code == 503
        early = server.post(TEXT, {"prompt": "a"})
        assert early.status_code == 503
        assert error_of(early)["code"] == "engine_loading"
        assert server.client.get("/v1/models").status_code == 200
        go.set()
        del server.until
        server.until(lambda: server.client.get("/ready").status_code == 200)
        assert server.complete("a", max_tokens=2)
