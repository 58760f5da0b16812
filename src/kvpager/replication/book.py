"""One request as a journal knows it: joined from what is told of it, alike on both sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpager.journaled import Accepted, Gained, Resumable, Saved, Told

__all__ = ["KEY_BYTES", "MOST_ANSWERS", "Answer", "Held", "Misfit", "answers_of"]

KEY_BYTES = 32
MOST_ANSWERS = 128


class Misfit(Exception):
    """What is told does not go on from what is known."""


def answers_of(accepted: Accepted) -> int:
    """How many answers a request has. Raises Misfit where its parameters make no sense."""
    count = accepted.params.get("n", 1)
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_ANSWERS:
        raise Misfit("n")
    return count


@dataclass
class Answer:
    """One answer: its tokens, its end, and of its pages what was gained, joined.

    begin   the position of the first token in `slots`, the end of the last full block
    header  None where nothing is known of its pages
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Mapping[str, Any]] = field(default_factory=list)
    end: Told | None = None
    header: Mapping[str, Any] | None = None
    keys: bytearray = field(default_factory=bytearray)
    begin: int = 0
    slots: bytearray = field(default_factory=bytearray)
    scores: bytes = b""
    singles: Sequence[tuple[int, int]] = ()

    def spoil(self) -> None:
        """Nothing is known of its pages any more; what comes for them counts again when it is told from the start."""
        self.header, self.begin, self.scores, self.singles = None, 0, b"", ()
        self.keys, self.slots = bytearray(), bytearray()

    def gain(self, gained: Gained, page: int, known: int) -> None:
        """Join what was gained; where that does not go on from what is known, it is spoiled.

        `page`: tokens of a block; `known`: tokens of prompt and answer.
        """
        try:
            self._gain(gained, page, known)
        except Misfit:
            self.spoil()

    def _gain(self, gained: Gained, page: int, known: int) -> None:
        length = gained.header.get("length")
        if not isinstance(length, int) or isinstance(length, bool) or not 0 <= length <= known:
            raise Misfit("length")
        if gained.first * KEY_BYTES > len(self.keys) or (self.header is None and gained.first):
            raise Misfit("keys")
        begin = length // page * page
        self._join(gained, begin, length)
        del self.keys[gained.first * KEY_BYTES :]
        self.keys += gained.keys
        if len(self.keys) != begin // page * KEY_BYTES:
            raise Misfit("keys")
        if gained.scores or begin != self.begin:
            self.scores = gained.scores
        if gained.singles:
            self.singles = tuple(gained.singles)
        self.header, self.begin = gained.header, begin

    def _join(self, gained: Gained, begin: int, length: int) -> None:
        """The slots of positions begin..length, from those that are known and those that are new."""
        count = length - gained.slots_from
        if length == begin:
            self.slots.clear()
            return
        if gained.slots_from < 0 or count < 0 or (count == 0) != (not gained.slots):
            raise Misfit("slots")
        if count and len(gained.slots) % count:
            raise Misfit("slots")
        size = len(gained.slots) // count if count else 0
        if gained.slots_from <= begin:
            self.slots[:] = memoryview(gained.slots)[(begin - gained.slots_from) * size :]
            return
        kept, known = gained.slots_from - begin, 0 if self.header is None else self.header["length"] - begin
        if self.begin != begin or kept > known or (count and size * known != len(self.slots)):
            raise Misfit("slots")
        del self.slots[len(self.slots) // known * kept :]
        self.slots += gained.slots

    def saved(self, prompt: Sequence[int]) -> Saved | None:
        """What Engine.resume is given of its pages."""
        if self.header is None:
            return None
        length = self.header["length"]
        tokens = [*prompt[:length], *self.tokens[: max(0, length - len(prompt))]]
        return Saved(dict(self.header), tokens, bytes(self.keys), bytes(self.slots), self.scores, tuple(self.singles))


class Held:
    """A request and its answers.

    beginning, last  the stretch of the journal that it is of, and the number of the last entry that is in it
    page             tokens of a block of its pages
    """

    def __init__(self, accepted: Accepted, page: int, beginning: str = "", last: int = 0) -> None:
        """Raises Misfit where the request makes no sense."""
        self.accepted, self.page, self.beginning, self.last = accepted, page, beginning, last
        self.answers = [Answer() for _ in range(answers_of(accepted))]

    @classmethod
    def of(cls, known: Resumable, page: int) -> Held:
        """A request that another journal has known. Raises Misfit."""
        held = cls(known.accepted, page)
        parts = zip(held.answers, known.outputs, known.told, known.logprobs, known.saved, strict=True)
        for answer, tokens, end, logprobs, saved in parts:
            answer.tokens, answer.end, answer.logprobs = list(tokens), end, list(logprobs)
            if saved is not None:
                begin = len(saved.keys) // KEY_BYTES * page
                gained = Gained(saved.header, 0, saved.keys, begin, saved.slots, saved.scores, saved.singles)
                answer.gain(gained, page, len(known.accepted.prompt) + len(tokens))
        return held

    @property
    def ended(self) -> bool:
        """Whether all its answers have ended."""
        return all(answer.end is not None for answer in self.answers)

    @property
    def size(self) -> int:
        """Bytes of all of it, about."""
        answers = sum(4 * len(one.tokens) + len(one.keys) + len(one.slots) + len(one.scores) for one in self.answers)
        told = 256 * sum(len(answer.logprobs) for answer in self.answers)
        return 1024 + 4 * len(self.accepted.prompt) + len(self.accepted.client) + answers + told

    @property
    def light(self) -> bool:
        """Whether no open block is in it: the moment to write all of it down."""
        return not any(answer.slots for answer in self.answers)

    def tell(self, told: Told, at: int | None = None, spoiled: bool = False) -> None:
        """Take what an answer gained. Raises Misfit, with nothing changed, where that is no answer of it.

        `at`: how many tokens it had before; None for as many as are known. `spoiled`: what it gained was damaged.
        """
        if told.index >= len(self.answers):
            raise Misfit("index")
        answer = self.answers[told.index]
        if answer.end is not None or (at is not None and at != len(answer.tokens)):
            raise Misfit("tokens")
        answer.tokens += told.tokens
        if told.logprobs is not None:
            answer.logprobs += told.logprobs
        if told.finish_reason is not None:
            answer.end = told
            answer.spoil()  # nobody goes on from its pages
        elif spoiled or told.gained is None:
            answer.spoil()
        else:
            answer.gain(told.gained, self.page, len(self.accepted.prompt) + len(answer.tokens))

    def resumable(self) -> Resumable:
        """What Engine.resume takes: a copy."""
        prompt = self.accepted.prompt
        return Resumable(
            self.accepted,
            [list(answer.tokens) for answer in self.answers],
            [answer.end for answer in self.answers],
            [list(answer.logprobs) for answer in self.answers],
            [answer.saved(prompt) for answer in self.answers],
        )
