"""A pager as a store sees it: sequences that are saved and go on elsewhere, and blocks that are to be forgotten."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Listed

from kvpager.core import saving, telling, transaction
from kvpager.core.checks import token_list
from kvpager.core.guards import changes, owned
from kvpager.core.looking import Looking
from kvpager.core.saving import SavedSequence
from kvpager.core.sequence import Sequence
from kvpager.core.telling import Mark
from kvpager.errors import InputError, StepError
from kvpager.journaled import Gained
from kvpager.stored import BlockStore

__all__ = ["Lasting"]


class Lasting(Looking):
    """The calls of a pager that are about its store of blocks."""

    @property
    def store(self) -> BlockStore | None:
        """The store, if there is one."""
        keeper = self._state.keeper
        return None if keeper is None else keeper.store

    @changes
    def save(self, sequence: Sequence) -> SavedSequence | None:
        """Offer all full blocks of a sequence to the store, and give what else it takes to go on with it elsewhere.

        The sequence stays open, and may be parked. None without a store, and for a sequence that can't be saved: one
        whose tokens were not all told, or of which a page is lost.
        """
        self._check_sequence(sequence)
        keeper = self._state.keeper
        if keeper is None:
            return None
        self._roll_back()
        self._check_sequence(sequence)
        self._check_even(sequence, "save")
        return saving.save(self._state, keeper, sequence)

    @changes
    def tell(self, marked: Listed[tuple[Sequence, Mark]], scores: bool = False) -> list[Gained | None]:
        """For a journal: what sequences have gained since they were told last, to where their marks are moved.

        A fresh mark tells all of it; then a call costs the same however long they are. All full blocks are offered to
        the store, and published. With `scores`, those of open blocks are told too. None for a sequence that has gained
        nothing, for one that can't be told, and without a store. No step may be open.
        """
        for sequence, _ in marked:
            self._check_sequence(sequence)
        keeper = self._state.keeper
        if self._state.step is not None:
            raise StepError("tell: a step is open; commit it or roll it back first")
        return [None] * len(marked) if keeper is None else telling.tell(self._state, keeper, marked, scores)

    @changes
    def drop(self, keys: Iterable[bytes]) -> None:
        """Let nobody go on with blocks of these keys any more, here and in the store: a mark's `own`, after the end."""
        self._check_up()
        if self._state.keeper is not None:
            self._state.keeper.drop(list(keys))

    @changes
    def restore(self, saved: SavedSequence, token_ids: Iterable[int], salt: bytes = b"") -> Sequence | None:
        """A sequence that goes on from a saved one with a prompt, `token_ids`; `salt` as when it was opened.

        It holds all of the saved one where the prompt begins with it and goes on; else what both have in common, up to
        a tile boundary. At least the prompt's last token is left to compute, and blocks that the store has lost cut it
        short. It may come to nothing: a sequence of length 0. None for what another model or other settings saved.
        Raises PoolExhausted, SwapError or InputError with nothing changed.
        """
        self._check_up()
        prompt = token_list("token_ids", token_ids)
        if not prompt:
            raise InputError("token_ids: a prompt of at least one token is needed")
        keeper = self._state.keeper
        self._roll_back()
        return None if keeper is None else saving.restore(self._state, keeper, saved, prompt, salt)

    @changes
    def forget(self, salt: bytes = b"") -> int:
        """Let no later sequence find what was computed under a salt so far; returns how many blocks that were.

        Sequences that run go on with them. The store is not touched.
        """
        self._check_up()
        return self._state.blocks.forget(self._state.blocks.root(salt))

    @owned
    def prefetch(self, token_ids: Iterable[int], salt: bytes = b"") -> None:
        """Have the store read ahead what a prompt will want; a hint."""
        self._check_up()
        keeper = self._state.keeper
        if keeper is not None:
            keeper.prefetch(token_list("token_ids", token_ids), self._state.blocks.root(salt))

    def _roll_back(self) -> None:
        if self._state.step is not None:
            transaction.rollback(self._state, self._state.step)
