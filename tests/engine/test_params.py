"""Every setting of a request is checked when it is made, and the message names it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvpager.engine.params import SamplingParams
from kvpager.errors import InputError

WHOLE = ["max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs", "n"]
NUMBERS = [
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
]
FLAGS = ["ignore_eos", "skip_special_tokens", "include_stop_str_in_output"]


def refused(**settings: Any) -> str:
    with pytest.raises(InputError) as caught:
        SamplingParams(**settings)
    message = str(caught.value)
    assert len(message) < 300
    return message


@pytest.mark.promise(6)
@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize(
    "value", [True, 1.0, "1" * 1000, math.nan, -(2**70), 2**70, pytest.param(10**5000, id="huge"), [1]]
)
def test_whole_numbers_are_whole_and_in_range(name: str, value: Any) -> None:
    assert refused(**{name: value}).startswith(f"{name}: ")


@pytest.mark.promise(6)
@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize(
    "value", [True, "1", None, math.nan, math.inf, -math.inf, 1e300, -3.0, pytest.param(10**5000, id="huge")]
)
def test_numbers_are_finite_and_in_range(name: str, value: Any) -> None:
    assert refused(**{name: value}).startswith(f"{name}: ")


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", [0, 1, "yes", None])
def test_flags_are_true_or_false(name: str, value: Any) -> None:
    assert refused(**{name: value}).startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"repetition_penalty": 0.009}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"logprobs": 101}, "logprobs"),
        ({"logit_bias": [1, 2]}, "logit_bias"),
        ({"logit_bias": {"1": 2.0}}, "logit_bias"),
        ({"logit_bias": {-1: 2.0}}, "logit_bias"),
        ({"logit_bias": {1: math.nan}}, "logit_bias of token 1"),
        ({"logit_bias": {1: 101}}, "logit_bias of token 1"),
        ({"logit_bias": dict.fromkeys(range(5000), 1.0)}, "logit_bias"),
        ({"stop": ""}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": None}, "stop"),
        ({"stop": ["x" * 5000]}, "stop"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stop_token_ids": [True]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": "[]"}, "json_schema"),
        ({"json_schema": "[" * 100_000}, "json_schema"),
        ({"json_schema": 5}, "json_schema"),
        ({"json_schema": {"x": {1, 2}}}, "json_schema"),
        ({"json_schema": {"x": math.nan}}, "json_schema"),
    ],
)
def test_what_is_wrong_is_named(settings: dict[str, Any], field: str) -> None:
    assert refused(**settings).startswith(f"{field}: ")


def test_what_is_given_is_copied() -> None:
    bias, stop = {3: 1}, ["a"]
    params = SamplingParams(logit_bias=bias, stop=stop)  # type: ignore[arg-type]
    bias[4] = 2
    stop.append("b")
    assert params.logit_bias == {3: 1.0}
    assert params.stop == ("a",)
    assert SamplingParams(stop="ab").stop == ("ab",)  # type: ignore[arg-type]


def test_a_schema_is_kept_as_text_with_its_keys_in_order() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    assert SamplingParams(json_schema=schema).json_schema == ('{"type": "object", "properties": {"b": {}, "a": {}}}')
    assert SamplingParams(json_schema='{"type":"object"}').json_schema == '{"type": "object"}'


def test_whole_numbers_serve_as_numbers() -> None:
    assert SamplingParams(temperature=1, top_p=1, repetition_penalty=2).temperature == 1


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (0.0, True), (1e-6, True), (1e-5, False), (1, False)])
def test_temperatures_next_to_zero_are_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_token_ids_must_be_in_the_vocabulary() -> None:
    SamplingParams(logit_bias={99: 1}, stop_token_ids=(99,)).require_vocabulary(100)
    for name, params in [
        ("logit_bias", SamplingParams(logit_bias={3: 1, 100: 1})),
        ("stop_token_ids", SamplingParams(stop_token_ids=(100,))),
    ]:
        with pytest.raises(InputError, match=rf"{name}: token id 100 is not in 0\.\.99"):
            params.require_vocabulary(100)
