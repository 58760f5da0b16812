"""Text to tokens and back, for the server: prompts, chats through the model's template, and tokens for log-probs."""

from __future__ import annotations

import asyncio
import copy
import re
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from kvpager.engine.text import require_text
from kvpager.errors import InputError
from kvpager.server.errors import ApiError
from kvpager.server.protocol import Message

__all__ = ["Texts"]

T = TypeVar("T")
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class Texts:
    """A tokenizer with a thread of its own, so that a long prompt does not hold up the event loop.

    The tokenizer is copied: the engine decodes with its own, and neither may be changed while the other thread reads.
    """

    def __init__(self, tokenizer: Any, name: str) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        self._name = name
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvpager-texts")
        added = self._tokenizer.added_tokens_decoder.values()
        control = {str(token) for token in added if token.special} | set(self._tokenizer.all_special_tokens)
        longest_first = sorted(filter(None, control), key=len, reverse=True)
        self._numbers = {control: number for number, control in enumerate(longest_first)}  # their marks'
        self._control = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._bytes = _byte_alphabet() if "ByteLevel" in str(self._tokenizer.backend_tokenizer.decoder) else None

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call one of the methods below in the tokenizer's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def close(self) -> None:
        """End the thread; what it is doing goes on to its end."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a raw prompt; control tokens written out in it are control tokens.

        Raises InputError for what is no text.
        """
        require_text(text, "prompt")
        return list(self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of all ids at once."""
        return str(
            self._tokenizer.decode(
                list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    def known(self, ids: Sequence[int]) -> str:
        """The text of ids that a client sent; raises InputError for one that is not in the vocabulary."""
        wrong = [token for token in ids if self._tokenizer.convert_ids_to_tokens(token) is None]
        if wrong:
            raise InputError(f"tokens: {wrong[0]} is not in the vocabulary")
        return self.decode(ids)

    def chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation inside the model's chat template.

        They are those of `apply_chat_template`, but where a message has the text of a control token: there it is
        read as plain text, so that nobody can end their own turn and write another's. Raises ApiError for messages
        that can't be used, or that the template refuses.
        """
        if not self._tokenizer.chat_template:
            raise ApiError(400, f"{self._name} has no chat template; use /v1/completions", code="no_chat_template")
        if not messages:
            raise ApiError(400, "messages: there is none", param="messages", code="invalid_value")
        nonce = uuid.uuid4().hex
        turns = [
            {"role": _role(message.role, number), "content": self._marked(_content(message, number), nonce)}
            for number, message in enumerate(messages)
        ]
        try:
            text = self._tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # a template is a program of the model's makers, and raises what it likes
            reason = " ".join(str(error).split())[:300]
            raise ApiError(
                400, f"messages: the model's chat template refuses them: {reason}", param="messages"
            ) from error
        return self._unmarked_ids(text, nonce)

    def token(self, token_id: int) -> tuple[str, bytes]:
        """A token as text and as bytes; where it is a part of a character, the text shows its bytes."""
        known = self._tokenizer.convert_ids_to_tokens(token_id)
        data = self._known_bytes(known) if known is not None else None
        if data is None:
            text = self.decode([token_id])
            return text, text.encode("utf-8", "replace")
        try:
            return data.decode("utf-8"), data
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data

    def strings(self, ids: Sequence[int]) -> list[str]:
        """Each token as text."""
        return [self.token(token)[0] for token in ids]

    def _known_bytes(self, token: str) -> bytes | None:
        if re.fullmatch(r"<0x[0-9A-F]{2}>", token):
            return bytes([int(token[3:5], 16)])
        if self._bytes is not None and all(character in self._bytes for character in token):
            return bytes(self._bytes[character] for character in token)
        return None

    def _marked(self, content: str, nonce: str) -> str:
        """The content with marks, which nobody can guess, in the place of control tokens' text."""
        if self._control is None:
            return content
        return self._control.sub(lambda found: f"mark{nonce}n{self._numbers[found.group()]}x", content)

    def _unmarked_ids(self, text: str, nonce: str) -> list[int]:
        """Token ids of a text with marks: each kind is read once, and what is between in one go."""
        pieces = re.split(f"mark{nonce}n([0-9]+)x", text)  # text and the mark's number in turn
        if len(pieces) == 1:
            return self.encode(text, False)
        between = list(dict.fromkeys(filter(None, pieces[::2])))
        ids: dict[str, list[int]] = {"": []}
        if between:
            ids.update(zip(between, self._tokenizer(between, add_special_tokens=False)["input_ids"], strict=True))
        marks: dict[str, list[int]] = {}
        for control, number in self._numbers.items():
            if str(number) in pieces[1::2]:
                read = self._tokenizer(control, add_special_tokens=False, split_special_tokens=True)["input_ids"]
                marks[str(number)] = list(read)
        return [token for place, piece in enumerate(pieces) for token in (marks if place % 2 else ids)[piece]]


def _role(role: str, number: int) -> str:
    if role not in ROLES:
        message = f"messages.{number}.role: it is none of {', '.join(ROLES)}"
        raise ApiError(400, message, param="messages", code="invalid_value")
    return ROLES[role]


def _content(message: Message, number: int) -> str:
    where = f"messages.{number}"
    extra = message.model_extra or {}
    for field in ("tool_calls", "function_call", "audio", "refusal"):
        if extra.get(field):
            raise ApiError(
                400, f"{where}.{field}: this server knows text only", param="messages", code="unsupported_content"
            )
    if isinstance(message.content, str):
        require_text(message.content, where)
        return message.content
    if message.content is None:
        raise ApiError(400, f"{where}.content: it is required", param="messages", code="missing_required_parameter")
    for place, part in enumerate(message.content):
        if part.type != "text" or part.text is None:
            text = f"{where}.content.{place}: this server knows parts of type text only"
            raise ApiError(400, text, param="messages", code="unsupported_content")
    content = "".join(part.text or "" for part in message.content)
    require_text(content, where)
    return content


def _byte_alphabet() -> dict[str, int]:
    """What byte-level tokenizers write for each byte: itself where it is visible, else a character from 256 on."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = (byte for byte in range(256) if byte not in visible)
    return {chr(byte): byte for byte in visible} | {chr(256 + place): byte for place, byte in enumerate(hidden)}
