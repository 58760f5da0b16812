"""What was computed before vLLM was started again is found, and answers are those of vLLM alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.vllm.live.conftest import prompt
from tests.vllm.live.engines import BLOCK, Engine, engine, settings

pytestmark = pytest.mark.slow
LENGTH, TOKENS = 700, 40
WHOLE = (LENGTH - 1) // BLOCK


def tokens(answers: list[dict[str, list[int]]]) -> list[list[int]]:
    return [answer["tokens"] for answer in answers]


def test_a_restart_finds_all_whole_blocks_and_changes_no_bit(
    model: Path, alone: Engine, store: Path, tmp_path: Path
) -> None:
    ask = {"prompts": [prompt(1, LENGTH)], "tokens": TOKENS}
    cold_alone, again_alone = alone.generate(**ask), alone.generate(**ask)
    with engine(tmp_path, settings(model, store)) as first:
        cold, again = first.generate(**ask), first.generate(**ask)
        counts = first.metrics()
    assert (cold[0]["tokens"], again) == (cold_alone[0]["tokens"], again_alone)
    saved = (LENGTH + TOKENS - 1) // BLOCK  # the last token is never computed
    assert counts["vllm:kvpager_saved_blocks"] == saved
    with engine(tmp_path, settings(model, store)) as second:
        restarted = second.generate(**ask)
        counts = second.metrics()
    assert restarted == again_alone, "what was loaded has the bits of what vLLM's own cache has"
    assert restarted[0]["cached"] == WHOLE * BLOCK
    assert counts["vllm:kvpager_loaded_blocks"] == WHOLE
    assert counts["vllm:kvpager_saved_blocks"] == 0
    assert counts["vllm:kvpager_lost_blocks"] == 0
    assert counts["vllm:external_prefix_cache_hits"] == WHOLE * BLOCK


def test_partial_hits_salts_and_a_prompt_of_whole_blocks(
    model: Path, alone: Engine, store: Path, tmp_path: Path
) -> None:
    long, other = prompt(2, LENGTH), prompt(3, LENGTH)
    branch, whole = long[:300] + other[:400], long[: 20 * BLOCK]
    with engine(tmp_path, settings(model, store)) as first:
        first.generate(prompts=[long], tokens=TOKENS)
    with engine(tmp_path, settings(model, store)) as second:
        # vLLM itself has the first 100 tokens when the branch comes, and the store 200 more
        second.generate(prompts=[long[:100]], tokens=1)
        before = second.metrics()["vllm:kvpager_loaded_blocks"]
        branched = second.generate(prompts=[branch], tokens=TOKENS)
        assert branched[0]["cached"] == 300 // BLOCK * BLOCK
        assert second.metrics()["vllm:kvpager_loaded_blocks"] - before == 300 // BLOCK - 3
        # the last block is computed, since a token has to be
        full = second.generate(prompts=[whole], tokens=TOKENS)
        assert full[0]["cached"] == 19 * BLOCK
        salted = second.generate(prompts=[long], tokens=TOKENS, salt="another tenant")
        assert salted[0]["cached"] == 0
        assert second.leaked() == 0
    assert tokens(branched) == tokens(alone.generate(prompts=[branch], tokens=TOKENS))
    assert tokens(full) == tokens(alone.generate(prompts=[whole], tokens=TOKENS))
    assert tokens(salted) == tokens(alone.generate(prompts=[long], tokens=TOKENS))


def test_sixteen_at_once_each_get_their_own(model: Path, alone: Engine, store: Path, tmp_path: Path) -> None:
    shared = prompt(4, 200)
    prompts = [shared + prompt(100 + marker, 150 + 10 * marker) for marker in range(16)]
    expected = tokens(alone.generate(prompts=prompts, tokens=TOKENS))
    assert len({tuple(answer) for answer in expected}) == 16
    with engine(tmp_path, settings(model, store)) as first:
        assert tokens(first.generate(prompts=prompts, tokens=TOKENS)) == expected
    with engine(tmp_path, settings(model, store)) as second:
        answers = second.generate(prompts=prompts, tokens=TOKENS)
        assert tokens(answers) == expected
        assert [answer["cached"] for answer in answers] == [(len(one) - 1) // BLOCK * BLOCK for one in prompts]
        assert second.metrics()["vllm:kvpager_lost_blocks"] == 0
        assert second.leaked() == 0
