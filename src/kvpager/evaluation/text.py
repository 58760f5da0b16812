"""The text that tasks are made from."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from kvpager.errors import InputError

__all__ = ["bundled_text", "paragraphs", "read_text"]


def bundled_text() -> str:
    """The bundled excerpt of a public-domain book (see data/README.md)."""
    return (files("kvpager") / "data" / "sherlock-holmes.txt").read_text(encoding="utf-8")


def read_text(path: str | Path) -> str:
    """A UTF-8 text file; raises InputError that says what is wrong with it."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"text: {path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"text: {path} is not UTF-8 text (byte {error.start})") from None


def paragraphs(text: str) -> list[str]:
    """Its paragraphs, each on one line, empty ones left out."""
    found = (" ".join(part.split()) for part in text.split("\n\n"))
    return [part for part in found if part]
