"""Answers keep to their JSON schema whatever the model wants to say."""

from __future__ import annotations

import builtins
import json
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from kvpager.engine.guided import JSON_OBJECT, Guides
from kvpager.engine.params import SamplingParams
from kvpager.engine.sampler import Sampled, Sampler, SampleState
from kvpager.errors import InputError, MissingDependency, SampleError
from tests.small_llm import END, tokenizer

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["né", "b"]}, "maxItems": 3},
        "more": {"anyOf": [{"type": "null"}, {"type": "object", "additionalProperties": {"type": "boolean"}}]},
    },
    "required": ["name", "age", "more"],
    "additionalProperties": False,
}
SCHEMAS: list[dict[str, Any]] = [
    PERSON,
    {"type": "array", "items": {"type": "number"}, "minItems": 1},
    {"const": 5},
    {"type": "object", "minProperties": 1, "maxProperties": 3, "additionalProperties": {"type": "integer"}},
    json.loads(JSON_OBJECT),
]
SMALL = tokenizer()


def small_guides() -> Guides:
    return Guides(SMALL, 260, frozenset([END]))


def answer(
    guides: Guides, vocabulary: int, end: int, params: SamplingParams, weights: torch.Tensor | None = None
) -> tuple[list[int], bool]:
    """Tokens for logits that are random, and whether the answer came to its end."""
    assert isinstance(params.json_schema, str)
    state = SampleState(params, seed=0, guide=guides.guide(params.json_schema))
    sampler = Sampler(vocabulary, frozenset([end]))
    generator = torch.Generator().manual_seed(params.seed or 0)
    ids: list[int] = []
    while len(ids) < (params.max_tokens or 0):
        logits = torch.randn(1, vocabulary, generator=generator) * 2
        result = sampler.sample(logits if weights is None else logits + weights, [state])[0]
        assert isinstance(result, Sampled)
        state.accept(result.token)
        if result.token == end:
            return ids, True
        ids.append(result.token)
        if state.finished:
            return ids, True
    return ids, False


def accepted(text: str, schema: dict[str, Any]) -> None:
    jsonschema.validate(json.loads(text), {"type": "object"} if schema == json.loads(JSON_OBJECT) else schema)


@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("settings", [{}, {"temperature": 0}, {"top_p": 0.5, "min_tokens": 30}, {"ignore_eos": True}])
def test_whatever_the_model_wants_the_answer_keeps_to_the_schema(
    schema: dict[str, Any], settings: dict[str, Any]
) -> None:
    guides = small_guides()
    weights = torch.zeros(260)
    weights[[SMALL.convert_tokens_to_ids(token) for token in ('"', "}", "]")]] = 6.0  # so that it comes to an end
    whole = 0
    for seed in range(8):
        params = SamplingParams(max_tokens=400, json_schema=schema, seed=seed, **settings)
        ids, ended = answer(guides, 260, END, params, weights)
        if ended:
            accepted(SMALL.decode(ids), schema)
            whole += 1
    assert whole >= 4


@pytest.mark.slow
@pytest.mark.parametrize("schema", SCHEMAS)
def test_with_the_tokenizer_of_the_default_model_too(schema: dict[str, Any], real_tokenizer: Any) -> None:
    vocabulary = len(real_tokenizer)
    end = real_tokenizer.eos_token_id
    guides = Guides(real_tokenizer, vocabulary, frozenset([end]))
    weights = torch.zeros(vocabulary)
    weights[[token for piece in ('"', "}", "]", '"}', "]}") for token in real_tokenizer(piece)["input_ids"]]] = 12.0
    whole = 0
    for seed in range(3):
        params = SamplingParams(max_tokens=300, json_schema=schema, seed=seed)
        ids, ended = answer(guides, vocabulary, end, params, weights)
        if ended:
            accepted(real_tokenizer.decode(ids), schema)
            whole += 1
    assert whole >= 1


def test_a_vocabulary_larger_than_the_tokenizers_gives_no_other_tokens() -> None:
    guide = Guides(SMALL, 300, frozenset([END])).guide(JSON_OBJECT)
    allowed = guide.allowed()
    assert len(allowed) == 300
    assert not allowed[260:].any()


def test_the_end_is_allowed_when_the_text_is_complete_and_not_before() -> None:
    guide = small_guides().guide('{"type": "integer"}')
    digit = SMALL.convert_tokens_to_ids("7")
    assert not guide.allowed()[END]
    guide.accept(digit)
    assert guide.allowed()[END]
    assert guide.allowed()[digit]
    assert not guide.finished
    guide.accept(END)
    assert guide.finished


def test_a_token_that_is_not_allowed_is_refused() -> None:
    with pytest.raises(SampleError, match="json_schema: token 1 is not allowed"):
        small_guides().guide('{"type": "integer"}').accept(END)


def test_a_grammar_that_takes_too_much_effort_is_an_error_of_its_row() -> None:
    guide = small_guides().guide('{"type": "integer"}')
    with pytest.raises(SampleError):
        guide.accept(END)  # a matcher in error stays so
    states = [SampleState(SamplingParams(temperature=0), seed=0, guide=made) for made in (guide, None)]
    logits = torch.zeros(2, 260)
    broken, fine = Sampler(260, frozenset([END])).sample(logits, states)
    assert isinstance(broken, SampleError)
    assert str(broken).startswith("json_schema: ")
    assert fine == Sampled(0)


def test_copies_go_their_own_ways() -> None:
    first = small_guides().guide('{"enum": [12, 34]}')
    second = first.copy()
    one, three = (SMALL.convert_tokens_to_ids(token) for token in "13")
    first.accept(one)
    second.accept(three)
    assert not np.array_equal(first.allowed(), second.allowed())


def test_a_schema_that_is_used_again_starts_from_the_beginning() -> None:
    guides = small_guides()
    first = guides.guide('{"enum": [12, 34]}')
    beginning = first.allowed()
    first.accept(SMALL.convert_tokens_to_ids("1"))
    np.testing.assert_array_equal(guides.guide('{"enum": [12, 34]}').allowed(), beginning)


def test_only_the_last_schemas_are_kept() -> None:
    guides = small_guides()
    for number in range(40):
        guides.guide(json.dumps({"const": number}))
    assert len(guides._grammars) == 32
    assert json.dumps({"const": 39}) in guides._grammars


@pytest.mark.promise(6)
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "foo"},
        {"type": 5},
        {"properties": 5},
        {"$ref": "#/nope"},
        {"$ref": "http://example.com/x"},
        {"type": "string", "pattern": "("},
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"type": "string", "format": "nonsense"},
        {"not": {}},
        {"type": "array", "uniqueItems": True},
        {"type": "integer", "minimum": 5, "maximum": 1},
        {"x-guidance": {"item_separator": "x"}},
        {"enum": ["x" * 70_000]},
        {"type": "object", "minProperties": 2, "additionalProperties": {"type": "integer"}},
        {"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"type": "object", "minProperties": 2}}},
    ],
)
def test_a_schema_that_can_not_be_kept_to_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"^json_schema: ") as caught:
        small_guides().guide(json.dumps(schema))
    assert len(str(caught.value)) < 400


def test_names_and_data_that_look_like_a_count_of_properties_are_none() -> None:
    schema = {
        "type": "object",
        "properties": {"minProperties": {"const": {"minProperties": 5}}, "b": {"type": "object", "minProperties": 1}},
        "required": ["minProperties", "b"],
        "minProperties": 2,
    }
    small_guides().guide(json.dumps(schema))


def test_a_schema_nested_too_deep_is_refused() -> None:
    schema = '{"items":' * 300 + "{}" + "}" * 300
    with pytest.raises(InputError, match=r"^json_schema: "):
        small_guides().guide(schema)


def test_a_schema_that_costs_too_much_is_refused() -> None:
    part = {"type": "string", "pattern": "^(a|b|c)*(a|b)(a|b|c){200}$"}
    schema = {"allOf": [part, {"type": "string", "pattern": "^(a|c)*(b|c)(a|b|c){300}$"}] * 5}
    with pytest.raises(InputError, match=r"^json_schema: "):
        small_guides().guide(json.dumps(schema))


def test_a_tokenizer_that_can_not_be_guided_is_said() -> None:
    class Slow:
        def __len__(self) -> int:
            return 260

    slow: Any = Slow()
    assert not isinstance(slow, PreTrainedTokenizerBase)
    with pytest.raises(InputError, match="this model's tokenizer can't be guided"):
        Guides(slow, 260, frozenset([END])).guide(JSON_OBJECT)


def test_without_llguidance_the_command_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **more: Any) -> Any:
        if name.startswith("llguidance"):
            raise ImportError(name)
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingDependency, match=r"pip install 'kvpager\[json\]'"):
        small_guides().guide(JSON_OBJECT)
