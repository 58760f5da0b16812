"""A sequence that outlives its pager: what is kept of it beside its blocks, and how it goes on from there.

Full blocks go to the store, also those that belong to this sequence alone (written while a selection left pages out):
these have keys of their own, made of their pages. The open block, the tokens, and the numbers that decide how later
blocks are named make up the rest. What is restored goes on as the sequence would have: the same pages, digests and
scores, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpager.core.blocks import Name, packed
from kvpager.core.keeping import Keeper, Wanted
from kvpager.core.sequence import Sequence
from kvpager.core.sound import FORMAT, sound
from kvpager.core.state import State, approximate_settings
from kvpager.core.transaction import frames_needed
from kvpager.errors import KVPagerError, PageLost, SwapError
from kvpager.stored import KEY_BYTES

__all__ = ["SavedSequence", "restore", "save"]


@dataclass(frozen=True)
class SavedSequence:
    """What `Pager.save` gives and `Pager.restore` takes.

    header  of numbers and texts, as JSON can hold them
    arrays  "tokens" int64 [length], "keys" uint8 [full blocks, 32]; of the open block, if there is one, "slots" uint8
            [its tokens, n]: keys and values, and "open_scores" uint8 [n], which may be missing
    """

    header: Mapping[str, Any]
    arrays: Mapping[str, npt.NDArray[Any]]

    @property
    def tokens(self) -> list[int]:
        """The tokens that it holds."""
        tokens: list[int] = self.arrays["tokens"].tolist()
        return tokens


def save(state: State, keeper: Keeper, sequence: Sequence) -> SavedSequence | None:
    """Offer the store all full blocks of a sequence, and tell what else there is to it.

    None where it can't go on elsewhere: tokens that were never told, or a page that can't be read.
    """
    size = state.config.page_size
    if len(sequence.tokens) != sequence.length:
        return None
    keys = _named(state, keeper, sequence)
    if keys is None:
        return None
    keeper.flush()
    keeper.tell(sequence.rows[: len(keys)])
    arrays: dict[str, npt.NDArray[Any]] = {
        "tokens": np.array(sequence.tokens, np.int64),
        "keys": np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES),
    }
    if sequence.length % size:
        row = sequence.rows[-1:]
        try:
            arrays["slots"] = _slots(state, sequence)
        except (PageLost, SwapError):
            return None
        arrays["open_scores"] = state.scorer.dump(row)[0]
    return SavedSequence(header(state, sequence), arrays)


def header(state: State, sequence: Sequence) -> dict[str, Any]:
    """What a saved sequence is read by; of one size, however long the sequence is."""
    size = state.config.page_size
    return {
        "format": FORMAT,
        "namespace": state.blocks.keys.namespace,
        "scores": state.scorer.kind,
        "length": sequence.length,
        "exact": _count(sequence, sequence.approximate_from, size),
        "chain": len(sequence.keys),
        "approximate": approximate_settings(state.config),
        "approximate_from": sequence.approximate_from,
        "private_from": sequence.private_from,
    }


def _count(sequence: Sequence, start: int | None, size: int) -> int:
    """How many of a sequence's full blocks lie before position `start`."""
    return (sequence.length if start is None else min(start, sequence.length)) // size


def _named(state: State, keeper: Keeper, sequence: Sequence) -> list[bytes] | None:
    """Keys of all full blocks; None where a page can't be read."""
    keys: list[bytes] = []
    for depth in range(sequence.length // state.config.page_size):
        key = name_block(state, keeper, sequence, depth, keys[-1] if keys else sequence.root)
        if key is None:
            return None
        keys.append(key)
    return keys


def name_block(state: State, keeper: Keeper, sequence: Sequence, depth: int, parent: bytes) -> bytes | None:
    """The key of a full block behind `parent`: where it has none, one of its own, by which it is offered to the store.

    None where a page can't be read.
    """
    if depth < len(sequence.keys):
        return sequence.keys[depth]
    size, blocks, row = state.config.page_size, state.blocks, int(sequence.rows[depth])
    name = blocks.name(row)
    if name is not None:
        return name.key
    tokens = packed(sequence.tokens[depth * size : (depth + 1) * size])
    try:
        pages = state.residency.pages_of(row)
    except (PageLost, SwapError):
        return None
    key = blocks.keys.private(sequence.root, parent, tokens, pages)
    approximate = sequence.approximate_from is not None and (depth + 1) * size > sequence.approximate_from
    if blocks.register(row, Name(key, parent, sequence.root, depth, tokens, approximate)):
        keeper.offer(row)
    return key


def _slots(state: State, sequence: Sequence) -> npt.NDArray[np.uint8]:
    """The open block token by token, from its frames, or from swap while it is parked."""
    count, storage = sequence.length % state.config.page_size, state.residency.storage
    frames = state.table.frame[sequence.rows[-1]].reshape(-1).astype(np.int64)
    if sequence.stash is not None:
        assert state.swap is not None
        storage, frames = state.kernel.storage(len(frames), state.shape, state.config.page_size), np.arange(len(frames))
        storage.resume(frames, state.swap.read(sequence.stash))
    tokens = storage.tokens(np.tile(frames, count), np.repeat(np.arange(count), len(frames)))
    return tokens.reshape(count, -1)


def restore(state: State, keeper: Keeper, saved: SavedSequence, prompt: list[int], salt: bytes) -> Sequence | None:
    """A sequence that holds the longest part of `saved` from which `prompt` goes on; see Pager.restore."""
    size, root = state.config.page_size, state.blocks.root(salt)
    if not sound(state, saved, root):
        return None
    tokens = saved.tokens
    length = _usable(state, tokens, prompt)
    start = saved.header["approximate_from"]
    if start is not None and saved.header["approximate"] != approximate_settings(state.config):
        length = min(length, _boundary(state, start))  # what another budget left out is not to be gone on from
    run = _run(saved, root, length // size, size)
    length = _cut(state, length, keeper.present(run))
    if length % size and "slots" not in saved.arrays:
        length = _boundary(state, length)
    state.require_tokens(length)
    rows = keeper.adopt(run[: length // size], root)
    try:
        kept = _cut(state, length, len(rows))
        sequence = _sequence(state, saved, rows[: kept // size], kept, root)
        whole = not kept % size or _reopen(state, sequence, saved)
    except KVPagerError:
        state.blocks.drop_all(rows[::-1])
        raise
    if not whole:
        state.blocks.drop_all(rows[::-1])
        return None
    state.blocks.drop_all(rows[kept // size :][::-1])
    sequence.cost.evictions -= state.table.evictions(sequence.rows)
    state.sequences[sequence.id] = sequence
    state.residency.counters.prefix_tokens_hit += sequence.length
    return sequence


def _usable(state: State, tokens: list[int], prompt: list[int]) -> int:
    """Tokens of a saved sequence from which a prompt can go on: all of them, or up to a tile boundary."""
    most = min(len(tokens), len(prompt) - 1)
    same = next((i for i in range(most) if tokens[i] != prompt[i]), most)
    return same if same == len(tokens) else _boundary(state, same)


def _boundary(state: State, tokens: int) -> int:
    """The last tile boundary, and block's end, at or before so many tokens."""
    unit = max(state.config.tile, state.config.page_size)
    return tokens // unit * unit


def _cut(state: State, length: int, blocks: int) -> int:
    """The same length where there are `blocks` full blocks of it, else the last tile boundary that they reach."""
    size = state.config.page_size
    if blocks >= length // size:
        return length
    return _boundary(state, blocks * size)


def _run(saved: SavedSequence, root: bytes, count: int, size: int) -> list[Wanted]:
    exact, tokens = saved.header["exact"], saved.tokens
    run: list[Wanted] = []
    parent = root
    for depth in range(min(count, len(saved.arrays["keys"]))):
        key = saved.arrays["keys"][depth].tobytes()
        run.append(Wanted(key, parent, depth, packed(tokens[depth * size : (depth + 1) * size]), depth >= exact))
        parent = key
    return run


def _sequence(state: State, saved: SavedSequence, rows: list[int], length: int, root: bytes) -> Sequence:
    """A sequence that is not among the pager's yet, its open block still missing."""
    header = saved.header
    sequence = Sequence(state.opened, state, state.shape.layers)
    state.opened += 1
    sequence.root = root
    sequence.rows = np.array(rows, np.int64)
    sequence.keys = [key.tobytes() for key in saved.arrays["keys"][: min(header["chain"], len(rows))]]
    sequence.length = length
    sequence.filled[:] = length
    sequence.tokens = saved.tokens[:length]
    sequence.announced = list(sequence.tokens)
    for name in ("approximate_from", "private_from"):
        start = header[name]
        setattr(sequence, name, start if start is not None and start < length else None)
    return sequence


def _reopen(state: State, sequence: Sequence, saved: SavedSequence) -> bool:
    """Give a sequence its open block; False where its numbers can be nobody's.

    Raises PoolExhausted or SwapError. Nothing is changed then, nor where it is False.
    """
    state.require_frames(frames_needed(state, {}) + state.shape.layers * state.shape.kv_heads, "a saved sequence")
    row = state.blocks.take()
    state.fit()
    rows = np.array([row])
    try:
        frames = state.residency.reopen(state.table.pages(rows))
    except KVPagerError:
        state.blocks.drop(row)
        raise
    slots = saved.arrays["slots"].reshape(sequence.length % state.config.page_size, len(frames), -1)
    state.residency.storage.put_tokens(frames, slots.swapaxes(0, 1))
    if not _finite(state, row):
        state.blocks.drop(row)
        return False
    depth, now = np.array([len(sequence.rows)], np.int64), state.residency.clock.tick
    for layer in range(state.shape.layers):
        state.scorer.born(rows, layer, depth, now)
    scores = saved.arrays.get("open_scores")
    fits = scores is not None and len(scores) == state.scorer.dump(rows).shape[1]
    if scores is not None and fits and saved.header["scores"] == state.scorer.kind:
        state.scorer.load(rows, depth, scores[None], now)
    sequence.rows = np.append(sequence.rows, row)
    return True


def _finite(state: State, row: int) -> bool:
    """Whether all numbers of an open block are finite, as all that a pager takes in are."""
    frames = state.table.frame[row].reshape(-1).astype(np.int64)
    with np.errstate(invalid="ignore"):
        return all(np.isfinite(one).all() for one in state.residency.storage.read(frames, np.zeros_like(frames)))
