"""What a pager exchanges with a store of blocks: blocks found for a prompt, pages on first touch, new blocks, scores.

The store is below swap: a block that came from it has a row, its digests and its scores from the beginning, and its
pages come all together when the first of them is wanted, into swap, from where they fault in as others do. So a prompt
is found without reading a page, and read without computing one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvpager.core.blocks import Name, Prefix, packed, tenant_of
from kvpager.errors import PageLost, SwapError
from kvpager.ports import IntArray
from kvpager.stored import BlockHead, BlockStore, Scores, StoredBlock

if TYPE_CHECKING:
    from kvpager.core.state import State

__all__ = ["Keeper", "Wanted"]

BATCH = 8  # blocks that are handed to the store together: about 3 MB of a small model
DIGESTS = 32  # blocks whose digests are put in place together: about a megabyte, which stays in a cache
MOST_LOST = 1 << 16
SAMPLE = 256  # blocks with which others are compared
TICK_MOST = 1 << 30  # a clock that went further than this begins anew, for ticks are int32


class Wanted(NamedTuple):
    """A block that a prompt or a session goes on from."""

    key: bytes
    parent: bytes
    depth: int
    tokens: bytes
    approximate: bool


class Keeper:
    """The blocks of one pager, and its store.

    skipped  blocks that were let go of before the store had room for them
    """

    def __init__(self, state: State, store: BlockStore) -> None:
        self.store = store
        self._state = state
        self._pages = state.shape.layers * state.shape.kv_heads
        self._pending: OrderedDict[int, None] = OrderedDict()  # named blocks that the store has not been given yet
        self._lost: set[bytes] = set()
        self.skipped = 0
        tick = store.tick
        if tick <= TICK_MOST:
            state.residency.clock.tick = tick
            state.scorer.resume(tick)
        state.residency.bring = self.bring
        state.blocks.leaving = self.leaving

    # -- finding

    def keys(self, tokens: list[int], root: bytes, found: Prefix) -> list[Wanted]:
        """The blocks that follow on `found` for a prompt and are held here or in the store: the longest run of them.
        The prompt's last token is always left out.
        """
        size = self._state.config.page_size
        starts = range(len(found.rows) * size, len(tokens), size)
        pieces = [packed(tokens[start:stop]) for start, stop in pairwise(starts)]
        approximate = found.exact < len(found.rows)
        parent = found.keys[-1] if found.keys else root
        run: list[Wanted] = []
        for kind in (False, True):
            if kind >= approximate:  # nothing after an approximate block is exact
                run += self._run(pieces[len(run) :], parent, len(found.rows) + len(run), kind)
                parent = run[-1].key if run else parent
        return run

    def _run(self, pieces: list[bytes], parent: bytes, depth: int, approximate: bool) -> list[Wanted]:
        blocks = self._state.blocks
        run: list[Wanted] = []
        for place, piece in enumerate(pieces, depth):
            key = blocks.keys.key(parent, piece, approximate)
            run.append(Wanted(key, parent, place, piece, approximate))
            parent = key
        return run[: self.present(run)]

    def present(self, run: list[Wanted]) -> int:
        """How many of the first of these blocks are held here or in the store, as far as its index says."""
        blocks = self._state.blocks
        there = self.store.contains([one.key for one in run])
        for count, one in enumerate(run):
            if blocks.find(one.key) is None and (not there[count] or one.key in self._lost):
                return count
        return len(run)

    def prefetch(self, tokens: list[int], root: bytes) -> None:
        """Tell the store which blocks a prompt will want."""
        found = self._state.blocks.match(tokens, root)
        wanted = [one.key for one in self.keys(tokens, root, found) if self._state.blocks.find(one.key) is None]
        if wanted:
            self.store.prefetch(wanted)

    def adopt(self, run: list[Wanted], root: bytes) -> list[int]:
        """Rows for blocks that are held here or in the store, one reference each: up to the first miss."""
        state, blocks = self._state, self._state.blocks
        rows, heads = self._found(run)
        fresh: list[tuple[int, BlockHead]] = []
        for place, head in heads:
            row = rows[place] = blocks.take()
            one = run[place]
            blocks.register(row, Name(one.key, one.parent, root, one.depth, one.tokens, one.approximate))
            fresh.append((row, head))
        state.fit()
        if fresh and not self._install(fresh):
            first = heads[0][0]
            for row, _ in fresh:
                blocks.unname(row)
            blocks.drop_all(rows[first:][::-1])
            return rows[:first]
        return rows

    def _found(self, run: list[Wanted]) -> tuple[list[int], list[tuple[int, BlockHead]]]:
        """The rows of those blocks that are held here, shared, up to the first miss; with places still to be filled
        for the others, whose heads come by place.
        """
        blocks = self._state.blocks
        absent = [one.key for one in run if blocks.find(one.key) is None]
        heads = dict(zip(absent, self.store.heads(absent), strict=True)) if absent else {}
        rows: list[int] = []
        found: list[tuple[int, BlockHead]] = []
        for place, one in enumerate(run):
            row = blocks.find(one.key)
            if row is None:
                head = heads[one.key]
                if head is None or not self._fits(head, one):
                    break
                found.append((place, head))
                rows.append(-1)
            else:
                name = blocks.name(row)
                if name is None or (name.parent, name.tokens) != (one.parent, one.tokens):
                    break
                blocks.share(row)  # before a row is taken, for which it might have to make way
                rows.append(row)
        return rows, found

    def _fits(self, head: BlockHead, wanted: Wanted) -> bool:
        """Whether a head is of the block that is wanted. Its key says so too: no collision and no nonsense that
        somebody wrote under it can serve foreign pages.
        """
        given = (head.parent, head.depth, head.tokens, head.approximate, head.pages, head.page_bytes)
        fits = given == (*wanted[1:], self._pages, self._state.page_bytes)
        if not fits:
            self._lose([wanted.key])
        return fits

    def _lose(self, keys: list[bytes]) -> None:
        """These blocks are not to be had, whatever the store's index says: nobody looks for them again."""
        if len(self._lost) > MOST_LOST:
            self._lost.clear()
        self._lost.update(keys)

    def _install(self, fresh: list[tuple[int, BlockHead]]) -> bool:
        """Tables, scores and digests of blocks that came from the store; False when digests can't be made."""
        state = self._state
        rows = np.array([row for row, _ in fresh], np.int64)
        depths = np.array([head.depth for _, head in fresh], np.int64)
        state.table.sealed[rows] = True
        state.table.stored[rows] = True
        now = state.residency.clock.tick
        for layer in range(state.shape.layers):
            state.scorer.born(rows, layer, depths, now)
        mark = self._mark
        size = state.scorer.dump(rows[:1]).shape[1]
        known = [i for i, (_, head) in enumerate(fresh) if self._known(head.scores, mark, size)]
        if known:
            scores = np.stack([np.frombuffer(fresh[i][1].scores, np.uint8, size, len(mark)) for i in known])
            state.scorer.load(rows[known], depths[known], scores, now)
        state.residency.counters.store_tokens_hit += len(fresh) * state.config.page_size
        try:
            self._install_digests(fresh)
        except (PageLost, SwapError):
            return False
        return True

    @staticmethod
    def _known(scores: bytes, mark: bytes, size: int) -> bool:
        return scores.startswith(mark) and len(scores) == len(mark) + size

    def _install_digests(self, fresh: list[tuple[int, BlockHead]]) -> None:
        """Digests of blocks: as they were stored, or made anew where the store has none of this kind."""
        state = self._state
        digest = state.digest
        if digest is None:
            return
        size = digest.page_bytes * self._pages
        told = [(row, head) for row, head in fresh if head.digest_kind == digest.kind and len(head.digest) == size]
        for start in range(0, len(told), DIGESTS):
            some = told[start : start + DIGESTS]
            digests = np.stack([np.frombuffer(head.digest, np.uint8) for _, head in some])
            digest.load(np.array([row for row, _ in some], np.int64), digests)
        known = {row for row, _ in told}
        others = np.array([row for row, _ in fresh if row not in known], np.int64)
        if not others.size:
            return
        storage = state.kernel.storage(state.shape.kv_heads, state.shape, state.config.page_size)
        frames = np.arange(state.shape.kv_heads)
        self.bring(others)
        for row in others.tolist():
            pages = state.residency.pages_of(row).reshape(state.shape.layers, len(frames), -1)
            for layer in range(state.shape.layers):
                storage.load(frames, pages[layer])
                digest.build(layer, np.array([row]), storage.read(frames)[0][None])

    # -- pages

    def bring(self, rows: IntArray) -> None:
        """Read blocks [n] from the store into free frames or into swap, as far as their pages are nowhere else.

        Raises PageLost, naming the rows, for those that the store has lost, and SwapError; what was read stays.
        """
        state = self._state
        lost: list[int] = []
        for start in range(0, len(rows), BATCH):
            some = rows[start : start + BATCH].tolist()
            names = [state.blocks.name(row) for row in some]
            keys = [b"" if name is None else name.key for name in names]
            for row, pages in zip(some, self.store.get(keys), strict=True):
                if pages is None or pages.shape != (self._pages, state.page_bytes):
                    lost.append(row)
                    continue
                state.residency.adopt(row, pages)
                state.residency.counters.store_pages += len(pages)
        if lost:
            self._lose([name.key for row in lost if (name := state.blocks.name(row)) is not None])
            state.residency.counters.store_lost += len(lost)
            error = PageLost(f"{len(lost)} blocks could not be read back from the store: missing or damaged")
            error.rows = tuple(lost)
            raise error

    # -- new blocks

    def offer(self, row: int) -> None:
        """A block has been named: it goes to the store as soon as that has room for it."""
        self._pending[row] = None
        name = self._state.blocks.name(row)
        if name is not None:
            self._lost.discard(name.key)

    def publish(self, keys: Iterable[bytes]) -> None:
        """Have the store share these blocks with other nodes; those that are held here are offered to it once more."""
        keys = list(keys)
        self.store.publish(keys)
        self._pending.update((row, None) for key in keys if (row := self._state.blocks.find(key)) is not None)
        self.flush()

    def flush(self) -> None:
        """Give the store what it has room for; the others wait, in their frames and in swap, where they are anyway."""
        size = self._pages * self._state.page_bytes
        while self._pending and (count := min(BATCH, self.store.room // size)):
            rows = [row for row, _ in zip(self._pending, range(count), strict=False)]
            taken = self._put(rows)
            for row in rows[:taken]:
                del self._pending[row]
            if taken < len(rows):
                return

    def _put(self, rows: list[int]) -> int:
        """Give the store blocks; returns how many of the first need not be given again."""
        blocks = self._state.blocks
        keys = [name.key for row in rows if (name := blocks.name(row)) is not None]
        wanted = dict(zip(keys, self.store.wants(keys), strict=True))
        made: list[tuple[int, StoredBlock]] = []
        for place, row in enumerate(rows):
            name = blocks.name(row)
            if name is not None and wanted[name.key] and (block := self.block(row, name)) is not None:
                made.append((place, block))
        taken = self.store.put([block for _, block in made]) if made else 0
        return len(rows) if taken == len(made) else made[taken][0]

    def block(self, row: int, name: Name) -> StoredBlock | None:
        """All that the store keeps of a full block; None when its pages can't be read."""
        state = self._state
        try:
            pages = state.residency.pages_of(row)
        except (PageLost, SwapError):
            return None  # whoever attends to it is told
        one = np.array([row])
        digest = state.digest
        head = BlockHead(
            key=name.key,
            parent=name.parent,
            tenant=tenant_of(name.root),
            depth=name.depth,
            tokens=name.tokens,
            approximate=name.approximate,
            layout=state.blocks.keys.namespace,
            pages=len(pages),
            page_bytes=state.page_bytes,
            digest_kind="" if digest is None else digest.kind,
            digest=b"" if digest is None else digest.dump(one).tobytes(),
            scores=self._scores(one)[0],
            hits=name.hits,
        )
        name.hits = 0
        return StoredBlock(head, pages)

    @property
    def _mark(self) -> bytes:
        """What stands before scores and says how they are to be read."""
        return self._state.scorer.kind.encode() + b"\0"

    def _scores(self, rows: IntArray) -> list[bytes]:
        mark = self._mark
        return [mark + one.tobytes() for one in self._state.scorer.dump(rows)]

    def _ranks(self, rows: IntArray) -> list[float]:
        """Where blocks stand among all that are held, by a sample of them."""
        named = self._state.blocks.named
        sample = np.array(named[:: max(1, len(named) // SAMPLE)], np.int64)
        ranks: list[float] = self._state.scorer.standing(rows, sample).tolist()
        return ranks

    # -- what becomes of them

    def tell(self, rows: IntArray) -> None:
        """Tell the store what is known by now about blocks [n] that it may have."""
        names = [(row, name) for row in rows.tolist() if (name := self._state.blocks.name(row)) is not None]
        names = [(row, name) for row, name in names if row not in self._pending]
        if not names:
            return
        told = np.array([row for row, _ in names])
        scores, ranks = self._scores(told), self._ranks(told)
        news = [
            Scores(name.key, one, name.hits, rank) for (_, name), one, rank in zip(names, scores, ranks, strict=True)
        ]
        for _, name in names:
            name.hits = 0
        wanted = set(self.store.update(news, self._state.residency.clock.tick))
        if wanted:
            self._pending.update((row, None) for row, name in names if name.key in wanted)
            self.flush()

    def leaving(self, rows: list[int]) -> None:
        """Blocks are about to be released: the last chance for those that the store has not been given."""
        waiting = [row for row in rows if row in self._pending]
        if not waiting:
            return
        taken = self._put(waiting) if self.store.room else 0
        self.skipped += len(waiting) - taken
        for row in waiting:
            del self._pending[row]

    def drop(self, keys: list[bytes]) -> None:
        """Forget blocks, here and in the store."""
        for row in [row for key in keys if (row := self._state.blocks.find(key)) is not None]:
            self._pending.pop(row, None)
            self._state.blocks.unname(row)
        self.store.drop(keys)

    def close(self) -> None:
        """Give the store what it will take, and the scores of all blocks."""
        self.flush()
        self.skipped += len(self._pending)
        self._pending.clear()
        named = np.array(self._state.blocks.named, np.int64)
        if named.size:
            self.tell(named)
