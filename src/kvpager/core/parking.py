"""Parking: a sequence gives up its frames, keeps its place, and goes on later without anything computed again."""

from __future__ import annotations

import numpy as np

from kvpager.core.pagetable import ABSENT
from kvpager.core.sequence import Sequence
from kvpager.core.state import State
from kvpager.core.transaction import frames_needed
from kvpager.errors import SwapError
from kvpager.ports import IntArray

__all__ = ["park", "parked_bytes", "stashed", "unpark"]


def park(state: State, sequence: Sequence) -> None:
    """Move a sequence's pages to swap: those that no other running sequence holds leave the pool.

    Raises SwapError with nothing changed, but that blocks kept for reuse may have made way.
    """
    residency, table = state.residency, state.table
    own = _open_pages(state, sequence)
    frames = table.frame.reshape(-1)
    open_frames = frames[own].astype(np.int64)
    full = _unshared(state, sequence)
    full = full[frames[full] != ABSENT]
    full_frames = frames[full].astype(np.int64)
    while True:
        try:
            sequence.stash = residency.store(open_frames, full_frames)
            break
        except SwapError:
            # as when a frame is needed: what is only kept for reuse makes way
            if not state.blocks.reclaim():
                raise
    residency.leave(full_frames)
    residency.free(own)


def unpark(state: State, sequence: Sequence) -> None:
    """Bring a parked sequence's open pages back into frames; the others come when attention wants them.

    Raises PoolExhausted, PageLost or SwapError with nothing changed.
    """
    assert sequence.stash is not None
    state.require_frames(frames_needed(state, {sequence.id: 0}), "what runs, and the sequence that was parked,")
    state.residency.restore(_open_pages(state, sequence), sequence.stash)
    sequence.stash = None


def stashed(state: State) -> int:
    """Slots in swap that hold pieces of open pages."""
    return sum(len(sequence.stash) for sequence in state.sequences.values() if sequence.stash is not None)


def parked_bytes(state: State) -> int:
    """Bytes in swap of the pages that parked sequences hold."""
    rows = [sequence.rows for sequence in state.sequences.values() if sequence.parked]
    if not rows:
        return 0
    slots = int((state.table.slot[np.unique(np.concatenate(rows))] != ABSENT).sum())
    return (slots + stashed(state)) * state.page_bytes


def _open_pages(state: State, sequence: Sequence) -> IntArray:
    """Flat indices of the open block's pages in all layers: [layers * heads], or none."""
    if sequence.length % state.config.page_size == 0:
        return np.empty(0, np.int64)
    return state.table.pages(sequence.rows[-1:])


def _unshared(state: State, sequence: Sequence) -> IntArray:
    """Flat indices of the pages of full blocks that no other running sequence holds."""
    rows = sequence.rows[: sequence.length // state.config.page_size]
    others = [other.rows for other in state.sequences.values() if other is not sequence and not other.parked]
    return state.table.pages(rows[~np.isin(rows, np.concatenate([rows[:0], *others]))])
