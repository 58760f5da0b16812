"""``kvpager chat``: a conversation in the terminal, with a model in this process or with a server."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kvpager.cli.console import emit, say
from kvpager.cli.options import add_model_options, add_pager_options, add_sampling_options, pager_options, positive
from kvpager.cli.store_options import add_store_options, refuse_store_options, store_options
from kvpager.errors import KVPagerError

if TYPE_CHECKING:
    from kvpager.cli.chat_partners import Partner, Turn

__all__ = ["add_parser", "run"]

API_KEY = "OPENAI_API_KEY"
EPILOG = """\
examples:
  kvpager chat --memory 64MiB
  kvpager chat --store ~/kv/store.db
  kvpager chat --url http://127.0.0.1:8000 --system "Answer in one sentence."
  printf 'Hello.\\nAnd in French?\\n' | kvpager chat --max-tokens 40

A line is a message; one that begins with / is a command, /help lists them. Ctrl-C ends an answer, and the conversation
goes on; the end of the input, or Ctrl-C at the prompt, ends it. Only answers go to standard output.
"""
HELP = """\
/help          this list
/reset         begin anew; the system message stays
/stats         what the last answer cost, and all of them
/system TEXT   set the system message and begin anew; without TEXT there is none
/save FILE     write the conversation as JSON, a list of messages
/quit          end, as the end of the input does"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``chat`` and its options."""
    parser = subparsers.add_parser(
        "chat",
        help="talk with a model",
        description="Talk with a model in the terminal, in this process or over a server.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message (default: none)")
    parser.add_argument(
        "--max-tokens", type=positive, default=512, metavar="N", help="tokens of an answer at most (default: 512)"
    )
    add_sampling_options(parser)
    remote = parser.add_argument_group("with a server")
    remote.add_argument(
        "--url",
        help="an OpenAI-compatible server; --model then names one of its models (default: a model in this process)",
    )
    remote.add_argument(
        "--api-key-env",
        default=API_KEY,
        metavar="NAME",
        help="the environment variable that holds the API key (default: %(default)s)",
    )
    add_model_options(parser)
    add_pager_options(parser)
    add_store_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Talk until the end of the input; returns 0. Raises what loading a model or asking a server raises at first."""
    with _partner(args) as partner:
        talk = Talk(partner, args.system)
        if sys.stdin.isatty():
            say(f"{partner.name}: type a message; /help lists commands")
        for line in _lines():
            if not talk.take(line):
                break
    return 0


def _partner(args: argparse.Namespace) -> AbstractContextManager[Partner]:
    from kvpager.cli import chat_partners

    settings = chat_partners.Settings(args.max_tokens, args.temperature, args.top_p, args.seed)
    if args.url is not None:
        from kvpager.cli.options import DEFAULT_MODEL

        refuse_store_options(args, "of no use with --url: that server has a store of its own, or none")
        model = None if args.model == DEFAULT_MODEL else args.model
        return chat_partners.Server(args.url, os.environ.get(args.api_key_env) or None, model, settings)
    paging = pager_options(args)
    return chat_partners.Local(args, paging, store_options(args, paging), settings)


def _lines() -> Iterable[str]:
    """What the user types, line by line; what is piped in, likewise. Ctrl-C at the prompt ends it as Ctrl-D does."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    with suppress(ImportError):
        import readline  # noqa: F401 - its import alone gives lines a history and the arrow keys
    while True:
        try:
            sys.stderr.write("> ")
            sys.stderr.flush()
            yield input()
        except (EOFError, KeyboardInterrupt):
            say("")
            return


class Talk:
    """A conversation: its messages, and what its answers cost."""

    def __init__(self, partner: Partner, system: str | None) -> None:
        self._partner = partner
        self._messages: list[dict[str, str]] = []
        self._turns: list[Turn] = []
        self._begin(system)

    def _begin(self, system: str | None) -> None:
        self._system = system
        self._messages = [{"role": "system", "content": system}] if system else []

    def take(self, line: str) -> bool:
        """Do what a line says; False when it ends the conversation."""
        text = line.strip()
        if text.startswith("/"):
            return self._command(*text[1:].split(maxsplit=1))
        if text:
            self._ask(text)
        return True

    def _ask(self, text: str) -> None:
        """Ask and show the answer as it comes; what went wrong is told, and the question forgotten."""
        self._messages.append({"role": "user", "content": text})
        shown: list[str] = []

        def show(piece: str) -> None:
            shown.append(piece)
            emit(piece, end="")

        try:
            turn = self._partner.answer(self._messages, show)
        except KeyboardInterrupt:
            emit("")
            say("(stopped)")
        except KVPagerError as error:
            if shown:
                emit("")
            self._messages.pop()
            say(f"kvpager: {error}")
            return
        else:
            self._turns.append(turn)
            emit("")
            if turn.finish_reason not in ("stop", None):
                say(f"(ended: {turn.finish_reason})")
        self._messages.append({"role": "assistant", "content": "".join(shown)})

    def _command(self, name: str = "", rest: str = "") -> bool:
        commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: say(HELP),
            "reset": lambda _: self._begin(self._system),
            "stats": lambda _: say(self._stats()),
            "system": lambda text: self._begin(text or None),
            "save": self._save,
        }
        if name == "quit":
            return False
        if name in commands:
            commands[name](rest)
        else:
            say(f"/{name} is no command; /help lists them")
        return True

    def _save(self, path: str) -> None:
        if not path:
            say("/save needs a file")
            return
        try:
            Path(path).write_text(json.dumps(self._messages, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            say(f"{path} can't be written: {error.strerror}")
        else:
            say(f"saved {len(self._messages)} messages: {path}")

    def _stats(self) -> str:
        if not self._turns:
            return "no answer yet"
        last = self._turns[-1]
        read, cached, written = (
            sum(getattr(turn, name) or 0 for turn in self._turns)
            for name in ("prompt_tokens", "cached_tokens", "completion_tokens")
        )
        lines = [
            f"last answer: {last.line()}",
            f"all {len(self._turns)}: {read} tokens read, {cached} of them cached, {written} written",
        ]
        return "\n".join([*lines, *self._partner.figures()])
