"""Exit codes, help and errors of the command line."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from kvpager import __version__
from kvpager.cli import generate
from kvpager.cli.main import build_parser, main
from kvpager.cli.options import pager_options
from kvpager.errors import ConfigError, ModelNotFound


def usage_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


def raising(error: BaseException) -> Callable[..., int]:
    def run(args: object) -> int:
        raise error

    return run


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"kvpager {__version__}\n"


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parsers that run something, below `parser`."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for action in below:
        for child in action.choices.values():
            yield from commands(child)
    if not below:
        yield parser


@pytest.mark.parametrize("command", list(commands(build_parser())), ids=lambda parser: parser.prog)
def test_every_command_has_help_with_an_example(command: argparse.ArgumentParser) -> None:
    assert command.prog in command.format_help().split("example", 1)[1]
    assert "run" in command._defaults


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom kvpager.cli.main import main\n"
        "try:\n    main(['generate', '--help'])\n"
        "except SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'rich', 'matplotlib'} & set(sys.modules)\nassert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--pool", "0", "is none of: frames (512), a size (64MiB), a share (25%)"),
        ("--pool", "150%", "at most 100%"),
        ("--pool", "lots", "'lots' is none of"),
        ("--memory", "-5", "-5"),
        ("--memory", "12 parsecs", "is not a size"),
        ("--budget", "some", "'some' is not a whole number"),
        ("--budget", "0", "0 is not in 1.."),
        ("--mode", "forget", "invalid choice: 'forget'"),
        ("--policy", "belady", "invalid choice: 'belady'"),
        ("--page-size", "12", "invalid choice"),
        ("--tile", "0", "0 is not in 1..1024"),
        ("--threads", "0", "0 is not in 1..256"),
        ("--dtype", "int4", "invalid choice: 'int4'"),
        ("--kernel", "magic", "invalid choice: 'magic'"),
        ("--max-tokens", "0", "0 is not in 1.."),
        ("--max-tokens", "-3", "-3 is not in 1.."),
        ("--temperature", "nan", "nan is not in 0..100"),
        ("--temperature", "-1", "-1 is not in 0..100"),
        ("--top-p", "0", "0 is not in"),
        ("--seed", "1.5", "'1.5' is not a whole number"),
    ],
)
def test_bad_values_are_refused_by_name_with_exit_code_2(
    option: str, value: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    err = usage_error(["generate", "hello", f"{option}={value}"], capsys)
    assert option in err
    assert said in err


def test_no_command_and_an_unknown_one_are_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert "COMMAND" in usage_error([], capsys)
    assert "fly" in usage_error(["fly"], capsys)


def test_options_reach_pager_options() -> None:
    args = build_parser().parse_args(
        ["generate", "x", "--pool=25%", "--budget=1024", "--policy=lru", "--digest=4bit", "--tile=1", "--seed=7"]
    )
    options = pager_options(args)
    assert (options.pool, options.budget, options.policy) == ("25%", 1024, "lru")
    assert (options.digest, options.tile, options.seed, options.swap) == ("4bit", 1, 7, None)
    assert pager_options(build_parser().parse_args(["generate", "x", "--budget", "none"])).budget is None


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--pool=512", "--memory=1MiB"], "either --memory or --pool"),
        (["--mode=discard"], "discard needs --budget"),
        (["--tile=5"], "tile: 5 is neither 1 nor a multiple of page_size, 16"),
        (["--budget=16"], "budget: 16 is less than 64"),
    ],
)
def test_combinations_that_cannot_be_are_bad_usage(
    more: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "x", "--model", "/no/model", *more]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ModelNotFound("m: not here"), 1, "kvpager: m: not here\n"),
        (ConfigError("tile: 5 is odd"), 2, "kvpager: tile: 5 is odd\n"),
        (
            RuntimeError("line one\nline two"),
            1,
            "kvpager: RuntimeError: line one line two (KVPAGER_DEBUG=1 shows where)\n",
        ),
        (PermissionError(13, "Permission denied", "/x"), 1, "kvpager: [Errno 13] Permission denied: '/x'\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_a_failure_is_one_line_and_an_exit_code(
    error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "run", raising(error))
    assert main(["generate", "x"]) == code
    assert capsys.readouterr() == ("", said)


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPAGER_DEBUG", "1")
    monkeypatch.setattr(generate, "run", raising(ModelNotFound("m")))
    with pytest.raises(ModelNotFound):
        main(["generate", "x"])


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_ctrl_c_while_waiting_for_the_prompt_ends_quietly() -> None:
    # a shell that runs the tests in its background has SIGINT ignored, and children inherit that
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from kvpager.cli.main import main; print('ready', flush=True); sys.exit(main(['generate']))"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdout.readline()
        time.sleep(0.5)  # it reads its standard input by then
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
        assert process.stderr.read() == b""


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    code = "import sys; from kvpager.cli import generate, console, main\n"
    code += "generate.run = lambda args: [console.emit('x' * 1000) for _ in range(1000)] and 0\n"
    code += "sys.exit(main.main(['generate', 'x']))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.wait() == 1
        assert process.stderr.read() == b""
