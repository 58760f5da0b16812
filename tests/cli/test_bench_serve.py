"""``kvpager bench serve`` against a small server on the loopback: what it asks for, what it reports, how it fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvpager.cli.main import main
from kvpager.evaluation.text import bundled_text
from tests.bench.fake_server import KEY, MODEL, FakeServer, serving, word_ids

SMALL = ["--num-prompts", "4", "--input-len", "30", "--output-len", "5"]


@pytest.fixture
def servers() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(autouse=True)
def no_key_and_a_short_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    text = bundled_text()[:9000]  # three questions to /tokenize
    monkeypatch.setattr("kvpager.evaluation.text.bundled_text", lambda: text)


def bench(capsys: pytest.CaptureFixture[str], fake: FakeServer, *more: str, code: int = 0) -> dict[str, Any]:
    assert main(["bench", "serve", "--base-url", fake.url, "--warmup", "0", "--json", *more]) == code
    out, _ = capsys.readouterr()
    result: dict[str, Any] = json.loads(out)
    return result


def test_exact_distinct_prompts_go_out_and_usage_comes_back(
    servers: ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = servers.enter_context(serving(FakeServer(cached=3)))
    result = bench(capsys, fake, *SMALL, "--ignore-eos", "--temperature", "0.5")
    assert (result["model"], result["base_url"], result["prompts_from"]) == (MODEL, fake.url, "tokenize")
    assert (result["sent"], result["completed"], result["failed"], result["errors"]) == (4, 4, 0, {})
    assert [len(body["prompt"]) for body in fake.asked] == [30] * 4
    assert len({tuple(body["prompt"]) for body in fake.asked}) == 4
    body = fake.asked[0]
    assert (body["model"], body["max_tokens"], body["temperature"], body["ignore_eos"]) == (MODEL, 5, 0.5, True)
    assert body["stream_options"] == {"include_usage": True}
    assert (result["prompt_tokens"], result["output_tokens"], result["cached_tokens"]) == (120, 20, 12)
    counts = result["counts"]
    assert (counts["from_usage"], counts["pieces"], counts["fewer_tokens_than_pieces"]) == (4, 20, 0)
    assert counts["other_prompt_lengths"] == counts["short_answers"] == 0
    assert [result[name]["n"] for name in ("ttft_ms", "tpot_ms", "gap_ms", "e2e_ms")] == [4, 4, 16, 4]
    assert result["ttft_ms"]["p90"] is None
    for row in result["requests"]:
        assert 0 <= row["sent_s"] <= row["first_s"] <= row["ended_s"] <= result["duration_s"]
    rate = result["output_tokens"] / result["duration_s"]
    assert result["output_tokens_per_s"] == pytest.approx(rate)


def test_the_seed_decides_about_prompts(servers: ExitStack, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = []
    for seed in ("1", "1", "2"):
        fake = servers.enter_context(serving(FakeServer()))
        bench(capsys, fake, *SMALL, "--seed", seed, "--concurrency", "1")
        prompts.append([body["prompt"] for body in fake.asked])
        assert "ignore_eos" not in fake.asked[0]  # it is not OpenAI's
        assert fake.most_running == 1
    assert prompts[0] == prompts[1] != prompts[2]


def test_mixes_and_shared_prefixes(servers: ExitStack, capsys: pytest.CaptureFixture[str]) -> None:
    fake = servers.enter_context(serving(FakeServer()))
    mix = ["--mix", "short=10/2:0.75,long=40/6:0.25", "--shared-prefix", "20", "--prefix-groups", "2"]
    result = bench(capsys, fake, "--num-prompts", "8", *mix, "--concurrency", "1")
    sizes = sorted((len(body["prompt"]), body["max_tokens"]) for body in fake.asked)
    assert sizes == [(30, 2)] * 6 + [(60, 6)] * 2
    beginnings = [tuple(body["prompt"][:20]) for body in fake.asked]
    assert len(set(beginnings)) == 2
    assert beginnings[::2] == [beginnings[0]] * 4
    assert result["kinds"]["short"]["completed"] == 6
    assert result["kinds"]["long"]["gap_ms"]["n"] == 2 * 5
    assert [kind["requests"] for kind in result["workload"]["kinds"]] == [6, 2]


def test_a_server_without_tokenize_gets_random_ids_of_the_range(
    servers: ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = servers.enter_context(serving(FakeServer(tokenizer=None)))
    result = bench(capsys, fake, *SMALL, "--token-ids", "7-19")
    assert result["prompts_from"] == "random ids"
    assert {token for body in fake.asked for token in body["prompt"]} <= set(range(7, 19))
    assert [len(body["prompt"]) for body in fake.asked] == [30] * 4


def test_llama_cpps_tokenize_is_understood(servers: ExitStack, capsys: pytest.CaptureFixture[str]) -> None:
    fake = servers.enter_context(serving(FakeServer(tokenizer="llama.cpp")))
    assert bench(capsys, fake, *SMALL)["prompts_from"] == "tokenize"


def test_chats_get_texts_of_exact_length(servers: ExitStack, capsys: pytest.CaptureFixture[str]) -> None:
    fake = servers.enter_context(serving(FakeServer()))
    result = bench(capsys, fake, *SMALL, "--endpoint", "chat", "--shared-prefix", "25")
    assert set(fake.paths) == {"/v1/chat/completions"}
    for body in fake.asked:
        assert [message["role"] for message in body["messages"]] == ["system", "user"]
        assert [len(word_ids(message["content"])) for message in body["messages"]] == [25, 30]
    assert len({body["messages"][0]["content"] for body in fake.asked}) == 1
    assert len({body["messages"][1]["content"] for body in fake.asked}) == 4
    assert result["counts"]["other_prompt_lengths"] == 0
    assert result["ttft_ms"]["n"] == 4  # the piece with the role alone is no text
    assert result["counts"]["pieces"] == 20


def test_chats_need_a_tokenizer_to_measure_with(servers: ExitStack, capsys: pytest.CaptureFixture[str]) -> None:
    fake = servers.enter_context(serving(FakeServer(tokenizer=None)))
    assert main(["bench", "serve", "--base-url", fake.url, "--endpoint", "chat"]) == 2
    assert "--endpoint completions" in capsys.readouterr().err


def test_pieces_of_several_tokens_and_a_server_without_usage(
    servers: ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    together = servers.enter_context(serving(FakeServer(together=2)))
    result = bench(capsys, together, *SMALL)
    assert (result["output_tokens"], result["counts"]["pieces"]) == (20, 12)
    silent = servers.enter_context(serving(FakeServer(usage=False)))
    result = bench(capsys, silent, *SMALL)
    assert (result["output_tokens"], result["counts"]["from_pieces"], result["cached_tokens"]) == (20, 4, None)
    wrong = servers.enter_context(serving(FakeServer(miscount=-2)))
    assert bench(capsys, wrong, *SMALL)["counts"]["fewer_tokens_than_pieces"] == 4


def test_every_fault_is_counted_by_its_kind_and_the_rest_is_measured(
    servers: ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = {0: "500", 1: "429", 2: "cut", 3: "slow", 4: "malformed", 5: "error", 6: "empty", 7: "end"}
    fake = servers.enter_context(serving(FakeServer(faults=faults)))
    arguments = ["--num-prompts", "10", "--concurrency", "1", "--output-len", "4", "--timeout", "0.5"]
    result = bench(capsys, fake, *arguments)
    assert {kind: error["count"] for kind, error in result["errors"].items()} == {
        "http_500": 1,
        "http_429": 1,
        "cut": 2,
        "timeout": 1,
        "malformed": 1,
        "server": 1,
        "empty": 1,
    }
    assert result["errors"]["http_429"]["retry_after_s"] == 7
    assert "scripted fault 500" in result["errors"]["http_500"]["messages"][0]
    assert "scripted: the engine stopped" in result["errors"]["server"]["messages"][0]
    assert (result["completed"], result["failed"], result["output_tokens"]) == (2, 8, 8)


def test_no_request_that_went_well_is_a_failure(servers: ExitStack, capsys: pytest.CaptureFixture[str]) -> None:
    fake = servers.enter_context(serving(FakeServer(faults=dict.fromkeys(range(4), "500"))))
    result = bench(capsys, fake, *SMALL, code=1)
    assert (result["completed"], result["failed"]) == (0, 4)
    assert result["ttft_ms"] == {"n": 0, "mean": None, "p50": None, "p90": None, "p99": None, "max": None}


def test_warming_up_does_not_count_and_has_prompts_of_its_own(
    servers: ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = servers.enter_context(serving(FakeServer()))
    result = bench(capsys, fake, *SMALL, "--warmup", "2")
    assert (len(fake.asked), result["sent"]) == (6, 4)
    assert len({tuple(body["prompt"]) for body in fake.asked}) == 6
    shared = servers.enter_context(serving(FakeServer()))
    bench(capsys, shared, *SMALL, "--warmup", "1", "--shared-prefix", "20")
    assert len({tuple(body["prompt"][:20]) for body in shared.asked[1:]}) == 1
    assert shared.asked[0]["prompt"][:3] != shared.asked[1]["prompt"][:3]  # lest it leave the prefix in a cache
    assert len(shared.asked[0]["prompt"]) == 50
    chats = servers.enter_context(serving(FakeServer()))
    bench(capsys, chats, *SMALL, "--warmup", "1", "--shared-prefix", "20", "--endpoint", "chat")
    assert [len(body["messages"]) for body in chats.asked] == [1, 2, 2, 2, 2]
    broken = servers.enter_context(serving(FakeServer(faults={0: "500"})))
    assert main(["bench", "serve", "--base-url", broken.url, *SMALL]) == 1
    assert "scripted fault 500" in capsys.readouterr().err
    assert len(broken.asked) == 1


def test_the_key_comes_from_the_environment(
    servers: ExitStack, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = servers.enter_context(serving(FakeServer(key=KEY)))
    assert main(["bench", "serve", "--base-url", fake.url, *SMALL]) == 1
    assert "401 no such key" in capsys.readouterr().err
    monkeypatch.setenv("MY_KEY", KEY)
    result = bench(capsys, fake, *SMALL, "--api-key-env", "MY_KEY", "--model", "another")
    assert (result["completed"], result["model"]) == (4, "another")
    assert KEY not in json.dumps(result)


def test_nobody_there_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:9"]) == 1
    assert capsys.readouterr().err.startswith("kvpager: http://127.0.0.1:9: ")


def test_people_get_a_table_with_counts_and_doubts(
    servers: ExitStack, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fake = servers.enter_context(serving(FakeServer(faults={0: "429"}, answers=["", "a b", *["w"] * 10])))
    target = tmp_path / "load.png"
    more = ["--plot", str(target), "--mix", "a=10/2,b=20/3", "--num-prompts", "12", "--concurrency", "1"]
    assert main(["bench", "serve", "--base-url", fake.url, "--warmup", "0", *more]) == 0
    out, err = capsys.readouterr()
    assert "11 of 12 requests went well" in out
    assert "1 at once at most" in out
    assert "failed, http_429: 1, asked to wait 7 s (429 scripted fault 429)" in out
    assert "answers ended before their full length" in out
    assert "a: to the first text" in out
    assert out.count("-") > 10  # 11 samples have no p99
    assert f"drawn: {target}" in err
    assert target.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--base-url", "server:80"], "url: "),
        (["--mix", "x"], "mix: "),
        (["--token-ids", "20-3"], "token-ids: "),
        (["--plot", "x.gif"], "plot: "),
        (["--prefix-groups", "99"], "prefix-groups: 99"),
    ],
)
def test_bad_options_are_refused_before_anything_is_sent(
    more: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", *more]) == 2
    assert said in capsys.readouterr().err


def test_ctrl_c_prints_what_was_measured(servers: ExitStack) -> None:
    fake = servers.enter_context(serving(FakeServer(faults={1: "slow"})))
    command = [sys.executable, "-m", "kvpager.cli.main", "bench", "serve", "--base-url", fake.url, "--warmup", "0"]
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += (
        f"from kvpager.cli.main import main; sys.exit(main({[*command[3:], *SMALL, '--json', '--concurrency', '1']}))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=dict(os.environ)) as process:
        for _ in range(3000):
            if len(fake.asked) == 2:
                break
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    result = json.loads(out)
    assert process.returncode == 130
    assert result["interrupted"]
    assert (result["completed"], result["errors"]["unfinished"]["count"]) == (1, 1)
