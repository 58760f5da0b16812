"""The text that tasks are made from."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from kvpager.errors import InputError

__all__ = ["bundled_ids", "bundled_text", "paragraphs", "read_text"]


def bundled_text() -> str:
    """The bundled excerpt of a public-domain book (see data/README.md)."""
    return (files("kvpager") / "data" / "sherlock-holmes.txt").read_text(encoding="utf-8")


def bundled_ids(tokenizer: Any, characters: int | None = None) -> list[int]:
    """Token ids of the bundled text, or of so many characters of it, without tokens that a tokenizer adds."""
    ids: list[int] = tokenizer(bundled_text()[:characters], add_special_tokens=False, verbose=False)["input_ids"]
    return ids


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
