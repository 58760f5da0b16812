"""Text that streams without half characters and without pieces of stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpager.engine.params import SamplingParams
from kvpager.engine.text import TextState, TextStream, decoder
from tests.small_llm import END, tokenizer

BYTES = tokenizer()
TEXTS = [
    "né 😀 汉字",
    "the 👩‍👩‍👧‍👦 family",
    "",
    " leading and trailing ",
    "a\n\tb",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "�already�",
    "\ufffd" * 30,
]
UNICODE = st.text(st.sampled_from("abABth é漢😀\ufffd\n"), max_size=60)


def decode(ids: list[int]) -> str:
    return str(BYTES.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def encode(text: str) -> list[int]:
    return list(BYTES(text)["input_ids"])


def run(ids: Sequence[int], **params: Any) -> tuple[list[str], TextState]:
    """The pieces shown, the last by `finish`."""
    state = TextState(decoder(BYTES, True), SamplingParams(max_tokens=None, **params))
    pieces = []
    for token in ids:
        pieces.append(state.push(token))
        if state.stopped:
            break
    return [*pieces, state.finish()], state


def cut(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """What is left of a text, and the stop string that ends it: looked for from scratch after each character."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize("text", TEXTS)
def test_the_stream_joined_is_the_text_decoded_at_once(text: str) -> None:
    stream = TextStream(decode)
    pieces = [stream.push(token) for token in encode(text)]
    assert "".join(pieces) + stream.finish() == text == stream.text


def test_no_piece_holds_half_a_character() -> None:
    pieces, _ = run(encode("né 😀 汉字"))
    assert [piece for piece in pieces if piece] == list("né 😀 汉字")


@pytest.mark.parametrize("end", range(1, 18))
def test_a_text_cut_inside_a_character_ends_as_when_decoded_at_once(end: int) -> None:
    ids = encode("né 😀 汉字")[:end]
    assert "".join(run(ids)[0]) == decode(ids)


@settings(max_examples=300)
@given(st.lists(st.integers(0, 259), max_size=120))
def test_any_tokens_streamed_are_the_text_decoded_at_once(ids: list[int]) -> None:
    assert "".join(run(ids)[0]) == decode(ids)


@given(st.lists(st.sampled_from([*encode("é漢😀\ufffd"), END]), min_size=30, max_size=200))
def test_tokens_that_are_mostly_no_characters_too(ids: list[int]) -> None:
    assert "".join(run(ids)[0]) == decode(ids)


def test_two_streams_do_not_mix() -> None:
    left, right = TextStream(decode), TextStream(decode)
    for a, b in zip(encode("😀é"), encode("汉字"), strict=True):
        left.push(a)
        right.push(b)
    assert (left.text, right.text) == ("😀é", "汉字")


@pytest.mark.parametrize("token", [END, encode("é")[1], encode("a")[0], encode("漢")[0]])
def test_a_token_costs_the_same_however_long_the_text(token: int) -> None:
    longest = calls = 0

    def counted(ids: list[int]) -> str:
        nonlocal longest, calls
        longest, calls = max(longest, len(ids)), calls + 1
        return decode(ids)

    stream = TextStream(counted)
    text = "".join(stream.push(token) for _ in range(500)) + stream.finish()
    assert text == decode([token] * 500)
    assert longest <= 20
    assert calls <= 1100


STOPS = [
    (["C D"], "A B ", "C D"),
    (["A B C D E"], "", "A B C D E"),
    (["B C D", "C D"], "A ", "B C D"),
    (["C D", "B C D"], "A ", "B C D"),
    (["B C D E", "C D"], "A B ", "C D"),
    (["C D E", "C D"], "A B ", "C D"),
    (["C X"], "A B C D E", None),
    (["E F"], "A B C D E", None),
    ([" "], "A", " "),
]


@pytest.mark.parametrize(("stops", "shown", "reason"), STOPS)
@pytest.mark.parametrize("include", [False, True])
def test_nothing_of_a_stop_string_is_shown(stops: list[str], shown: str, reason: str | None, include: bool) -> None:
    pieces, state = run(encode("A B C D E"), stop=stops, include_stop_str_in_output=include)
    assert "".join(pieces) == shown + (reason or "") * include
    assert state.stopped is (reason is not None)
    assert state.stop_reason == reason
    assert state.push(encode("x")[0]) == state.finish() == "" or reason is None


def test_a_false_start_is_released_at_once() -> None:
    pieces, state = run(encode("A B C X D"), stop=["B C D"])
    assert pieces == ["A", " ", "", "", "", "", "B C X", " ", "D", ""]
    assert not state.stopped


@given(UNICODE, st.lists(st.text(st.sampled_from("abABth é漢😀\ufffd\n"), min_size=1, max_size=5), max_size=4))
@settings(max_examples=300)
def test_stop_strings_cut_a_text_the_same_however_it_is_cut_into_tokens(text: str, stops: list[str]) -> None:
    expected, reason = cut(text, stops)
    pieces, state = run(encode(text), stop=stops)
    assert ("".join(pieces), state.stop_reason) == (expected, reason)
    shown = ""
    for piece in pieces:
        shown += piece
        assert expected.startswith(shown)


def test_a_stop_string_may_be_complete_only_at_the_end() -> None:
    half = encode("é")[0]
    pieces, state = run([*encode("ab"), half], stop=["b\ufffd"])
    assert "".join(pieces) == "a"
    assert state.stop_reason == "b\ufffd"


def test_the_first_tokens_are_not_searched() -> None:
    pieces, state = run(encode("xx.yy.zz"), stop=["."], min_tokens=3)
    assert "".join(pieces) == "xx.yy"
    assert state.stop_reason == "."
    assert "".join(run(encode("a.b"), stop=["."], min_tokens=5)[0]) == "a.b"


@pytest.mark.parametrize("skip", [True, False])
def test_control_tokens_are_shown_or_left_out(skip: bool) -> None:
    state = TextState(decoder(BYTES, skip), SamplingParams())
    ids = [encode("a")[0], END, encode("b")[0]]
    assert "".join([*map(state.push, ids), state.finish()]) == ("ab" if skip else "a</s>b")


class Stripping:
    """A decoder that leaves out the space before the first word, as those of SentencePiece models do."""

    def __call__(self, ids: list[int]) -> str:
        return "".join(["", " a", " b", "c"][token] for token in ids).removeprefix(" ")


@given(st.lists(st.integers(0, 3), max_size=100))
def test_a_text_whose_beginning_reads_otherwise_than_its_middle(ids: list[int]) -> None:
    made: Callable[[list[int]], str] = Stripping()
    stream = TextStream(made)
    assert "".join([*map(stream.push, ids), stream.finish()]) == made(ids)


@pytest.mark.slow
@pytest.mark.parametrize("text", [*TEXTS, "né 😀 汉字 " * 20])
def test_with_the_tokenizer_of_the_default_model(text: str, real_tokenizer: Any) -> None:
    ids = real_tokenizer(text)["input_ids"]
    for end in range(len(ids) + 1):
        state = TextState(decoder(real_tokenizer, True), SamplingParams())
        joined = "".join([*map(state.push, ids[:end]), state.finish()])
        assert joined == real_tokenizer.decode(ids[:end], skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.mark.slow
@settings(max_examples=200)
@given(st.lists(st.integers(0, 49_151), max_size=60), st.lists(st.text(min_size=1, max_size=3), max_size=3))
def test_any_tokens_and_stop_strings_with_the_tokenizer_of_the_default_model(
    real_tokenizer: Any, ids: list[int], stops: list[str]
) -> None:
    whole = real_tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    state = TextState(decoder(real_tokenizer, True), SamplingParams(stop=tuple(stops)))
    joined = "".join([*map(state.push, ids), state.finish()])
    assert (joined, state.stop_reason) == cut(whole, stops)


@pytest.mark.slow
@pytest.mark.parametrize(("stops", "shown", "reason"), STOPS)
def test_stop_strings_with_the_tokenizer_of_the_default_model(
    stops: list[str], shown: str, reason: str | None, real_tokenizer: Any
) -> None:
    state = TextState(decoder(real_tokenizer, True), SamplingParams(stop=tuple(stops)))
    ids = real_tokenizer("A B C D E")["input_ids"]
    assert len(ids) == 5
    assert "".join([*map(state.push, ids), state.finish()]) == shown
    assert state.stop_reason == reason
