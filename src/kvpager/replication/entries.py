"""An entry of the journal's stream: what happened to several requests in one step or a few.

Each part of it says which entry the request was in before: so a reader sees what it has missed. What must not be lost
(requests, tokens) is in the frame, which Redis checks before it is acknowledged; keys, slots and scores are beside it,
with a checksum of their own: what is damaged of them is computed anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvpager.journaled import Accepted, Gained, Told
from kvpager.replication.fields import ACCEPTED_RUNS, read_accepted, read_end, write_accepted, write_end
from kvpager.replication.limits import Limits
from kvpager.replication.packing import Damaged, Fields, checksum, pack, text_of, unpack

__all__ = ["Began", "Broken", "Entry", "EntryWriter", "Gone", "Grew", "Part", "Taken", "Whole", "read_entry"]

MOST_PARTS = 2**16
GAINED_RUNS = 3  # keys, slots, scores


@dataclass(frozen=True)
class Taken:
    """A request was taken; `page`: tokens of a block of its."""

    id: str
    accepted: Accepted
    page: int


@dataclass(frozen=True)
class Grew:
    """An answer gained something. before: the number of the entry with the request's part before this one;
    at: how many tokens it had; spoiled: what was gained of its pages is damaged.
    """

    id: str
    before: int
    at: int
    told: Told
    spoiled: bool


@dataclass(frozen=True)
class Whole:
    """A request was written down in full, with this entry in it."""

    id: str


@dataclass(frozen=True)
class Gone:
    """A request goes on without the journal, or is kept no longer."""

    id: str


@dataclass(frozen=True)
class Began:
    """The journal begins anew: what it holds follows, each in full. `done`: that was all; the rest is dropped."""

    done: bool


@dataclass(frozen=True)
class Broken:
    """A part that makes no sense: nothing more is known of this request."""

    id: str
    why: str


Part = Taken | Grew | Whole | Gone | Began | Broken


@dataclass(frozen=True)
class Entry:
    """An entry as it was read. beginning: the stretch of the journal that it is of."""

    beginning: str
    parts: Sequence[Part]


class EntryWriter:
    """Collects the parts of an entry."""

    def __init__(self, beginning: str) -> None:
        self._beginning = beginning
        self._parts: list[bytes] = []
        self._runs: list[bytes] = []
        self._slots: list[bytes] = []

    def __len__(self) -> int:
        return len(self._parts)

    def began(self, done: bool) -> None:
        """See Began."""
        self._parts.append(text_of({"do": "began", "done": done}))

    def whole(self, id: str) -> None:
        """See Whole."""
        self._parts.append(text_of({"do": "whole", "id": id}))

    def gone(self, id: str) -> None:
        """See Gone."""
        self._parts.append(text_of({"do": "gone", "id": id}))

    def taken(self, accepted: Accepted, page: int) -> None:
        """See Taken. Raises ValueError, TypeError or OverflowError for what can't be written."""
        header, runs = write_accepted(accepted, page)
        self._parts.append(text_of({"do": "taken", "id": accepted.id, "taken": header}))
        self._runs += runs

    def grew(self, told: Told, before: int, at: int) -> None:
        """See Grew. Raises ValueError or TypeError for what can't be written."""
        part: dict[str, Any] = {"do": "grew", "id": told.id, "before": before, "index": told.index, "at": at}
        part["tokens"] = list(told.tokens)
        if told.logprobs is not None:
            part["logprobs"] = list(told.logprobs)
        if told.finish_reason is not None:
            part["end"] = write_end(told)
        if (gained := told.gained) is not None:
            part["gained"] = {
                "header": gained.header,
                "first": gained.first,
                "from": gained.slots_from,
                "sizes": [len(gained.keys), len(gained.slots), len(gained.scores)],
                "singles": list(gained.singles),
            }
        self._parts.append(text_of(part))
        if gained is not None:
            self._slots += [gained.keys, gained.slots, gained.scores]

    def pack(self) -> tuple[bytes, bytes]:
        """The frame, and keys, slots and scores."""
        slots = b"".join(self._slots)
        rest = text_of({"beginning": self._beginning, "bytes": len(slots), "sum": checksum(slots).hex()})
        text = b'{"parts":[' + b",".join(self._parts) + b"]," + rest[1:]
        return pack(text, self._runs), slots


def read_entry(frame: bytes, slots: bytes, limits: Limits) -> Entry:
    """An entry of these bytes. Raises Damaged where nothing can be read of it; a part that makes no sense is Broken."""
    header, runs = unpack(frame, limits)
    sound = isinstance(slots, bytes) and header.whole("bytes") == len(slots)
    reader = _Reader(runs, slots if sound and header.text("sum", 64) == checksum(slots).hex() else None, limits)
    return Entry(header.text("beginning", 64), [reader.part(fields) for fields in header.objects("parts", MOST_PARTS)])


class _Reader:
    """Reads parts in order, each with its runs of bytes. slots: None where they are damaged."""

    def __init__(self, runs: list[bytes], slots: bytes | None, limits: Limits) -> None:
        self._runs, self._slots, self._limits = runs, slots, limits
        self._place = 0

    def part(self, fields: Fields) -> Part:
        """The next part."""
        kind = fields.text("do", 16)
        if kind == "began":
            return Began(fields.truth("done"))
        id = fields.text("id")
        try:
            return self._part(kind, id, fields)
        except Damaged as error:
            self._slots = None  # where the next part's begin is not known any more
            return Broken(id, str(error))

    def _part(self, kind: str, id: str, fields: Fields) -> Part:
        if kind == "whole":
            return Whole(id)
        if kind == "gone":
            return Gone(id)
        if kind == "taken":
            runs, self._runs = self._runs[:ACCEPTED_RUNS], self._runs[ACCEPTED_RUNS:]
            if len(runs) < ACCEPTED_RUNS:
                raise Damaged("runs")
            accepted, page = read_accepted(fields.fields("taken"), runs, self._limits)
            if accepted.id != id:
                raise Damaged("id")
            return Taken(id, accepted, page)
        if kind != "grew":
            raise Damaged("part")
        return self._grew(id, fields)

    def _grew(self, id: str, fields: Fields) -> Grew:
        gained, spoiled = None, False
        if (told := fields.maybe_fields("gained")) is not None:
            gained = self._gained(told)
            spoiled = gained is None
        end = fields.maybe_fields("end")
        tokens = fields.tokens("tokens")
        logprobs = fields.mappings("logprobs") if fields.has("logprobs") else None
        if logprobs is not None and len(logprobs) != len(tokens):
            raise Damaged("logprobs")
        more = {} if end is None else read_end(end)
        grown = Told(id, fields.whole("index", 2**16), tokens, logprobs, gained, **more)
        return Grew(id, fields.whole("before"), fields.whole("at"), grown, spoiled)

    def _gained(self, fields: Fields) -> Gained | None:
        """What was gained; None where its bytes are damaged."""
        sizes = fields.listed("sizes", GAINED_RUNS)
        if len(sizes) != GAINED_RUNS or not all(type(size) is int and size >= 0 for size in sizes):
            raise Damaged("sizes")
        header, singles = fields.mapping("header"), fields.ranges("singles")
        first, begin = fields.whole("first"), fields.whole("from")
        if self._slots is None:
            return None
        if self._place + sum(sizes) > len(self._slots):
            raise Damaged("sizes")
        runs = []
        for size in sizes:
            runs.append(self._slots[self._place : self._place + size])
            self._place += size
        return Gained(header, first, runs[0], begin, runs[1], runs[2], singles)
