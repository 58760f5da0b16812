"""What sequences have gained since they were told last, for a journal: in one go for all sequences of a step.

A step costs the same however long its sequences are: of a full block there is its key, and of the open one the tokens
that are new.
"""

from __future__ import annotations

from collections.abc import Sequence as Listed
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpager.core.keeping import Keeper
from kvpager.core.saving import SavedSequence, header, name_block
from kvpager.core.sequence import Sequence
from kvpager.core.state import State
from kvpager.journaled import Gained, Saved
from kvpager.stored import KEY_BYTES

__all__ = ["Mark", "joined", "tell"]


@dataclass
class Mark:
    """How far a sequence was told: its tokens, its full blocks, the key of the last of these, and how many of them the
    store knows the scores of. `own` are keys of those that only this sequence goes on with.
    """

    length: int = 0
    blocks: int = 0
    parent: bytes = b""
    scored: int = 0
    own: set[bytes] = field(default_factory=set)

    def begin_anew(self) -> None:
        """Nothing counts as told."""
        self.length = self.blocks = self.scored = 0
        self.parent = b""


@dataclass
class _Open:
    """Tokens of open blocks that are to be read: whose they are, and where they lie."""

    places: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    frames: list[npt.NDArray[np.int64]] = field(default_factory=list)
    offsets: list[npt.NDArray[np.int64]] = field(default_factory=list)


def tell(state: State, keeper: Keeper, marked: Listed[tuple[Sequence, Mark]], scores: bool) -> list[Gained | None]:
    """What each sequence has gained since its mark, which moves on; None where that is nothing, or can't be told.

    All full blocks are handed to the store, and asked to be published. With `scores`, those of open blocks are told
    too, and the store hears those of blocks that have become full.
    """
    size = state.config.page_size
    keys: list[list[bytes]] = []
    opened = _Open()
    for place, (sequence, mark) in enumerate(marked):
        keys.append([])
        if sequence.parked or len(sequence.tokens) != sequence.length or sequence.length == mark.length:
            continue
        keys[-1] = _keys(state, keeper, sequence, mark)
        full = sequence.length // size
        if mark.blocks + len(keys[-1]) == full and sequence.length % size:
            opened.places.append(place)
            first, stop = max(mark.length - full * size, 0), sequence.length % size
            frames = state.table.frame[sequence.rows[full]].reshape(-1).astype(np.int64)
            opened.counts.append(stop - first)
            opened.frames.append(np.tile(frames, stop - first))
            opened.offsets.append(np.repeat(np.arange(first, stop), len(frames)))
    slots, told = _read(state, opened), _scores(state, marked, opened) if scores else {}
    new = [key for some in keys for key in some]
    if new:
        keeper.publish(new)  # which offers them again, should the store have let them go before
    gained: list[Gained | None] = []
    for place, (sequence, mark) in enumerate(marked):
        whole = mark.blocks + len(keys[place]) == sequence.length // size
        if sequence.length == mark.length or sequence.parked or not whole:
            gained.append(None)
            if not whole:  # a page can't be read: next time all of it is told
                mark.begin_anew()
            continue
        start = max(mark.length, sequence.length // size * size)
        own, first = keys[place], mark.blocks
        mark.length, mark.blocks = sequence.length, first + len(own)
        mark.parent = own[-1] if own else mark.parent
        if scores and mark.scored < mark.blocks:
            keeper.tell(sequence.rows[mark.scored : mark.blocks])
            mark.scored = mark.blocks
        parts = (first, b"".join(own), start, slots.get(place, b""), told.get(place, b""))
        gained.append(Gained(header(state, sequence), *parts))
    return gained


def _keys(state: State, keeper: Keeper, sequence: Sequence, mark: Mark) -> list[bytes]:
    """Keys of the full blocks behind a mark, up to one that can't be read."""
    keys: list[bytes] = []
    parent = mark.parent or sequence.root
    for depth in range(mark.blocks, sequence.length // state.config.page_size):
        key = name_block(state, keeper, sequence, depth, parent)
        if key is None:
            break
        if depth >= len(sequence.keys):
            mark.own.add(key)
        keys.append(key)
        parent = key
    return keys


def _read(state: State, opened: _Open) -> dict[int, bytes]:
    """Tokens of open blocks by place, all read in one call."""
    if not opened.places:
        return {}
    tokens = state.residency.storage.tokens(np.concatenate(opened.frames), np.concatenate(opened.offsets))
    ends = np.cumsum([len(some) for some in opened.frames])[:-1]
    return {place: one.tobytes() for place, one in zip(opened.places, np.split(tokens, ends), strict=True)}


def _scores(state: State, marked: Listed[tuple[Sequence, Mark]], opened: _Open) -> dict[int, bytes]:
    if not opened.places:
        return {}
    rows = np.array([marked[place][0].rows[-1] for place in opened.places], np.int64)
    return {place: one.tobytes() for place, one in zip(opened.places, state.scorer.dump(rows), strict=True)}


def joined(saved: Saved, page_size: int) -> SavedSequence | None:
    """What a journal knows of a sequence, as `Pager.restore` takes it; None for what does not belong together.

    Where the open block is not whole, `restore` goes on from before it.
    """
    length, tokens = saved.header.get("length"), np.array(saved.tokens, np.int64)
    if length != len(tokens) or len(saved.keys) % KEY_BYTES:
        return None
    arrays: dict[str, npt.NDArray[Any]] = {
        "tokens": tokens,
        "keys": np.frombuffer(saved.keys, np.uint8).reshape(-1, KEY_BYTES),
    }
    count = length % page_size
    if count and saved.slots and len(saved.slots) % count == 0:
        arrays["slots"] = np.frombuffer(saved.slots, np.uint8).reshape(count, -1)
    if saved.scores:
        arrays["open_scores"] = np.frombuffer(saved.scores, np.uint8)
    return SavedSequence(saved.header, arrays)
