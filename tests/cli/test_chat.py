"""``kvpager chat`` piped, in process and with a server: turns, commands, Ctrl-C, and what goes where."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvpager import LLM, SamplingParams
from kvpager.cli.main import main
from tests.bench.fake_server import KEY, MODEL, FakeServer, serving
from tests.small_llm import CONTEXT, save_folder

Chat = Callable[..., tuple[str, str]]
SMALL = ["--threads", "1", "--pool", "1MiB", "--swap", "memory", "--max-tokens", "8"]


@pytest.fixture
def chat(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Chat:
    """Runs a chat with lines on standard input; gives what it wrote on standard output and error."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def run(lines: list[str], *arguments: str, code: int = 0) -> tuple[str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
        assert main(["chat", *arguments]) == code
        out, err = capsys.readouterr()
        return out, err

    return run


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with ExitStack() as stack:
        yield stack.enter_context(serving(FakeServer(answers=["Hello you.", "And again.", "Third."], cached=4)))


def test_turns_build_on_each_other_and_only_answers_go_to_standard_output(chat: Chat, model: str) -> None:
    out, err = chat(["hello", "", "and more", "/stats"], "--model", model, *SMALL)
    with LLM(model, pool="1MiB", swap="memory", threads=1) as llm:
        talk: list[dict[str, str]] = []
        expected = []
        for text in ("hello", "and more"):
            talk.append({"role": "user", "content": text})
            (result,) = llm.chat(talk, SamplingParams(max_tokens=8, temperature=0))
            expected.append(result.outputs[0].text)
            talk.append({"role": "assistant", "content": expected[-1]})
    assert out == "".join(f"{text}\n" for text in expected)
    assert "all 2: " in err
    assert "KV in memory" in err


def test_a_second_turn_finds_the_first_one_computed(chat: Chat, model: str) -> None:
    _, err = chat(["a first message that is longer than a page or two", "next", "/stats"], "--model", model, *SMALL)
    (line,) = [line for line in err.splitlines() if line.startswith("last answer: ")]
    read, cached = (int(part.split()[0]) for part in line.removeprefix("last answer: ").split(", ")[:2])
    assert 32 <= cached < read


def test_the_next_chat_finds_what_the_last_one_computed(chat: Chat, model: str, tmp_path: Path) -> None:
    store = ["--store", str(tmp_path / "store.db")]
    lines = ["a first message that is longer than a page or two", "/stats"]
    found = []
    for _ in range(2):
        out, err = chat(lines, "--model", model, *SMALL, *store)
        found.append((out, int(err.split(" of them cached")[0].rpartition(" ")[2])))
    assert found[0][0] == found[1][0]
    assert found[0][1] == 0
    assert found[1][1] >= 32


def test_commands(chat: Chat, fake: FakeServer, tmp_path: Path) -> None:
    target = tmp_path / "talk.json"
    lines = ["/help", "/stats", "one", f"/save {target}", "/reset", "two", "/system be brief", "three", "/what"]
    out, err = chat([*lines, "/save", f"/save {tmp_path}/no/x", "/quit", "never"], "--url", fake.url)
    assert out == "Hello you.\nAnd again.\nThird.\n"
    assert [body["messages"] for body in fake.asked] == [
        [{"role": "user", "content": "one"}],
        [{"role": "user", "content": "two"}],
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "three"}],
    ]
    assert json.loads(target.read_text()) == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "Hello you."},
    ]
    for said in ("/reset", "no answer yet", f"saved 2 messages: {target}", "/what is no command", "/save needs a file"):
        assert said in err
    assert "no/x can't be written: No such file or directory" in err


def test_a_server_is_asked_with_settings_key_and_the_whole_conversation(
    chat: Chat, fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.key = KEY
    monkeypatch.setenv("MY_KEY", KEY)
    more = ["--system", "be kind", "--temperature", "0.5", "--top-p", "0.9", "--seed", "3", "--max-tokens", "7"]
    out, err = chat(["one", "two", "/stats"], "--url", fake.url + "/v1", "--api-key-env", "MY_KEY", *more)
    assert out == "Hello you.\nAnd again.\n"
    body = fake.asked[1]
    assert (body["model"], body["temperature"], body["top_p"], body["seed"], body["max_tokens"]) == (
        MODEL,
        0.5,
        0.9,
        3,
        7,
    )
    assert [message["role"] for message in body["messages"]] == ["system", "user", "assistant", "user"]
    assert body["messages"][2]["content"] == "Hello you."
    assert "4 of them cached" in err
    assert KEY not in out + err


def test_a_request_that_fails_is_told_and_forgotten(chat: Chat) -> None:
    faults = {0: "429", 1: "cut", 3: "error"}
    with serving(FakeServer(faults=faults, answers=["a", "b c d", "fine", "e f g"])) as fake:
        out, err = chat(["one", "two", "three", "four"], "--url", fake.url)
        assert [body["messages"] for body in fake.asked[:3]] == [
            [{"role": "user", "content": text}] for text in ("one", "two", "three")
        ]
        assert [message["content"] for message in fake.asked[3]["messages"]] == ["three", "fine", "four"]
    assert out == "b c\nfine\ne f\n"
    assert "429 scripted fault 429" in err
    assert "scripted: the engine stopped" in err


def test_nobody_there_ends_it_at_once(chat: Chat) -> None:
    out, err = chat(["one"], "--url", "http://127.0.0.1:9", code=1)
    assert out == ""
    assert err.startswith("kvpager: http://127.0.0.1:9: ")


def test_a_message_that_is_too_long_is_told_and_the_chat_goes_on(chat: Chat, model: str) -> None:
    out, err = chat(["long " * CONTEXT, "short"], "--model", model, *SMALL)
    assert f"{CONTEXT} for prompt and answer" in err
    assert out.count("\n") >= 1


def test_a_model_without_a_chat_template_is_refused(chat: Chat, tmp_path: Path) -> None:
    plain = str(save_folder(tmp_path / "plain", chat_template=None))
    out, err = chat(["hello"], "--model", plain, *SMALL, code=2)
    assert out == ""
    assert "no chat template" in err


class Interrupting(io.StringIO):
    """Standard output that presses Ctrl-C at its first text."""

    pressed = False

    def write(self, text: str) -> int:
        written = super().write(text)
        if text.strip() and not self.pressed:
            self.pressed = True
            signal.raise_signal(signal.SIGINT)
        return written


@pytest.mark.parametrize("where", ["here", "server"])
def test_ctrl_c_ends_the_answer_and_the_conversation_goes_on(
    where: str, chat: Chat, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a runner may have it ignored
    out = Interrupting()
    monkeypatch.setattr("sys.stdout", out)
    target = tmp_path / "talk.json"
    lines = ["hello", "again", f"/save {target}", "/stats"]
    try:
        if where == "here":
            _, err = chat(lines, "--model", model, *SMALL)
        else:
            with serving(FakeServer(faults={0: "slow"}, answers=["a b c d", "Fine."])) as fake:
                _, err = chat(lines, "--url", fake.url)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert out.pressed
    assert "(stopped)" in err
    talk = json.loads(target.read_text())
    assert [message["role"] for message in talk] == ["user", "assistant", "user", "assistant"]
    first, second = talk[1]["content"], talk[3]["content"]
    assert first
    assert out.getvalue() == f"{first}\n{second}\n"
    assert "all 1: " in err  # the one that was stopped has no figures


def test_in_a_terminal_there_is_a_prompt_and_ctrl_d_ends_it() -> None:
    with serving(FakeServer(answers=["Hello you."])) as fake:
        main_end, their_end = pty.openpty()
        command = [sys.executable, "-m", "kvpager.cli.main", "chat", "--url", fake.url]
        code = f"import sys; from kvpager.cli.main import main; sys.exit(main({command[3:]}))"
        with subprocess.Popen(
            [sys.executable, "-c", code], stdin=their_end, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            os.close(their_end)
            os.write(main_end, b"hello\n\x04")
            out, err = process.communicate(timeout=60)
        os.close(main_end)
    assert process.returncode == 0, err
    assert out.decode() == "Hello you.\n"
    assert f"{MODEL}: type a message; /help lists commands" in err.decode()
    assert "> " in err.decode()


def test_bad_options_are_refused_before_a_model_is_loaded(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("kvpager.build.load_model", load)
    _, err = chat(["x"], "--pool", "1MiB", "--memory", "1MiB", code=2)
    assert "either --memory or --pool" in err
    _, err = chat(["x"], "--url", "nothing", code=2)
    assert "url: " in err
