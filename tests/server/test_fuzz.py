"""Bodies that nobody meant: never a 500, never an engine that is stuck afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kvpager.server.app import create_app
from tests.server.harness import LiveServer, error_of, fake_server

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [
    *("model", "stream", "stream_options", "n", "seed", "stop", "max_tokens", "temperature", "top_p", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "response_format", "user", "top_k", "min_p", "repetition_penalty"),
    *("min_tokens", "stop_token_ids", "ignore_eos", "skip_special_tokens", "priority", "messages", "prompt", "echo"),
    *("logprobs", "top_logprobs", "best_of", "suffix", "tools", "tool_choice", "max_completion_tokens", "modalities"),
    "session",
]
NEAR = {  # values that are nearly right, so that what lies behind the first checks is reached too
    "n": st.integers(-1, 4),
    "max_tokens": st.integers(-1, 40),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=5),
    "temperature": st.floats(-1, 3) | st.integers(0, 2),
    "top_p": st.floats(0, 1.1),
    "logprobs": st.integers(-1, 22) | st.booleans(),
    "top_logprobs": st.integers(0, 21),
    "logit_bias": st.dictionaries(st.integers(-2, 300).map(str), st.floats(-101, 101), max_size=3),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    "echo": st.booleans(),
    "seed": st.integers(),
    "session": st.none() | st.text(max_size=3),
    "prompt": st.text(max_size=20)
    | st.lists(st.text(max_size=5), max_size=3)
    | st.lists(st.integers(-1, 300), max_size=5)
    | st.lists(st.lists(st.integers(0, 300), max_size=3), max_size=3),
    "messages": st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "assistant", "x"]), "content": ANYTHING}),
        max_size=3,
    ),
}
BODIES = st.dictionaries(st.sampled_from(FIELDS), ANYTHING, max_size=5).flatmap(
    lambda odd: st.fixed_dictionaries({}, optional=NEAR).map(lambda near: {**near, **odd})
)
SETTINGS = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),
)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with fake_server(max_model_len=2048) as made:
        yield made


def checked(server: LiveServer, path: str, body: Any) -> None:
    answer = server.post(path, body)
    assert answer.status_code < 500, (body, answer.text)
    if answer.status_code != 200:
        error_of(answer)


def works(server: LiveServer) -> None:
    server.until(lambda: not server.engine.requests)
    assert server.complete("good", max_tokens=3)["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_odd_bodies_are_answered(server: LiveServer, path: str) -> None:
    @SETTINGS
    @given(BODIES | ANYTHING)
    def run(body: Any) -> None:
        checked(server, path, body)

    run()
    works(server)


def test_odd_bytes_are_answered(server: LiveServer) -> None:
    @SETTINGS
    @given(st.binary(max_size=60))
    def run(content: bytes) -> None:
        headers = {"Content-Type": "application/json"}
        answer = server.client.post("/v1/completions", content=content, headers=headers)
        assert 400 <= answer.status_code < 500
        error_of(answer)

    run()
    works(server)


def test_what_the_schema_allows_is_answered(server: LiveServer) -> None:
    schema = schemathesis.openapi.from_dict(create_app(server.service).openapi())
    for operation in (result.ok() for result in schema.get_all_operations()):

        @settings(SETTINGS, max_examples=12)
        @given(case=operation.as_strategy())
        def run(case: Any) -> None:
            answer = case.call(base_url=server.url)
            assert answer.status_code in (200, 400, 404, 415), answer.text

        run()
    works(server)
