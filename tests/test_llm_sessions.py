"""What an LLM computes outlives it in a store, and sessions go on in another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvpager import LLM, SamplingParams
from kvpager.errors import ConfigError, InputError, SessionBusy
from tests.small_llm import save_folder

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPT = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_folder(tmp_path_factory.mktemp("model")))


def make(model: str, store: Path, **more: Any) -> LLM:
    return LLM(model, pool="1MiB", swap="memory", threads=1, store=str(store / "kv" / "store.db"), **more)


def cached(results: list[Any]) -> list[int]:
    return [result.usage.cached_tokens for result in results]


@pytest.mark.parametrize("budget", [None, 64])
def test_a_conversation_goes_on_in_another_llm_as_in_the_same(model: str, tmp_path: Path, budget: int | None) -> None:
    said = [PROMPT, " And then?", " And why?" * 10]
    drawn = SamplingParams(max_tokens=20, logprobs=1, ignore_eos=True)

    def talk(folder: Path, restarts: bool) -> list[Any]:
        told, ids = [], []
        llm = make(model, folder, budget=budget)
        for words in said:
            held = max(len(ids) - 1, 0)  # all but the last token of an answer, which was drawn and not read
            ids += llm.get_tokenizer()(words)["input_ids"]
            (result,) = llm.generate([ids], drawn, sessions=["talk"])
            assert result.usage is not None
            assert result.usage.cached_tokens == held
            ids += result.outputs[0].token_ids
            told.append((result.outputs[0].token_ids, result.outputs[0].logprobs))
            if restarts:
                llm.close()
                llm = make(model, folder, budget=budget)
        llm.close()
        return told

    assert talk(tmp_path / "a", restarts=True) == talk(tmp_path / "b", restarts=False)


def test_prompts_are_found_by_another_llm(model: str, tmp_path: Path) -> None:
    with make(model, tmp_path) as llm:
        first = llm.generate([PROMPT], GREEDY)
        assert cached(first) == [0]
    with make(model, tmp_path) as llm:
        again = llm.generate([PROMPT], GREEDY)
        assert cached(again) == [96]
        assert again[0].outputs[0].token_ids == first[0].outputs[0].token_ids
        stats = llm.stats()
        assert stats.store is not None
        assert stats.store.state == "ok"


def test_an_answer_that_was_left_is_written_on(model: str, tmp_path: Path) -> None:
    whole = SamplingParams(max_tokens=60, seed=3, ignore_eos=True)
    with make(model, tmp_path) as llm:
        (alone,) = llm.generate([PROMPT], whole)
        stream = llm.stream(PROMPT, whole, session="talk")
        said = [next(stream).token_ids for _ in range(9)]
        stream.close()
    with make(model, tmp_path) as llm:
        outputs = list(llm.stream(PROMPT, whole, session="talk"))
    assert outputs[0].token_ids == tuple(token for tokens in said for token in tokens)
    assert tuple(token for output in outputs for token in output.token_ids) == alone.outputs[0].token_ids


def test_conversations_go_on_side_by_side(model: str, tmp_path: Path) -> None:
    talks = [[{"role": "user", "content": f"{name}: {PROMPT}"}] for name in "ab"]
    with make(model, tmp_path) as llm:
        llm.chat(talks, GREEDY, sessions=["a", "b"])
        for talk in talks:
            talk.append({"role": "user", "content": "go on"})
        assert min(cached(llm.chat(talks, GREEDY, sessions=["a", None]))) >= 64


def test_sessions_that_cannot_be_are_refused_before_anything_runs(model: str, tmp_path: Path) -> None:
    with make(model, tmp_path) as llm:
        with pytest.raises(SessionBusy, match=r"prompts\[1\]: session"):
            llm.generate(["a", "b"], GREEDY, sessions=["talk", "talk"])
        with pytest.raises(InputError, match="sessions: there are 1 for 2 prompts"):
            llm.generate(["a", "b"], GREEDY, sessions=["talk"])
        with pytest.raises(InputError, match="sessions: expected a list"):
            llm.generate(["a"], GREEDY, sessions="talk")
        with pytest.raises(InputError, match="session: a name has"):
            llm.generate(["a"], GREEDY, sessions=[""])
        assert llm.stats().sessions.held == 0
        assert llm.stats().steps == 0
    with LLM(model, pool="1MiB", swap="memory", threads=1) as llm, pytest.raises(InputError, match="there is no store"):
        llm.generate(["a"], GREEDY, sessions=["talk"])


def test_a_store_that_cannot_be_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    for more in ({"store": str(tmp_path)}, {"store": "x", "store_limit": "1KiB"}):
        with pytest.raises(ConfigError, match="store"):
            LLM("nowhere", **more)
    with pytest.raises(ConfigError, match="store"):
        LLM("nowhere", store="x", mode="discard", budget=64)
