"""What is stored of a session between two of its requests, as bytes and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvpager.core.saving import SavedSequence
from kvpager.engine.schedule import Range
from kvpager.errors import StoreError
from kvpager.stores.records import pack_record, unpack_record

__all__ = ["SessionRecord"]

FORMAT = 1


@dataclass(frozen=True)
class SessionRecord:
    """A session's last request, once it has ended.

    sequence   what it held
    singles    the ranges of it that were computed one token at a time (see engine.schedule)
    seed       from which each turn has its own; turn: which one this was, from 0
    cut_short  of a request that was ended before its answer was complete: what tells it from others; else ""
    output     its answer's tokens, as far as it had come
    """

    sequence: SavedSequence
    singles: Sequence[Range]
    seed: int
    turn: int
    cut_short: str = ""
    output: list[int] = field(default_factory=list)

    def pack(self) -> bytes:
        """Its bytes. Raises InputError where they would be too many."""
        own = {"format": FORMAT, "seed": self.seed, "turn": self.turn, "cut_short": self.cut_short}
        arrays = {f"sequence.{name}": array for name, array in self.sequence.arrays.items()}
        arrays["singles"] = np.array(self.singles, np.int64).reshape(-1, 2)
        arrays["output"] = np.array(self.output, np.int64)
        return pack_record({"session": own, "sequence": dict(self.sequence.header)}, arrays)

    @classmethod
    def unpack(cls, data: bytes) -> SessionRecord | None:
        """The record of these bytes; None for what is damaged, of another version, or of something else."""
        try:
            header, arrays = unpack_record(data)
            own, sequence = header["session"], header["sequence"]
            if own["format"] != FORMAT:
                return None
            parts = {name.partition(".")[2]: array for name, array in arrays.items() if name.startswith("sequence.")}
            return cls(
                SavedSequence(sequence, parts),
                [(start, stop) for start, stop in arrays["singles"].tolist()],
                own["seed"],
                own["turn"],
                own["cut_short"],
                arrays["output"].tolist(),
            )
        except (StoreError, KeyError, TypeError, ValueError):
            return None
