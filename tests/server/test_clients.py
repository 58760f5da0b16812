"""Existing clients use the server unchanged: the openai package, LangChain, httpx and curl; and 16 threads at once."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI

from tests.server.harness import NAME, LiveServer, real_server

MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def test_openai_chats(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=NAME, messages=MESSAGES, max_completion_tokens=5, temperature=0)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    assert answer.usage.prompt_tokens_details is not None
    streamed = client.chat.completions.create(
        model=NAME,
        messages=MESSAGES,
        max_completion_tokens=5,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(streamed)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == answer.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5


def test_openai_reads_streams_with_ids_and_comes_back_to_them(client: openai.OpenAI) -> None:
    def texts(**more: str) -> list[str]:
        headers = {"Idempotency-Key": "an openai client's", **more}
        asked: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "max_completion_tokens": 9, "temperature": 0}
        chunks = list(client.chat.completions.create(**asked, stream=True, extra_headers=headers))
        return [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]

    whole = texts()
    rest = texts(**{"Last-Event-ID": "4"})
    assert rest == whole[-len(rest) :]
    assert 0 < len(rest) < len(whole)
    assert texts() == whole


def test_openai_completes_with_log_probabilities(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=NAME, prompt=["hello", "other"], max_tokens=4, logprobs=2, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert len(choice.logprobs.token_logprobs or ()) == len(choice.logprobs.tokens or ())
    chat = client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=3, logprobs=True, top_logprobs=4)
    assert chat.choices[0].logprobs is not None
    assert all(len(entry.top_logprobs) == 4 for entry in chat.choices[0].logprobs.content or ())


def test_openai_hears_what_is_wrong(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=NAME, messages=MESSAGES, tools=[tool])
    assert caught.value.param == "tools"
    assert caught.value.code == "unsupported_parameter"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=NAME, prompt="a" * 2000)
    assert long.value.code == "context_length_exceeded"


def test_openai_parses_json(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(model=NAME, messages=MESSAGES, response_format=form, max_tokens=80)
    assert isinstance(json.loads(answer.choices[0].message.content or "")["ok"], bool)
    loose: Any = {"type": "json_object"}
    anything = client.chat.completions.create(
        model=NAME, messages=MESSAGES, response_format=loose, max_tokens=400, logit_bias={"95": 50}
    )
    text = anything.choices[0].message.content or ""
    assert text.lstrip().startswith("{")


def test_openai_lists_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME


def test_langchain_invokes_and_streams(live: LiveServer) -> None:
    chat = ChatOpenAI(base_url=f"{live.url}/v1", api_key="none", model=NAME, temperature=0, max_tokens=6)  # type: ignore[call-arg, arg-type]
    turns = [SystemMessage("Be brief."), HumanMessage("hello")]
    whole = chat.invoke(turns)
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] > 0
    assert "".join(str(chunk.content) for chunk in chat.stream(turns)) == whole.content
    several = chat.batch([[HumanMessage(f"hello {number}")] for number in range(4)])
    assert len(several) == 4


def test_curl_streams(live: LiveServer) -> None:
    body = json.dumps({"prompt": "hello", "max_tokens": 3, "stream": True})
    command = ["curl", "-sN", f"{live.url}/v1/completions", "-H", "Content-Type: application/json", "-d", body]
    output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert output.endswith("data: [DONE]\n\n")


def test_sixteen_threads_get_their_own_answers(folder: str) -> None:
    """BUGS G19: each prompt has a marker of its own; a small pool, so that pages come and go."""
    with real_server(folder, pool="96", max_num_seqs=8, max_num_batched_tokens=128) as server:
        prompts = [f"marker {number:02d} {chr(97 + number) * 3} " * 6 for number in range(16)]
        settings = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
        alone = [server.complete(prompt, **settings)["choices"][0]["text"] for prompt in prompts]
        assert len(set(alone)) == 16
        wrong: list[str] = []

        def ask(number: int) -> None:
            with httpx.Client(base_url=server.url, timeout=60) as own:
                for _ in range(4):
                    answer = own.post("/v1/completions", json={"prompt": prompts[number], **settings}).json()
                    if answer["choices"][0]["text"] != alone[number]:
                        wrong.append(prompts[number])

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        stats = server.client.get("/stats").json()
        assert stats["running"] == 0
        assert stats["pager"]["evictions"] > 0
