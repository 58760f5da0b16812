"""What is stored of a session between two of its requests, as bytes and back.

A record bears a seal: a hash of all of it, keyed with a secret of its tenant's salt and its name. What somebody else
has written or changed, or another session's record, is no record, though every checksum be right. Where tenants have
salts, nobody can make a seal who does not know the salt; where they have none, it tells mistakes from records.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpager.core.saving import SavedSequence
from kvpager.engine.schedule import Range
from kvpager.errors import KVPagerError
from kvpager.stores.records import pack_record, unpack_record

__all__ = ["SessionRecord", "sealed"]

FORMAT = 2
MOST_SEED, MOST_TURN = 2**63, 2**62


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

    def pack(self, secret: bytes) -> bytes:
        """Its bytes, sealed. Raises InputError where they would be too many."""
        own = {"format": FORMAT, "seed": self.seed, "turn": self.turn, "cut_short": self.cut_short}
        arrays = {f"sequence.{name}": array for name, array in self.sequence.arrays.items()}
        arrays["singles"] = np.array(self.singles, np.int64).reshape(-1, 2)
        arrays["output"] = np.array(self.output, np.int64)
        header = {"session": own, "sequence": dict(self.sequence.header)}
        return sealed(header, arrays, secret)

    @classmethod
    def unpack(cls, data: bytes, secret: bytes, vocabulary: int) -> SessionRecord | None:
        """The record of these bytes, its tokens below `vocabulary`.

        None for what is damaged, of another version, sealed otherwise, or of something else. Its sequence is looked at
        by who restores it.
        """
        try:
            header, arrays = unpack_record(data)
            seal = header.pop("seal")
            if not hmac.compare_digest(str(seal).encode(), _seal(header, arrays, secret).encode()):
                return None
            return _read(header, arrays, vocabulary)
        except (KVPagerError, KeyError, TypeError, ValueError):
            return None


def sealed(header: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]], secret: bytes) -> bytes:
    """The bytes of a record of these parts with its seal."""
    return pack_record({**header, "seal": _seal(header, arrays, secret)}, arrays)


def _seal(header: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]], secret: bytes) -> str:
    return hashlib.blake2b(pack_record(header, arrays), key=secret, digest_size=32).hexdigest()


def _read(header: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]], vocabulary: int) -> SessionRecord | None:
    """A record of these parts; None, KeyError or TypeError where they are none."""
    own, sequence = header["session"], header["sequence"]
    form, seed, turn, cut_short = (own[name] for name in ("format", "seed", "turn", "cut_short"))
    if not all(type(one) is int for one in (form, seed, turn)) or not isinstance(sequence, dict):
        return None
    if form != FORMAT or not 0 <= seed < MOST_SEED or not 0 <= turn < MOST_TURN or not isinstance(cut_short, str):
        return None
    singles, output = arrays["singles"], arrays["output"]
    whole = np.dtype(np.int64)
    if (singles.dtype, singles.shape[1:], output.dtype, output.ndim) != (whole, (2,), whole, 1):
        return None
    ranges = [(start, stop) for start, stop in singles.tolist()]
    if (
        not _in_order(ranges)
        or not bool(((output >= 0) & (output < vocabulary)).all())
        or (output.size and not cut_short)
    ):
        return None
    parts = {name.partition(".")[2]: array for name, array in arrays.items() if name.startswith("sequence.")}
    return SessionRecord(SavedSequence(sequence, parts), ranges, seed, turn, cut_short, output.tolist())


def _in_order(ranges: list[Range]) -> bool:
    """Whether ranges lie one behind the other, none touching the next, behind at least one token."""
    return all(0 < start <= stop for start, stop in ranges) and all(a[1] < b[0] for a, b in pairwise(ranges))
