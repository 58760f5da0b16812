"""Text from tokens as they come: never half a character, never a piece of a stop string; each token costs the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvpager.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvpager.engine.params import SamplingParams

__all__ = ["TextState", "TextStream", "decoder", "require_text"]

MARK = "\ufffd"  # what a decoder shows for bytes that are no character
HELD_MARKS = 3  # bytes of a character that is not whole yet
WINDOW = 16  # tokens that are decoded together at most, but for odd ones
KEPT = 8  # of them kept as context; more than the bytes of a character
WINDOW_MOST = 64


def require_text(text: str, name: str) -> None:
    """Raise InputError for half a character (a lone surrogate): JSON can carry it, and no tokenizer can read it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{name}: it is no text: character {error.start} is half of one (a lone surrogate)") from None


def decoder(tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool) -> Callable[[list[int]], str]:
    """The tokenizer's own decoding, without clean-up, by the shortest way."""
    fast: Any = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None:
        return lambda ids: str(fast.decode(ids, skip_special_tokens=skip_special_tokens))
    return lambda ids: str(
        tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    )


@dataclass
class TextStream:
    """Text from tokens as they come, never half a character.

    A character can take several tokens, and a token's text can depend on the one before it. So each new token is
    decoded together with a few before it, and what may still become another character is held back. All that was
    given out, joined, is the text of all tokens decoded at once.
    """

    decode: Callable[[list[int]], str]
    ids: list[int] = field(default_factory=list)
    _pieces: list[str] = field(default_factory=list)  # given out so far
    _window: list[int] = field(default_factory=list)  # the last tokens, decoded again with the next one
    _decoded: str = ""  # the window's text
    _shown: int = 0  # its characters that were given out

    @property
    def text(self) -> str:
        """All that was given out."""
        return "".join(self._pieces)

    def push(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""
        self.ids.append(token_id)
        self._window.append(token_id)
        new = self.decode(self._window)
        if new == self._decoded and self.decode([token_id]) == "":
            self._window.pop()  # a control token that is not shown: no context for others
            return ""
        if not new.startswith(self._decoded[: self._shown]) and len(self._window) <= WINDOW_MOST:
            return ""  # what was shown would now read otherwise: wait for tokens that settle it
        self._decoded = new
        piece = new[self._shown : _settled(new)]
        self._shown += len(piece)
        if len(self._window) > WINDOW:
            self._slide()
        return self._give(piece)

    def finish(self) -> str:
        """What was held back: at the end a character that never became whole is shown as a mark."""
        new = self.decode(self._window)
        piece, self._shown = new[self._shown :], len(new)
        return self._give(piece)

    def _slide(self) -> None:
        """Forget the oldest tokens of the window, at a place where text is the same without them."""
        least = len(self._window) - 2 * KEPT
        for start in range(len(self._window) - KEPT, max(least, 0), -1):
            kept = self._window[start:]
            text = self.decode(kept)
            shown = len(text) - (len(self._decoded) - self._shown)
            if text and shown >= 0 and self._decoded.endswith(text):
                self._window, self._decoded, self._shown = kept, text, shown
                return

    def _give(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece


def _settled(text: str) -> int:
    """Characters of `text` that no later token can change: all but a few marks at its end."""
    end = len(text)
    while end and len(text) - end < HELD_MARKS and text[end - 1] == MARK:
        end -= 1
    return end


class _Stop:
    """One stop string, looked for a character at a time (Knuth, Morris and Pratt)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0  # characters of it that the text so far ends with
        self._back = [0] * len(text)  # where to go on when the next character differs
        k = 0
        for i in range(1, len(text)):
            while k and text[i] != text[k]:
                k = self._back[k - 1]
            k += text[i] == text[k]
            self._back[i] = k

    def feed(self, character: str) -> bool:
        """Whether the stop string ends with this character."""
        while self.matched and self.text[self.matched] != character:
            self.matched = self._back[self.matched - 1]
        self.matched += self.text[self.matched] == character
        return self.matched == len(self.text)


class TextState:
    """One answer's text: what may be shown now, and whether a stop string has ended it.

    Text is held back while it could be the beginning of a stop string, and let go at once when it is not. The stop
    string that is complete first ends the text (of several that end together, the longest), whichever way the text
    is cut into tokens. The first `min_tokens` tokens are not searched.
    """

    def __init__(self, decode: Callable[[list[int]], str], params: SamplingParams) -> None:
        self.stopped = False
        self.stop_reason: str | None = None  # the stop string that ended the text
        self._stream = TextStream(decode)
        self._stops = [_Stop(text) for text in params.stop]
        self._min_tokens = params.min_tokens
        self._include = params.include_stop_str_in_output
        self._held = ""  # the beginning of a stop string, perhaps

    def push(self, token_id: int) -> str:
        """The text that may be shown now; may be empty. After a stop there is none."""
        if self.stopped:
            return ""
        piece = self._stream.push(token_id)
        return self._search(piece) if len(self._stream.ids) > self._min_tokens else piece

    def finish(self) -> str:
        """What was held back, once no more tokens come. A stop string can still end the text here."""
        if self.stopped:
            return ""
        shown = self._search(self._stream.finish()) if len(self._stream.ids) >= self._min_tokens else ""
        held, self._held = self._held, ""
        return shown + held

    def _search(self, piece: str) -> str:
        if not self._stops or not piece:
            return piece
        text = self._held + piece
        for end in range(len(self._held) + 1, len(text) + 1):
            found = [stop.text for stop in self._stops if stop.feed(text[end - 1])]
            if found:
                self.stop_reason = max(found, key=len)
                self.stopped, self._held = True, ""
                return text[:end] if self._include else text[: end - len(self.stop_reason)]
        held = max(stop.matched for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]
