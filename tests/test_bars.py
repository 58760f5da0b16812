"""A bar is for terminals alone, and leaves nothing behind."""

from __future__ import annotations

import io
import sys

import pytest

from kvpager.bars import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    with progress("Answers", 3) as advance:
        for done in range(4):
            advance(done)
    return stream.getvalue()


def test_nothing_is_written_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drawn(monkeypatch, io.StringIO()) == ""


def test_a_terminal_sees_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Answers" in drawn(monkeypatch, Terminal())


def test_without_rich_a_line_rewrites_itself_and_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("rich", "rich.console", "rich.progress"):
        monkeypatch.setitem(sys.modules, name, None)
    text = drawn(monkeypatch, Terminal())
    assert "Answers: 2 of 3" in text
    assert text.endswith("\r\x1b[K")
