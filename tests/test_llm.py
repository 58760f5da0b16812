"""``LLM``: answers are the engine's, in order and whole; bad input is refused before anything runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpager import LLM, SamplingParams
from kvpager.engine.engine import Engine
from kvpager.errors import ConfigError, EngineStopped, InputError, RequestTooLarge, StepError
from kvpager.models import LoadedModel
from tests.small_llm import CONTEXT, save_folder

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPTS = ["one", "two words", "and a third prompt that is longer than a page of sixteen tokens"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def shared(model: str) -> Iterator[LLM]:
    with LLM(model, pool="1MiB", swap="memory", threads=1) as llm:
        yield llm


def make(model: str, **more: Any) -> LLM:
    return LLM(model, **{"pool": "1MiB", "swap": "memory", "threads": 1, **more})


def ids(results: list[Any]) -> list[tuple[int, ...]]:
    return [output.token_ids for result in results for output in result.outputs]


def test_every_prompt_is_answered_in_order(shared: LLM) -> None:
    results = shared.generate(PROMPTS, GREEDY)
    assert [result.prompt for result in results] == PROMPTS
    tokenizer = shared.get_tokenizer()
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert list(result.prompt_token_ids) == tokenizer(prompt)["input_ids"]
        (answer,) = result.outputs
        assert (answer.index, len(answer.token_ids), answer.finish_reason, answer.error) == (0, 12, "length", None)
        assert answer.text == tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(result.prompt_token_ids), 12)
    assert ids(results) == [ids(shared.generate(prompt, GREEDY))[0] for prompt in PROMPTS]


def test_ids_and_lists_of_ids_are_prompts_too(shared: LLM) -> None:
    tokens = shared.get_tokenizer()(PROMPTS[1])["input_ids"]
    (text,) = shared.generate(PROMPTS[1], GREEDY)
    (alone,) = shared.generate(tokens, GREEDY)
    (first, second) = shared.generate([tokens, PROMPTS[1]], GREEDY)
    assert alone.prompt is first.prompt is None
    assert second.prompt == PROMPTS[1]
    assert {one.outputs[0].token_ids for one in (text, alone, first, second)} == {text.outputs[0].token_ids}
    assert shared.generate([]) == []


def test_each_prompt_may_have_parameters_of_its_own(shared: LLM) -> None:
    params = [SamplingParams(max_tokens=count, temperature=0, ignore_eos=True) for count in (1, 5, 3)]
    assert [len(answer) for answer in ids(shared.generate(PROMPTS, params))] == [1, 5, 3]
    with pytest.raises(InputError, match="params: there are 2 for 3 prompts"):
        shared.generate(PROMPTS, params[:2])


def test_n_answers_with_logprobs_are_told_apart(shared: LLM) -> None:
    params = SamplingParams(max_tokens=6, n=3, seed=5, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    (result,) = shared.generate(PROMPTS[0], params)
    assert [answer.index for answer in result.outputs] == [0, 1, 2]
    assert len({answer.token_ids for answer in result.outputs}) > 1
    for answer in result.outputs:
        assert answer.logprobs is not None
        assert [one.token_id for one in answer.logprobs] == list(answer.token_ids)
        assert all(len(one.top) == 2 for one in answer.logprobs)
    assert result.prompt_logprobs is not None
    assert [one.token_id for one in result.prompt_logprobs] == list(result.prompt_token_ids[1:])
    assert result.usage is not None
    assert result.usage.completion_tokens == 18
    (plain,) = shared.generate(PROMPTS[0], GREEDY)
    assert plain.outputs[0].logprobs is plain.prompt_logprobs is None


@pytest.mark.promise(1)
def test_memory_changes_nothing_about_answers(shared: LLM, model: str) -> None:
    texts = [text * 6 for text in PROMPTS]
    expected = ids(shared.generate(texts, GREEDY))
    with make(model, pool="64") as small:
        assert ids(small.generate(texts, GREEDY)) == expected
        assert small.stats().pager.recalls > 0
    with make(model, pool=None, memory="160KiB", max_num_seqs=3) as bounded:
        assert ids(bounded.generate(texts, GREEDY)) == expected
        assert bounded.stats().pager.resident_bytes <= 160 * 1024


def test_a_shared_beginning_is_computed_once(model: str) -> None:
    with make(model) as llm:
        first, second = llm.generate(["the same beginning of many tokens: " + end for end in "ab"], GREEDY)
        assert second.usage is not None
        assert second.usage.cached_tokens >= 32
        assert first.usage is not None
        assert first.usage.cached_tokens == 0
    with make(model, enable_prefix_caching=False) as llm:
        results = llm.generate(["the same beginning of many tokens: " + end for end in "ab"], GREEDY)
        assert [result.usage.cached_tokens for result in results if result.usage] == [0, 0]


def test_chats_go_through_the_template(shared: LLM) -> None:
    talk = [{"role": "system", "content": "short"}, {"role": "user", "content": "hello"}]
    (result,) = shared.chat(talk, GREEDY)
    tokenizer = shared.get_tokenizer()
    expected = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert list(result.prompt_token_ids) == expected
    both = shared.chat([talk, talk[1:]], GREEDY)
    assert ids(both)[0] == ids([result])[0]
    assert len(both[1].prompt_token_ids) < len(expected)


@pytest.mark.promise(6)
@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        (["fine", ""], r"prompts\[1\]: prompt: it is empty"),
        (["fine", [1, 99999]], r"prompts\[1\]: prompt: token id 99999"),
        (["fine", [1.5]], r"prompts\[1\]: expected text"),
        (["fine", None], r"prompts\[1\]: expected text"),
        ([True], r"prompts\[0\]: expected text"),
        (["fine", "half \ud800"], r"prompts\[1\]: .* character 5 is half of one"),
        (7, "prompts: expected text"),
        (["fine", "long " * CONTEXT], rf"prompts\[1\]: .* {CONTEXT} for prompt and answer"),
    ],
)
def test_one_bad_prompt_is_named_and_nothing_runs(shared: LLM, prompts: Any, said: str) -> None:
    before = shared.stats()
    with pytest.raises(InputError, match=said):
        shared.generate(prompts, GREEDY)
    after = shared.stats()
    assert after.steps == before.steps
    assert (after.running, after.waiting) == (0, 0)
    assert ids(shared.generate("fine", GREEDY))


HALF = [{"role": "user", "content": "\ud800"}]


@pytest.mark.promise(6)
@pytest.mark.parametrize(
    "messages", [[], [[]], ["hello"], [{"role": "user"}], [{"role": "user", "content": 3}], 5, HALF]
)
def test_conversations_that_are_none_are_refused(shared: LLM, messages: Any) -> None:
    with pytest.raises(InputError, match="messages: "):
        shared.chat(messages, GREEDY)


def test_a_model_without_a_template_cant_chat(tmp_path: Path) -> None:
    with make(str(save_folder(tmp_path, chat_template=None))) as llm, pytest.raises(InputError, match="no chat templ"):
        llm.chat([{"role": "user", "content": "hello"}])


def test_a_stream_gives_the_same_answer_in_pieces(shared: LLM) -> None:
    (whole,) = shared.generate(PROMPTS[2], GREEDY)
    outputs = list(shared.stream(PROMPTS[2], GREEDY))
    assert len(outputs) > 1
    assert "".join(output.text for output in outputs) == whole.outputs[0].text
    assert tuple(token for output in outputs for token in output.token_ids) == whole.outputs[0].token_ids
    assert [output.finish_reason for output in outputs if output.finish_reason] == ["length"]


def test_leaving_a_stream_ends_the_request(shared: LLM) -> None:
    stream = shared.stream(PROMPTS[0], GREEDY)
    next(stream)
    with pytest.raises(StepError, match="still being streamed"):
        shared.generate(PROMPTS[0])
    stream.close()
    stats = shared.stats()
    assert (stats.running, stats.waiting, stats.pager.sequences) == (0, 0, 0)
    assert ids(shared.generate(PROMPTS[0], GREEDY))


def test_what_can_never_fit_is_told_with_its_size(shared: LLM) -> None:
    with pytest.raises(RequestTooLarge, match=str(CONTEXT)):
        shared.generate("x", SamplingParams(max_tokens=CONTEXT))


def test_closed_is_closed(model: str) -> None:
    llm = make(model)
    with llm:
        pass
    llm.close()
    for use in (lambda: llm.generate("x"), llm.stats, lambda: list(llm.stream("x"))):
        with pytest.raises(EngineStopped, match="closed"):
            use()


@pytest.mark.promise(6)
@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"pool": None, "memory": "1KiB"}, "memory"),
        ({"budget": 3}, "budget"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_model_len": 10**6}, "max_model_len"),
        ({"memory": "1MiB"}, "either --memory or --pool"),
    ],
)
def test_settings_that_cant_be_are_refused(model: str, more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make(model, **more)


class Scripted:
    """Stands for an engine: its `step` does what a test says."""

    def __init__(self, step: Any) -> None:
        self.step, self.added, self.aborted, self.closed = step, [], [], 0

    def add(self, request_id: str, prompt: Any, params: Any, *, session: Any) -> None:
        self.added.append(request_id)

    def abort(self, request_id: str) -> bool:
        self.aborted.append(request_id)
        return True

    @property
    def has_work(self) -> bool:
        return bool(self.added) and not self.aborted

    def close(self) -> None:
        self.closed += 1


def scripted(shared: LLM, error: BaseException) -> tuple[LLM, Scripted]:
    def step() -> Any:
        raise error

    engine = Scripted(step)
    loaded: LoadedModel = shared._loaded
    stand_in: Any = engine
    own: Engine = stand_in
    return LLM.over(loaded, own), engine


def test_ctrl_c_closes(shared: LLM) -> None:
    llm, engine = scripted(shared, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS)
    assert engine.closed == 1
    with pytest.raises(EngineStopped):
        llm.generate(PROMPTS)


def test_a_step_that_fails_ends_all_requests_and_the_llm_stays(shared: LLM) -> None:
    llm, engine = scripted(shared, MemoryError())
    with pytest.raises(MemoryError):
        llm.generate(PROMPTS)
    assert engine.aborted == engine.added
    assert engine.closed == 0


def test_the_library_loads_nothing_heavy_until_it_must() -> None:
    code = (
        "import sys, kvpager\nassert 'kvpager.engine.params' not in sys.modules\n"
        "from kvpager import LLM, SamplingParams, Pager\nSamplingParams(max_tokens=3)\n"
        "heavy = {'torch', 'transformers', 'rich', 'httpx'} & set(sys.modules)\nassert not heavy, heavy\n"
        "assert 'LLM' in kvpager.__all__\n"
        "try:\n    kvpager.nothing\nexcept AttributeError as error:\n    assert 'nothing' in str(error)\n"
        "else:\n    raise AssertionError"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
