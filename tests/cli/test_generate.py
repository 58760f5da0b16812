"""``kvpager generate`` with a tiny model: prompts, streaming, JSON, refusals; and with the default model (slow)."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvpager.cli.main import main
from tests.small_llm import CONTEXT, save_folder

FIGURES = {
    "text",
    "token_ids",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "prefill_tokens_per_s",
    "decode_tokens_per_s",
    "pool_bytes",
    "digest_bytes",
    "table_bytes",
    "resident_bytes",
    "swap_bytes",
    "peak_rss_bytes",
    "full_kv_bytes",
    "recalls",
    "evictions",
    "mass_coverage",
    "model",
    "settings",
}
PROMPT = "the cat sat on the mat, and then " * 12


class Stdin(io.TextIOWrapper):
    """Standard input with given bytes; it may say that it is a terminal."""

    def __init__(self, data: bytes, terminal: bool = False) -> None:
        super().__init__(io.BytesIO(data))
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


def figures(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> dict[str, Any]:
    assert main(["generate", "--json", *arguments]) == 0
    out, _ = capsys.readouterr()
    result: dict[str, Any] = json.loads(out)
    return result


def oracle(model: str, prompt: str, count: int) -> list[int]:
    """Greedy ids of the same model with transformers' own cache and loop."""
    plain = AutoModelForCausalLM.from_pretrained(model, attn_implementation="sdpa")
    ids = AutoTokenizer.from_pretrained(model)(prompt, return_tensors="pt")["input_ids"]
    written = plain.generate(ids, max_new_tokens=count, do_sample=False)[0, ids.shape[1] :].tolist()
    return [token for token in written if token != plain.generation_config.eos_token_id]


@pytest.mark.promise(2)
def test_text_equals_transformers_own_and_json_has_all_figures(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    got = figures(capsys, [PROMPT, "--raw", "--model", model, "--max-tokens", "20"])
    assert set(got) >= FIGURES
    assert got["token_ids"] == oracle(model, PROMPT, 20)
    assert got["completion_tokens"] == len(got["token_ids"])
    assert got["text"] == AutoTokenizer.from_pretrained(model).decode(got["token_ids"], skip_special_tokens=True)
    assert got["finish_reason"] in ("stop", "length")
    assert got["mass_coverage"] == 1.0
    assert got["resident_bytes"] == got["pool_bytes"] + got["digest_bytes"] + got["table_bytes"]
    assert got["settings"]["pool"] is None


@pytest.mark.promise(1)
def test_the_pool_changes_recalls_and_not_the_text(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    common = [PROMPT, "--raw", "--model", model, "--max-tokens", "12"]
    roomy = figures(capsys, common)
    tight = figures(capsys, [*common, "--pool", "72"])
    assert tight["token_ids"] == roomy["token_ids"]
    assert tight["recalls"] > 0 == roomy["recalls"]
    assert tight["pool_bytes"] < roomy["pool_bytes"]


@pytest.mark.promise(7)
def test_memory_bounds_what_is_resident(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    got = figures(
        capsys, [PROMPT, "--raw", "--model", model, "--max-tokens", "8", "--memory", "300KiB", "--budget", "128"]
    )
    assert got["resident_bytes"] <= 300 * 1024
    assert got["digest_bytes"] > 0
    assert 0 < got["mass_coverage"] <= 1


def test_streamed_text_is_the_json_text(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["é 😀 汉字", "--model", model, "--max-tokens", "30", "--temperature", "1.5", "--seed", "5"]
    whole = figures(capsys, common)["text"]
    assert main(["generate", *common]) == 0
    out, err = capsys.readouterr()
    assert out == whole + "\n"
    assert "KV in memory" in err


def test_the_chat_template_is_used_unless_raw(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["hello", "--model", model, "--max-tokens", "1"]
    tokenizer = AutoTokenizer.from_pretrained(model)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert figures(capsys, common)["prompt_tokens"] == len(chat)
    assert chat.count(tokenizer.bos_token_id) == 1
    assert figures(capsys, [*common, "--raw"])["prompt_tokens"] == len("hello")


def test_a_model_without_a_template_asks_for_raw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(save_folder(tmp_path / "plain", chat_template=None))
    assert main(["generate", "hi", "--model", folder]) == 2
    assert "no chat template; use --raw" in capsys.readouterr().err


def test_prompts_come_from_files_and_standard_input(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ["--raw", "--model", model, "--max-tokens", "2"]
    path = tmp_path / "prompt.txt"
    path.write_text("naïve", encoding="utf-8")
    assert figures(capsys, ["--prompt-file", str(path), *common])["prompt_tokens"] == 6
    for arguments in ([], ["--prompt-file", "-"]):
        for ending in ("", "\n", "\r\n"):  # a last newline is not part of the prompt; a second one is
            monkeypatch.setattr(sys, "stdin", Stdin(f"naïve{ending}".encode()))
            assert figures(capsys, [*arguments, *common])["prompt_tokens"] == 6
        monkeypatch.setattr(sys, "stdin", Stdin("naïve\n\n".encode()))
        assert figures(capsys, [*arguments, *common])["prompt_tokens"] == 7


def test_a_terminal_is_told_what_is_waited_for(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin(b"hi", terminal=True))
    assert main(["generate", "--raw", "--model", model, "--max-tokens", "1"]) == 0
    assert "Type the prompt, then press Ctrl-D" in capsys.readouterr().err


@pytest.mark.promise(6)
@pytest.mark.parametrize(
    ("arguments", "data", "said"),
    [
        ([""], b"", "prompt is empty"),
        (["  \n "], b"", "prompt is empty"),
        ([], b"", "standard input is empty"),
        ([], b"\xff\xfe", "standard input is not UTF-8 text (byte 0)"),
        (["hi", "--prompt-file", "x"], b"", "either a prompt or --prompt-file"),
        (["--prompt-file", "/no/such/file"], b"", "/no/such/file can't be read: No such file"),
        (["--prompt-file", "/"], b"", "/ can't be read"),
    ],
)
def test_prompts_that_cannot_be_used_are_refused_before_loading(
    arguments: list[str],
    data: bytes,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin(data))
    assert main(["generate", "--model", "/no/model", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.promise(6)
@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 3 * CONTEXT])
def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(
    length: int, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "x" * length, "--raw", "--model", model]) == 2
    err = capsys.readouterr().err
    assert f"its {length} tokens" in err
    assert f"is {CONTEXT} tokens" in err


def test_an_answer_ends_where_the_context_does(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x" * (CONTEXT - 3), "--raw", "--json", "--model", model, "--max-tokens", "50"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["completion_tokens"] <= 3
    assert "note: writing at most 3 tokens" in err


def test_a_pool_below_the_minimum_is_bad_usage_with_the_number_needed(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (["--pool", "1%"], ["--memory", "20KiB"]):
        assert main(["generate", PROMPT, "--raw", "--model", model, *arguments]) == 2
        assert "need at least 24 (" in capsys.readouterr().err


def test_sampling_repeats_with_its_seed(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["hi", "--raw", "--model", model, "--max-tokens", "16", "--temperature", "1"]
    first, again, other = (figures(capsys, [*common, "--seed", seed])["token_ids"] for seed in ("1", "1", "2"))
    assert first == again != other


def test_swap_leaves_nothing_behind(
    model: str, capsys: pytest.CaptureFixture[str], own_cache_directory: Path, tmp_path: Path
) -> None:
    common = [PROMPT, "--raw", "--model", model, "--max-tokens", "2", "--pool", "72"]
    figures(capsys, common)
    assert list((own_cache_directory / "kvpager" / "swap").iterdir()) == []
    figures(capsys, [*common, "--swap", str(tmp_path / "pages.swap")])
    assert not (tmp_path / "pages.swap").exists()
    (tmp_path / "taken").write_text("mine")
    assert main(["generate", *common, "--swap", str(tmp_path / "taken")]) == 1
    assert "taken exists already" in capsys.readouterr().err
    assert (tmp_path / "taken").read_text() == "mine"


def test_discard_runs_within_its_budget(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    got = figures(
        capsys, [PROMPT, "--raw", "--model", model, "--max-tokens", "4", "--mode", "discard", "--budget", "128"]
    )
    assert got["discards"] > 0 == got["recalls"]


def test_threads_reach_pytorch(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_num_threads()
    try:
        figures(capsys, ["hi", "--raw", "--model", model, "--max-tokens", "1", "--threads", "1"])
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_the_default_model_answers_a_question(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    got = figures(capsys, ["What is the capital of France?", "--max-tokens", "20", "--pool", "300"])
    assert "Paris" in got["text"]
    assert got["finish_reason"] == "stop"
    assert got["full_kv_bytes"] >= 23040 * got["prompt_tokens"]
