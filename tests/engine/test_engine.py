"""The engine's answers are each request's own, whatever runs beside it."""

from __future__ import annotations

import pytest

from tests.engine import rig

LENGTHS = (1, 3, 17, 40, 64, 130)


@pytest.mark.parametrize("name", ["llama", "llama-mqa", "llama-h24", "qwen3-sliding", "gemma2"])
def test_a_batch_of_mixed_requests_equals_each_alone(name: str) -> None:
    prompts = [rig.prompt(length, seed=length) for length in LENGTHS]
    with rig.engine(name) as engine:
        for index, prompt in enumerate(prompts):
            engine.add(str(index), prompt, rig.greedy(20))
        answers = rig.run(engine)
    for index, prompt in enumerate(prompts):
        assert answers[str(index)] == rig.oracle(prompt, 20, name)
        assert answers.reason(str(index)) == "length"
