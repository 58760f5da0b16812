"""Answers that keep to a JSON schema: a grammar that says which tokens may come next (the package llguidance)."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvpager.errors import InputError, MissingDependency, SampleError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["JSON_OBJECT", "Guides", "JsonGuide"]

JSON_OBJECT = '{"type": "json_object"}'  # in the place of a schema: any JSON object
MOST_SCHEMA_BYTES = 64 * 1024
KEPT_GRAMMARS = 32
# Between the parts of JSON; without an end to it a small model can go on with spaces for ever.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
BY_NAME = ("properties", "patternProperties", "$defs", "definitions")  # keywords that hold schemas by names of any kind
DATA = ("const", "enum", "default", "examples")  # keywords that hold no schemas
# What a schema may cost, in llguidance's units: about 20 ms to build its lexer, 15 ms and 3 ms in a step at the very
# most, and some 40 MB of states.
LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "max_grammar_size": 100_000,
    "max_lexer_states": 20_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "verbose_errors": False,
}


class Guides:
    """Makes guides for one model. What is dear (the tokenizer's tree of tokens, grammars) is made once and kept.

    `vocabulary` is the model's, which may be larger than the tokenizer's; `end_ids` are let through when the text is
    complete.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, end_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._end_ids = sorted(end_ids)
        self._tree: Any = None
        self._grammars: OrderedDict[str, Any] = OrderedDict()  # fresh matchers by schema, the last used at the end

    def guide(self, schema: str) -> JsonGuide:
        """A guide at the beginning of an answer that keeps to `schema` (its JSON text, or JSON_OBJECT).

        Raises InputError for a schema that is too large, not understood, or impossible to keep to; MissingDependency
        where llguidance is not installed.
        """
        matcher = self._grammars.get(schema)
        if matcher is None:
            matcher = self._compile(schema)
            self._grammars[schema] = matcher
            if len(self._grammars) > KEPT_GRAMMARS:
                self._grammars.popitem(last=False)
        self._grammars.move_to_end(schema)
        return JsonGuide(matcher.deep_copy(), self._vocabulary)

    def _compile(self, schema: str) -> Any:
        size = len(schema.encode())
        if size > MOST_SCHEMA_BYTES:
            raise InputError(f"json_schema: {size} bytes are more than {MOST_SCHEMA_BYTES}")
        llguidance = _llguidance()
        parsed = json.loads(schema)
        if "x-guidance" in parsed:  # llguidance's own options could ask for what is no JSON
            raise InputError("json_schema: x-guidance is not a keyword of JSON schemas")
        _check_counts(parsed)
        if parsed == json.loads(JSON_OBJECT):
            schema = '{"type": "object"}'
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(
                schema, overrides={"whitespace_pattern": WHITESPACE, "lenient": False}
            )
        except ValueError as error:
            raise InputError(f"json_schema: {_line(error)}") from None
        matcher = llguidance.LLMatcher(self._tokens(), grammar, log_level=0, limits=llguidance.LLParserLimits(**LIMITS))
        if matcher.is_error():
            raise InputError(f"json_schema: {_line(matcher.get_error())}")
        first = matcher.deep_copy()
        allowed = first.compute_bitmask()
        if first.is_error() or not any(allowed):
            raise InputError("json_schema: no text keeps to it, as where a $ref leads back to itself alone")
        return matcher

    def _tokens(self) -> Any:
        if self._tree is None:
            from llguidance.hf import from_tokenizer

            try:
                self._tree = from_tokenizer(
                    self._tokenizer,  # type: ignore[arg-type]  # a slow one is refused there
                    n_vocab=max(self._vocabulary, len(self._tokenizer)),
                    eos_token=self._end_ids or None,
                )
            except ValueError as error:
                raise InputError(f"json_schema: this model's tokenizer can't be guided ({error})") from None
        return self._tree


class JsonGuide:
    """Where one answer is in its grammar."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    @property
    def finished(self) -> bool:
        """Whether the text is complete and nothing but an end mark can follow."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Which tokens may come next, [vocabulary]. Raises SampleError where that takes more effort than is allowed."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise SampleError(f"json_schema: {_line(self._matcher.get_error())}")
        return np.unpackbits(bits, count=min(self._vocabulary, 8 * len(bits)), bitorder="little").view(np.bool_)

    def accept(self, token: int) -> None:
        """Go on after `token`; raises SampleError where the grammar doesn't allow it."""
        if not self._matcher.consume_token(token):
            raise SampleError(f"json_schema: token {token} is not allowed here")

    def copy(self) -> JsonGuide:
        """Another guide at the same place."""
        return JsonGuide(self._matcher.deep_copy(), self._vocabulary)


def _check_counts(schema: Any) -> None:
    """Refuse a `minProperties` that the grammar can't promise: it counts a name that comes twice as two."""
    if isinstance(schema, list):
        for part in schema:
            _check_counts(part)
    if not isinstance(schema, dict):
        return
    least, required = schema.get("minProperties", 0), schema.get("required", [])
    sure = max(1, len(required) if isinstance(required, list) else 0)
    if isinstance(least, (int, float)) and least > sure:
        raise InputError(f"json_schema: minProperties {least} can't be promised; name them in required, or ask for 1")
    for keyword, value in schema.items():
        if keyword in BY_NAME and isinstance(value, dict):
            _check_counts(list(value.values()))
        elif keyword not in DATA:
            _check_counts(value)


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise MissingDependency(
            "answers by a JSON schema need llguidance, not installed; run: pip install 'kvpager[json]'"
        ) from error
    return llguidance


def _line(error: object) -> str:
    """A message as one line, not a long one."""
    return " ".join(str(error).split())[:300] or "not understood"
