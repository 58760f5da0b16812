"""Sequences that share blocks: opening on a known prefix, forking, cropping."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvpager.core.pagetable import ABSENT
from kvpager.core.sequence import Sequence
from kvpager.core.state import State
from kvpager.core.transaction import free_unseen
from kvpager.errors import InputError

__all__ = ["crop", "fork", "open_sequence"]


def open_sequence(state: State, tokens: list[int] | None, salt: bytes) -> Sequence:
    """A new sequence; with token ids it starts with the full blocks that are already held for them under `salt`."""
    sequence = Sequence(state.opened, state, state.shape.layers)
    sequence.root = state.blocks.root(salt)
    state.opened += 1
    if state.config.mode == "discard":
        sequence.view = np.ones((0, state.shape.layers, state.shape.kv_heads), np.bool_)
    elif tokens:
        _share_prefix(state, sequence, tokens)
    state.sequences[sequence.id] = sequence
    return sequence


def _share_prefix(state: State, sequence: Sequence, tokens: list[int]) -> None:
    size, keeper = state.config.page_size, state.keeper
    found = state.blocks.match(tokens, sequence.root)
    more = [] if keeper is None else keeper.keys(tokens, sequence.root, found)
    count = _whole(state, len(found.rows) + len(more))
    found, more = found.first(count), more[: max(0, count - len(found.rows))]
    state.require_tokens(count * size)
    for row in found.rows:
        state.blocks.share(row)
    rows = list(found.rows)
    if more:
        assert keeper is not None
        rows += keeper.adopt(more, sequence.root)
        count = _whole(state, len(rows))
        state.blocks.drop_all(rows[count:][::-1])
        rows = rows[:count]
    shared = more[: len(rows) - len(found.rows)]
    sequence.rows = np.array(rows, np.int64)
    sequence.cost.evictions -= state.table.evictions(sequence.rows)
    sequence.keys = (found.keys + [one.key for one in shared])[: len(rows)]
    sequence.length = len(rows) * size
    sequence.filled[:] = sequence.length
    sequence.tokens = tokens[: sequence.length]
    sequence.announced = list(tokens)
    exact = min(found.exact, len(rows)) + sum(not one.approximate for one in shared)
    if exact < len(rows):
        sequence.approximate_from = exact * size
    state.residency.counters.prefix_tokens_hit += sequence.length


def _whole(state: State, blocks: int) -> int:
    """How many of so many blocks to share: up to a tile boundary where tiles select, so that later tiles select
    exactly as they would have without the hit.
    """
    if state.config.budget is None:
        return blocks
    size = state.config.page_size
    return blocks * size // state.config.tile * state.config.tile // size


def fork(state: State, parent: Sequence) -> Sequence:
    """A sequence that goes on from where `parent` is: full blocks are shared, the open one is copied."""
    size = state.config.page_size
    full = parent.length // size
    rows = parent.rows.copy()
    if parent.length % size:
        rows[full] = _copy_block(state, int(parent.rows[full]))
    for row in rows[:full].tolist():
        state.blocks.hold(row)
    child = Sequence(state.opened, state, state.shape.layers)
    state.opened += 1
    child.rows = rows
    child.length = parent.length
    child.filled = parent.filled.copy()
    child.tokens = list(parent.tokens)
    child.announced = list(parent.announced)
    child.root, child.keys = parent.root, list(parent.keys)
    child.approximate_from, child.private_from = parent.approximate_from, parent.private_from
    child.view = None if parent.view is None else parent.view.copy()
    child.tick = parent.tick
    child.cost = replace(parent.cost)
    state.sequences[child.id] = child
    return child


def _copy_block(state: State, source: int) -> int:
    """Copy a block to a new row whose pages are open; returns the row. Nothing changes where it fails."""
    table, pool, residency = state.table, state.pool, state.residency
    target = state.blocks.take()
    state.fit()
    heads = np.arange(table.heads)
    layers = np.arange(table.layers)
    try:
        flat = table.flat(np.full((table.layers, 1), target), 0, heads) + layers[:, None] * table.heads
        frames = pool.allocate(flat.ravel(), residency.make_room).reshape(flat.shape)
        table.frame[target] = frames
        for layer in range(table.layers):
            came, _ = residency.fault(table.flat(source, layer, heads))
            residency.storage.copy(came, frames[layer])
    except BaseException:
        state.blocks.drop(target)
        raise
    state.scorer.copy(source, target)
    return target


def crop(state: State, cuts: list[tuple[Sequence, int]]) -> None:
    """Of each sequence, forget all tokens from its length on; where one can't be cropped, none is.

    A full block that becomes open is copied, for others may share it.
    """
    size = state.config.page_size
    for sequence, length in cuts:
        index, rest = divmod(length, size)
        if rest and sequence.view is not None and not sequence.view[index].all():
            raise InputError(f"crop: pages of positions {index * size}..{length - 1} were discarded; keep more or less")
    copies: dict[int, int] = {}
    try:
        for sequence, length in cuts:
            if length % size and bool(state.table.sealed[sequence.rows[length // size]].any()):
                copies[sequence.id] = _copy_block(state, int(sequence.rows[length // size]))
    except BaseException:
        for row in copies.values():
            state.blocks.drop(row)
        raise
    for sequence, length in cuts:
        _cut(state, sequence, length, copies.get(sequence.id))


def _cut(state: State, sequence: Sequence, length: int, copy: int | None) -> None:
    """Forget tokens from `length` on; `copy` is the row that takes the place of the block that becomes open."""
    size = state.config.page_size
    index, rest = divmod(length, size)
    if copy is not None:
        state.blocks.drop(int(sequence.rows[index]))
    keep = index + (rest > 0)
    kept, dropped = sequence.rows[:keep].copy(), sequence.rows[keep:]
    state.blocks.drop_all(dropped[::-1].tolist())
    if copy is not None:
        kept[index] = copy
    sequence.rows = kept
    if sequence.view is not None:
        sequence.view = sequence.view[:keep].copy()
        free_unseen(state, dropped)
    sequence.length = length
    sequence.filled[:] = length
    sequence.tokens = sequence.tokens[:length]
    sequence.announced = sequence.announced[:length]
    sequence.keys = sequence.keys[: length // size]
    if sequence.approximate_from is not None and sequence.approximate_from >= length:
        sequence.approximate_from = None
    if sequence.private_from is not None and sequence.private_from >= length:
        sequence.private_from = None
    # a shorter sequence's sliding windows reach further back
    state.table.expired[sequence.rows] = False
    assert not rest or (state.table.frame[sequence.rows[index]] != ABSENT).all(), "an open block is not in the pool"
