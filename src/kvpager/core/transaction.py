"""Steps as transactions: begin, commit, rollback; and writing new keys and values inside them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from kvpager.core.blocks import Name, packed
from kvpager.core.pagetable import ABSENT
from kvpager.core.sequence import Member, Saved, Sequence, Step
from kvpager.core.state import State
from kvpager.errors import PageLost, StepError
from kvpager.ports import IntArray, Layer, States

__all__ = ["begin", "close", "commit", "frames_needed", "free_unseen", "guarded", "implicit", "rollback", "write"]


def frames_needed(state: State, growth: dict[int, int]) -> int:
    """The frames without which a step that adds `growth` tokens (by sequence id) cannot run.

    Recall: the open pages of all live sequences, those that the step opens, and one group. Parked sequences are left
    out, unless they are among `growth`: then they count as if they were back.
    Discard: what the views may hold, and one layer's incoming chunk.
    """
    config, shape = state.config, state.shape
    size, block = config.page_size, shape.layers * shape.kv_heads
    needed = longest = 0
    for sequence in state.sequences.values():
        if sequence.parked and sequence.id not in growth:
            continue
        more = growth.get(sequence.id, 0)
        total = -(-(sequence.length + more) // size)
        if config.mode == "discard":
            assert config.budget_pages is not None
            kept = min(total, config.budget_pages + -(-config.tile // size) + 1)
            needed += kept * block + -(-more // size) * shape.kv_heads
        else:
            longest = max(longest, total)
            open_now = sequence.length % size > 0
            opens = more > 0 and sequence.length % size + more > (size if open_now else 0)
            needed += (open_now + opens) * block
    return needed + state.group_frames(longest)


def begin(state: State, growth: list[Member], tokens: dict[int, list[int]], layer: int | None) -> Step:
    """Open a step in which sequences grow; `layer` names the only one that the implicit step of one call touches.

    Raises PoolExhausted, with nothing changed, when the step can never fit.
    """
    config = state.config
    layers = range(state.shape.layers) if layer is None else range(layer, layer + 1)
    ends = [int(sequence.filled[layers.start]) + count for sequence, count in growth]
    state.require_tokens(
        sum(max(0, end - int(sequence.filled.max())) for (sequence, _), end in zip(growth, ends, strict=True))
    )
    counts = {sequence.id: count for sequence, count in growth}
    state.require_frames(frames_needed(state, counts), "the step")
    step = Step(
        saved=[Saved.of(sequence) for sequence, _ in growth],
        counts=counts if layer is None else None,
        tokens=tokens,
        tick=state.residency.clock.tick,
        layers=slice(layers.start, layers.stop),
    )
    state.residency.clock.tick += 1
    held = []
    for (sequence, _), end in zip(growth, ends, strict=True):
        sequence.tick += 1
        _add_blocks(state, sequence, end)
        # all layers of a step have had as much
        filled = int(sequence.filled[layers.start])
        if filled % config.page_size:
            held.append(sequence.rows[filled // config.page_size])
    step.held = np.array(held, np.int64)
    state.scorer.begin([one.part(0, len(one.rows)) for one, _ in growth], step.layers)
    state.step = step
    return step


def _add_blocks(state: State, sequence: Sequence, tokens: int) -> None:
    more = -(-tokens // state.config.page_size) - len(sequence.rows)
    if more <= 0:
        return
    fresh = np.array([state.blocks.take() for _ in range(more)], np.int64)
    sequence.rows = np.concatenate([sequence.rows, fresh])
    state.fit()
    if sequence.view is not None:
        seen = np.ones((more, state.shape.layers, state.shape.kv_heads), np.bool_)
        sequence.view = np.concatenate([sequence.view, seen])


class _Wave(NamedTuple):
    """New tokens whose new pages are in frames together.

    rows, positions   new blocks, and which of its sequence each is; sequences: theirs
    pieces            what goes where (see ports.Kernel.write)
    full              rows that are full now; fresh: those of them that the step began
    """

    rows: IntArray
    positions: IntArray
    sequences: list[Sequence]
    pieces: IntArray
    full: IntArray
    fresh: IntArray


def write(state: State, step: Step, members: list[Member], layer: int, keys: States, values: States) -> None:
    """Write new tokens of one layer, [H, T, D], sequence after sequence; full pages are sealed and get their digest."""
    key = tuple((sequence.id, count, int(sequence.filled[layer])) for sequence, count in members)
    waves = step.plans.get(key)
    if waves is None:
        waves = step.plans[key] = _waves(state, members, layer)
    table, residency = state.table, state.residency
    for wave in waves:
        if wave.rows.size:
            residency.place(wave.rows, layer)
            ticks = np.array([state.attender.now(sequence) for sequence in wave.sequences])
            state.scorer.born(wave.rows, layer, wave.positions, ticks)
        place = Layer(residency.storage, table.frame, layer)
        state.kernel.write(place, wave.pieces, keys, values, state.digest, wave.full)
        if wave.full.size:
            table.sealed[wave.full, layer] = True
        if wave.fresh.size:
            frames = table.frame[wave.fresh, layer].ravel().astype(np.int64)
            state.pool.evictable[frames] = True
            residency.storage.finish(frames)
    for sequence, count in members:
        sequence.filled[layer] += count


def _waves(state: State, members: list[Member], layer: int) -> list[_Wave]:
    """Cut what a layer gets so that no more new pages than a group has must be in frames at a time."""
    size = state.config.page_size
    most = max(1, state.group_pages // state.shape.kv_heads)
    waves: list[_Wave] = []
    pieces: list[tuple[int, int, int, int]] = []
    opened: list[tuple[Sequence, int]] = []

    def close_wave() -> None:
        parts = np.array(pieces, np.int64)
        ended = parts[parts[:, 1] + parts[:, 3] == size]
        rows = np.array([sequence.rows[index] for sequence, index in opened], np.int64)
        positions = np.array([index for _, index in opened], np.int64)
        sequences = [sequence for sequence, _ in opened]
        full, fresh = np.ascontiguousarray(ended[:, 0]), ended[ended[:, 1] == 0, 0]
        waves.append(_Wave(rows, positions, sequences, parts, full, fresh))
        pieces.clear()
        opened.clear()

    token = 0
    for sequence, count in members:
        at = int(sequence.filled[layer])
        end = at + count
        while at < end:
            index, offset = divmod(at, size)
            tokens = min(size - offset, end - at)
            if not offset:
                if len(opened) == most:
                    close_wave()
                opened.append((sequence, index))
            pieces.append((int(sequence.rows[index]), offset, token, tokens))
            at += tokens
            token += tokens
    close_wave()
    return waves


def commit(state: State, step: Step) -> None:
    """Make the step's tokens part of their sequences. Raises StepError where a layer has not had them all."""
    if step.failed:
        raise StepError("commit: a call of this step failed; roll it back")
    if step.counts is not None:
        for saved in step.saved:
            sequence = saved.sequence
            missing = np.flatnonzero(sequence.filled != sequence.length + step.counts[sequence.id])
            if missing.size:
                raise StepError(
                    f"commit: sequence {sequence.id} got no keys in layers {missing.tolist()}; "
                    "append to every layer first"
                )
    if step.held.size:
        frames = state.table.frame[step.held, step.layers][state.table.sealed[step.held, step.layers]]
        frames = frames[frames != ABSENT].astype(
            np.int64
        )  # in discard mode a page may have been dropped since it filled
        if frames.size:
            state.pool.evictable[frames] = True
            state.residency.storage.finish(frames)
    for saved in step.saved:
        sequence = saved.sequence
        before, sequence.length = sequence.length, int(sequence.filled.min())
        _name_blocks(state, sequence, before, step.tokens.get(sequence.id))
    state.settle_dropped(step)
    state.scorer.keep()
    state.step = None
    counters = state.residency.counters
    counters.most_tokens = max(counters.most_tokens, state.tokens)
    state.residency.write_behind()
    if state.keeper is not None:
        state.keeper.flush()


def _name_blocks(state: State, sequence: Sequence, before: int, given: list[int] | None) -> None:
    """Register the blocks whose tokens are known without a gap and that others may share."""
    if len(sequence.tokens) == before:
        sequence.tokens += sequence.announced[before : sequence.length] if given is None else given
    if state.config.mode == "discard":
        return
    size = state.config.page_size
    end = len(sequence.tokens) if sequence.private_from is None else min(len(sequence.tokens), sequence.private_from)
    for index in range(len(sequence.keys), end // size):
        stop = (index + 1) * size
        approximate = sequence.approximate_from is not None and stop > sequence.approximate_from
        parent = sequence.keys[-1] if sequence.keys else sequence.root
        row, tokens = int(sequence.rows[index]), packed(sequence.tokens[stop - size : stop])
        key = state.blocks.keys.key(parent, tokens, approximate)
        sequence.keys.append(key)
        name = Name(key, parent, sequence.root, index, tokens, approximate)
        if state.blocks.register(row, name) and state.keeper is not None:
            state.keeper.offer(row)


def rollback(state: State, step: Step) -> None:
    """Undo the open step: lengths, pages, views and scores are as before it began.

    In discard mode a sequence of which dropped pages had to be given up meanwhile cannot be put back: it is closed.
    """
    state.step = None
    # held pages never left the pool; those that filled are open again
    state.table.sealed[step.held, step.layers] = False
    state.scorer.undo()
    for saved in step.saved:
        state.blocks.drop_all(saved.restore().tolist())
        _empty_ahead(state, saved.sequence)
    state.residency.clock.tick = step.tick
    for sequence in step.broken:
        close(state, sequence)


def _empty_ahead(state: State, sequence: Sequence) -> None:
    """Give back pages that a step began in blocks that other layers had reached before it."""
    for layer, filled in enumerate(sequence.filled.tolist()):
        ahead = sequence.rows[-(-filled // state.config.page_size) :]
        if ahead.size:
            state.residency.release(ahead, layer)


@contextmanager
def guarded(state: State) -> Iterator[None]:
    """Mark the open step as failed when a call inside it fails half-way; lost pages are told by sequence."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, PageLost):
            _blame(state, error)
        if state.step is not None:
            state.step.failed = True
        raise


def _blame(state: State, lost: PageLost) -> None:
    """Name the sequences that hold lost pages, and let nobody else find them. Before a rollback, which changes rows."""
    lost.sequences = tuple(one.id for one in state.sequences.values() if np.isin(one.rows, lost.rows).any())
    for row in lost.rows:
        state.blocks.unname(row)


@contextmanager
def implicit(state: State, sequence: Sequence, tokens: int, layer: int) -> Iterator[Step]:
    """The step of a single call outside begin/commit: committed when it succeeds, rolled back when it fails."""
    step = begin(state, [(sequence, tokens)], {}, layer)
    try:
        yield step
    except BaseException:
        rollback(state, step)
        raise
    commit(state, step)


def close(state: State, sequence: Sequence) -> None:
    """Let go of all blocks of a sequence."""
    sequence.closed = True
    del state.sequences[sequence.id]
    if state.keeper is not None:
        state.keeper.tell(sequence.rows)
    sequence.cost.evictions += state.table.evictions(sequence.rows)
    # what is cached last is reclaimed last: leading blocks are worth most, so they are let go of last
    state.blocks.drop_all(sequence.rows[::-1].tolist())
    if sequence.view is not None:
        free_unseen(state, sequence.rows)
    sequence.rows = sequence.rows[:0]
    if sequence.stash is not None:
        assert state.swap is not None
        state.swap.free(sequence.stash)
        sequence.stash = None


def free_unseen(state: State, rows: IntArray) -> None:
    """Discard mode: free resident pages of rows that other sequences hold but no longer see."""
    shared = [row for row in rows.tolist() if state.blocks.references[row]]
    for row in shared:
        within = np.flatnonzero(state.table.frame[row].reshape(-1) != ABSENT)
        state.residency.free(state.unseen(row * state.table.layers * state.table.heads + within))
