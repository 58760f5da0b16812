"""Sampling keeps to its rules, by rows that know nothing of each other."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpager.engine import sampler as module
from kvpager.engine.params import SamplingParams
from kvpager.engine.sampler import Sampled, Sampler, SampleState, token_logprobs
from kvpager.errors import SampleError

V = 1000
END = 2
UNIFORM = [0.0, 0.1, 0.37, 0.9, 0.999, 1 - 2**-53]


def state(prompt: Sequence[int] = (), output: Sequence[int] = (), choice: int = 0, **params: Any) -> SampleState:
    made = SampleState(
        SamplingParams(**{"seed": 7, "max_tokens": None, **params}), seed=0, choice=choice, prompt=prompt
    )
    for token in output:
        made.accept(token)
    return made


def one(logits: torch.Tensor, chosen: SampleState) -> Sampled:
    result = Sampler(logits.shape[-1], frozenset([END])).sample(logits[None], [chosen])[0]
    assert isinstance(result, Sampled)
    return result


def drawn(logits: torch.Tensor, count: int, **params: Any) -> list[int]:
    """Tokens of so many first positions of a request, each from the same logits."""
    chosen = state(**params)
    tokens = []
    for _ in range(count):
        tokens.append(one(logits, chosen).token)
        chosen.accept(tokens[-1])
    return tokens


def random_logits(rows: int, vocabulary: int = V, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocabulary, generator=generator) * spread


def reference(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Probabilities after temperature, top-k, top-p and min-p by sorting everything, float64."""
    scaled = (logits.astype(np.float32) - logits.max().astype(np.float32)) / np.float32(params.temperature)
    weights = np.exp(scaled.astype(np.float64))
    order = np.argsort(-scaled, kind="stable")
    kept = weights[order]
    if params.top_k:
        kept[params.top_k :] = 0
    kept /= kept.sum()
    if params.top_p < 1:  # sums of nearly all round to 1
        kept[np.cumsum(kept) - kept >= params.top_p] = 0
    kept[kept < params.min_p * kept[0]] = 0
    result = np.zeros_like(weights)
    result[order] = kept / kept.sum()
    return result


def test_temperature_zero_takes_the_likeliest_and_of_equals_the_first() -> None:
    logits = torch.tensor([0.1, 3.0, 2.9, 3.0])
    assert one(logits, state(temperature=0)).token == 1
    assert one(logits.bfloat16(), state(temperature=1e-6)).token == 1


@settings(max_examples=150)
@given(
    seed=st.integers(0, 10**6),
    few=st.sampled_from([0, 2048]),
    spread=st.sampled_from([0.01, 1.0, 3.0, 30.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    temperature=st.sampled_from([0.01, 0.3, 1.0, 2.5, 100.0]),
    top_k=st.sampled_from([0, 1, 5, 50, 999, 5000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 1e-6]),
    min_p=st.sampled_from([0.0, 1e-9, 0.01, 0.5, 1.0]),
)
def test_draws_are_from_exactly_what_a_full_sort_keeps(
    seed: int, few: int, spread: float, dtype: torch.dtype, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = random_logits(1, seed=seed, spread=spread)[0].to(dtype).float().numpy()
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = reference(logits, params)
    scaled = (logits - logits.max()) / np.float32(temperature)
    weights = np.exp(scaled)
    with patch.object(module, "FEW", few):  # with and without a sort of all candidates
        kept = module._kept(scaled, weights, params)
        tokens = [module.draw(logits, float(logits.max()), params, uniform) for uniform in UNIFORM]
    left = np.zeros(V, bool)
    left[slice(None) if kept is None else kept] = True
    np.testing.assert_array_equal(left & (weights > 0), (expected > 0) & (weights > 0))
    assert (expected[tokens] > 0).all()
    assert tokens == sorted(tokens)


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.85}, {"top_k": 3}, {"min_p": 0.3}, {"temperature": 0.5}])
def test_draws_follow_the_probabilities(settings: dict[str, Any]) -> None:
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
    counts = Counter(drawn(logits, 4000, **settings))
    expected = reference(logits.numpy(), SamplingParams(**settings))
    for token in range(4):
        assert counts[token] / 4000 == pytest.approx(expected[token], abs=0.03)


def test_every_uniform_number_gives_the_token_at_its_place() -> None:
    logits = random_logits(1, vocabulary=700, seed=3)[0]
    cumulated = np.cumsum(reference(logits.numpy(), SamplingParams()))
    for uniform in np.linspace(0, 1, 500, endpoint=False):
        token = module.draw(logits.numpy(), float(logits.max()), SamplingParams(), float(uniform))
        assert cumulated[token] >= uniform - 1e-6
        assert token == 0 or cumulated[token - 1] <= uniform + 1e-6


def test_what_has_no_probability_is_never_drawn() -> None:
    logits = np.full(600, -np.inf, np.float32)
    logits[[100, 300]] = 0.0
    for uniform in [0.0, 0.25, 0.5, 0.75, 1 - 2**-53]:
        assert module.draw(logits, 0.0, SamplingParams(), uniform) == (100 if uniform < 0.5 else 300)


MIXED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.9},
    {"top_k": 20, "logprobs": 3},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    {"logit_bias": {5: 50.0}, "min_p": 0.1},
    {"min_tokens": 100, "stop_token_ids": (4,), "temperature": 0, "logprobs": 0},
    {},
]


def test_a_row_gives_the_same_whatever_else_is_in_the_batch() -> None:
    logits = random_logits(len(MIXED), vocabulary=5003, seed=5).bfloat16()
    kept = logits.clone()
    sampler = Sampler(5003, frozenset([END]))

    def states() -> list[SampleState]:
        return [state([1, 2, 3], [3, 4, 4], **params) for params in MIXED]

    together = sampler.sample(logits, states())
    backwards = sampler.sample(logits.flip(0), states()[::-1])[::-1]
    alone = [sampler.sample(row[None], [chosen])[0] for row, chosen in zip(logits, states(), strict=True)]
    assert together == backwards == alone
    assert torch.equal(logits, kept)


def test_sampling_twice_gives_the_same_until_the_token_is_accepted() -> None:
    logits, chosen = random_logits(1)[0], state()
    assert len({one(logits, chosen).token for _ in range(3)}) == 1
    assert len(set(drawn(logits, 50))) > 1


def test_draws_depend_on_seed_choice_and_position() -> None:
    logits = torch.zeros(V)
    assert drawn(logits, 30) == drawn(logits, 30)
    assert drawn(logits, 30, seed=8) != drawn(logits, 30)
    assert drawn(logits, 30, choice=1) != drawn(logits, 30)
    assert drawn(logits, 30, seed=-1) == drawn(logits, 30, seed=2**64 - 1)
    late = state(output=range(29))
    assert one(logits, late).token == drawn(logits, 30)[-1]


def test_the_owners_seed_serves_where_the_request_has_none() -> None:
    params = SamplingParams()
    numbers = [SampleState(params, seed=seed).uniform() for seed in (1, 1, 2)]
    assert numbers[0] == numbers[1] != numbers[2]
    assert (
        SampleState(SamplingParams(seed=5), seed=1).uniform() == SampleState(SamplingParams(seed=5), seed=2).uniform()
    )


def test_random_numbers_are_even() -> None:
    chosen = state()
    numbers = []
    for _ in range(4000):
        numbers.append(chosen.uniform())
        chosen.accept(0)
    counts, _ = np.histogram(numbers, bins=10, range=(0, 1))
    assert counts.min() > 330
    assert counts.max() < 470


def test_bias_is_added() -> None:
    logits = torch.zeros(10)
    assert one(logits, state(temperature=0, logit_bias={7: 0.5})).token == 7
    assert one(logits, state(temperature=0, logit_bias={0: -100.0})).token == 1


def test_the_repetition_penalty_divides_above_zero_and_multiplies_below() -> None:
    row = np.array([2.0, -2.0, 2.0, -2.0, 2.0, 0.0], np.float32)
    state([0, 1], [1, 2, 2], repetition_penalty=2.0).adjust(row, module.NONE)
    np.testing.assert_array_equal(row, [1.0, -4.0, 1.0, -2.0, 2.0, 0.0])


def test_presence_and_frequency_penalties_look_at_the_answer_alone() -> None:
    row = np.zeros(5, np.float32)
    state([0, 1], [1, 2, 2, 2], presence_penalty=0.5, frequency_penalty=0.25).adjust(row, module.NONE)
    np.testing.assert_array_equal(row, [0.0, -0.75, -1.25, 0.0, 0.0])


def test_bias_comes_before_the_penalties() -> None:
    row = np.zeros(2, np.float32)
    state([0], repetition_penalty=2.0, logit_bias={0: 8.0}).adjust(row, module.NONE)
    np.testing.assert_array_equal(row, [4.0, 0.0])


@settings(max_examples=30)
@given(st.lists(st.integers(0, 60), max_size=100), st.lists(st.integers(0, 60), max_size=100))
def test_penalties_as_counted_from_scratch(prompt: list[int], output: list[int]) -> None:
    row = random_logits(1, vocabulary=61, seed=len(output))[0].numpy()
    expected = row.copy()
    for token in set(prompt) | set(output):
        expected[token] = (
            expected[token] / np.float32(1.2) if expected[token] > 0 else expected[token] * np.float32(1.2)
        )
    for token, count in Counter(output).items():
        expected[token] -= 0.3 * count + 0.7
    state(prompt, output, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.7).adjust(row, module.NONE)
    np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-5)


def test_min_tokens_rules_out_what_would_end_the_answer() -> None:
    logits = torch.zeros(10)
    logits[END], logits[5] = 9.0, 8.0
    settings = {"temperature": 0, "min_tokens": 2, "stop_token_ids": (5,)}
    assert one(logits, state(output=[1], **settings)).token == 0
    assert one(logits, state(output=[1, 1], **settings)).token == END


class OnlyTheEnd:
    finished = False

    def allowed(self) -> np.ndarray:
        return np.arange(10) == END

    def accept(self, token: int) -> None:
        assert token == END


def test_a_complete_grammar_ends_before_min_tokens() -> None:
    chosen = SampleState(SamplingParams(min_tokens=5), seed=0, guide=OnlyTheEnd())
    assert one(torch.zeros(12), chosen).token == END


def test_log_probabilities_are_the_models_own() -> None:
    logits = random_logits(1, vocabulary=5000)[0]
    expected = torch.log_softmax(logits.double(), dim=0)
    result = one(logits, state(output=[3], temperature=0.1, logit_bias={9: 100.0}, logprobs=4))
    assert result.token == 9
    assert result.logprob == pytest.approx(float(expected[9]), abs=1e-5)
    assert [token for token, _ in result.top] == expected.topk(4).indices.tolist()
    assert [value for _, value in result.top] == pytest.approx(expected.topk(4).values.tolist(), abs=1e-5)
    assert one(logits, state()).logprob is None
    assert one(logits, state(logprobs=0)).top == ()
    assert one(logits, state()).top == ()


@pytest.mark.parametrize("spread", [1e-4, 1.0, 1000.0])
@pytest.mark.parametrize("count", [1, 20, 100])
def test_the_likeliest_are_as_of_a_full_sort(spread: float, count: int) -> None:
    row = random_logits(1, spread=spread)[0].bfloat16().float().numpy()
    expected = np.argsort(-row, kind="stable")[:count]
    np.testing.assert_array_equal(module.leading(row, float(row.max()), count), expected)


def test_log_probabilities_of_a_prompt() -> None:
    logits = random_logits(4, seed=9).bfloat16()
    logits[2, 5] = math.nan
    found = token_logprobs(logits, [1, 2, 3, 4], top=2)
    expected = torch.log_softmax(logits.double(), dim=1)
    for position in (0, 1, 3):
        result = found[position]
        assert isinstance(result, Sampled)
        assert result.logprob == pytest.approx(float(expected[position, position + 1]), abs=1e-5)
        assert [token for token, _ in result.top] == expected[position].argsort(descending=True)[:2].tolist()
    assert isinstance(found[2], SampleError)


@pytest.mark.parametrize("settings", MIXED)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_with_broken_logits_fails_alone(settings: dict[str, Any], value: float, dtype: torch.dtype) -> None:
    logits = random_logits(3).to(dtype)
    clean = Sampler(V, frozenset([END])).sample(logits, [state(**settings) for _ in range(3)])
    logits[1, 17] = value
    results = Sampler(V, frozenset([END])).sample(logits, [state(**settings) for _ in range(3)])
    assert isinstance(results[1], SampleError)
    assert "1 of 1000 are NaN or infinite, the first that of token 17" in str(results[1])
    assert [results[0], results[2]] == [clean[0], clean[2]]


def test_a_row_in_which_nothing_is_left_fails_alone() -> None:
    logits = torch.full((2, 4), -math.inf)
    logits[:, END] = 1.0
    results = Sampler(4, frozenset([END])).sample(logits, [state(min_tokens=1), state()])
    assert isinstance(results[0], SampleError)
    assert "all 4 tokens are ruled out after" in str(results[0])
    assert results[1] == Sampled(END)
    nothing = Sampler(4, frozenset([END])).sample(torch.full((1, 4), -math.inf), [state(temperature=0)])
    assert "all 4 tokens are ruled out" in str(nothing[0])


def test_huge_logits_stay_finite() -> None:
    logits = torch.tensor([3e38, -3e38, 3e38, 0.0])
    for params in ({}, {"top_p": 0.5}, {"temperature": 1e-5}, {"temperature": 100.0, "logprobs": 2}):
        assert one(logits, state(**params)).token in (0, 2)


@pytest.mark.parametrize(
    "edge",
    [
        {"temperature": 0.00001},
        {"temperature": 100},
        {"repetition_penalty": 0.01},
        {"repetition_penalty": 100},
        {"presence_penalty": -2, "frequency_penalty": -2, "repetition_penalty": 0.01, "temperature": 0.00001},
        {"logit_bias": {0: 100, 1: -100}, "temperature": 0.00001},
        {"top_p": 5e-324},
        {"min_p": 1.0},
    ],
)
def test_every_setting_that_is_taken_gives_a_token(edge: dict[str, Any]) -> None:
    chosen = state([0, 1], [1] * 50, **{"temperature": 0.7, **edge})
    assert 0 <= one(torch.tensor([80.0, -60.0, 3.0, 0.0, -1e4]), chosen).token < 5
