"""``kvpager``: reads the command line, runs one command, and turns what happened into an exit code.

Exit codes: 0 it worked, 1 it failed (one line on standard error says why), 2 bad usage, 130 interrupted.
``KVPAGER_DEBUG=1`` shows the traceback of a failure.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from kvpager import __version__
from kvpager.cli import bench, chat, demo, failover, generate, serve, store
from kvpager.cli import eval as evaluate
from kvpager.cli.console import say
from kvpager.errors import ConfigError, InputError, KVPagerError

__all__ = ["build_parser", "main"]

COMMANDS = (generate, chat, serve, store, failover, demo, evaluate, bench)

FAILED = 1
BAD_USAGE = 2
INTERRUPTED = 130


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; each command's options come from its own module."""
    parser = argparse.ArgumentParser(
        prog="kvpager",
        description="Demand paging for the attention of language models: bounded KV memory, nothing lost.",
        epilog="example: kvpager generate --memory 64MiB 'Explain virtual memory to a child.'",
    )
    parser.add_argument("--version", action="version", version=f"kvpager {__version__}")
    subparsers = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (argparse itself raises SystemExit for --help and bad usage)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows a mark instead of failing
    args = build_parser().parse_args(argv)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Who read our output has gone: say nothing, and keep Python from flushing into the pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        if os.environ.get("KVPAGER_DEBUG") == "1":
            raise
        say(f"kvpager: {_one_line(error)}")
        return BAD_USAGE if isinstance(error, (ConfigError, InputError)) else FAILED
    return code


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, (KVPagerError, OSError)):
        return text or type(error).__name__
    return f"{type(error).__name__}: {text} (KVPAGER_DEBUG=1 shows where)"
