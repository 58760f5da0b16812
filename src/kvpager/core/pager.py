"""The pager: cache write, attention, and the state of sequences over a pool of fixed size."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvpager.config import KVShape, PagerConfig
from kvpager.core import forking, parking, transaction
from kvpager.core.attention import AttendResult, Query
from kvpager.core.checks import floats, listed, positive, step_tokens, token_list, whole
from kvpager.core.guards import changes, owned
from kvpager.core.lasting import Lasting
from kvpager.core.sequence import Member, Sequence, Step
from kvpager.core.state import State
from kvpager.errors import ConfigError, InputError, StepError, ThreadError
from kvpager.kernels.choose import open_kernel
from kvpager.ports import BatchResult, Kernel, States, Swap
from kvpager.stored import BlockStore

__all__ = ["AttendResult", "Pager"]


class Pager(Lasting):
    """Pages of keys and values in a pool of fixed size, with recall of what was evicted.

    Args:
        shape: the model's KV shape.
        config: how to page.
        kernel: attention over frames; made from `config.kernel` by default.
        swap: where evicted pages go; made from `config.swap` by default. Closed by `shutdown` either way.
        store: where complete blocks outlive this pager, if anywhere; its caller closes it, after `shutdown`.

    Raises ConfigError, or SwapError when swap can't be opened. One thread owns a pager (the one that makes it,
    until another calls `adopt`); calls from others raise ThreadError. Every public call raises InputError,
    SequenceError or StepError for bad input before anything changes.
    """

    def __init__(
        self,
        shape: KVShape,
        config: PagerConfig | None = None,
        *,
        kernel: Kernel | None = None,
        swap: Swap | None = None,
        store: BlockStore | None = None,
    ) -> None:
        if not isinstance(shape, KVShape):
            raise ConfigError(f"shape: expected a KVShape, got {type(shape).__name__}")
        if config is not None and not isinstance(config, PagerConfig):
            raise ConfigError(f"config: expected a PagerConfig, got {type(config).__name__}")
        self.shape = shape
        self.config = config or PagerConfig()
        if store is not None and self.config.mode == "discard":
            raise ConfigError("store: mode 'discard' drops pages for good, and no block of it is stored; use 'recall'")
        self._state = State(shape, self.config, kernel or open_kernel(shape, self.config), swap, store)
        self._thread = threading.get_ident()
        self._down = False
        self._attending = False

    # -- sequences

    @changes
    def open(self, token_ids: Iterable[int] | None = None, salt: bytes = b"") -> Sequence:
        """A new sequence. What was computed under another `salt` (a tenant's, say) is never shared with it.

        With `token_ids` (the prompt), full blocks that are already held for its beginning are shared, at
        least the last token being left to compute: `length` says how many tokens were found. The rest of
        the prompt becomes findable as its steps are committed. Raises PoolExhausted when what was found would
        pass `max_tokens`.
        """
        self._check_up()
        tokens = None if token_ids is None else token_list("token_ids", token_ids)
        if not isinstance(salt, bytes):
            raise InputError(f"salt: expected bytes, got {type(salt).__name__}")
        return forking.open_sequence(self._state, tokens, salt)

    @changes
    def fork(self, sequence: Sequence) -> Sequence:
        """A new sequence that shares all full blocks of `sequence`; the open block is copied.

        Shared pages have one score: in discard mode, what one fork attends to may keep a page for both.
        An open step is rolled back first. Raises PoolExhausted with nothing changed.
        """
        self._settled(sequence, "fork")
        return forking.fork(self._state, sequence)

    @changes
    def crop(self, sequence: Sequence, length: int) -> None:
        """Keep the first `length` tokens of `sequence`. An open step is rolled back first.

        Raises InputError for a length above the present one, or when pages of the last block kept were discarded.
        """
        self.crop_all([sequence], [length])

    @changes
    def crop_all(self, sequences: Iterable[Sequence], lengths: Iterable[int]) -> None:
        """As `crop` for several sequences, each to its length: all of them or, where one raises, none."""
        chosen, ends = listed("sequences", sequences), listed("lengths", lengths)
        if len(chosen) != len(ends):
            raise InputError(f"lengths: {len(ends)} lengths for {len(chosen)} sequences; give one for each")
        for sequence in chosen:
            self._settled(sequence, "crop")
        for sequence, length in zip(chosen, ends, strict=True):
            whole("length", length, 0, sequence.length)
        if len({sequence.id for sequence in chosen}) != len(chosen):
            raise InputError("sequences: a sequence is to be cropped twice")
        forking.crop(self._state, [(one, int(end)) for one, end in zip(chosen, ends, strict=True) if end < one.length])

    @changes
    def close(self, sequence: Sequence) -> None:
        """Let go of a sequence's pages. An open step is rolled back first. Harmless after `shutdown`."""
        self._check_own(sequence)
        if self._down:
            sequence.closed = True
            return
        self.rollback()
        if not sequence.closed:
            transaction.close(self._state, sequence)

    @changes
    def park(self, sequence: Sequence) -> None:
        """Let a sequence wait without frames: its pages go to swap, and those that no other running one holds leave.

        Until `unpark` it can only be closed and looked at; steps with it, `fork` and `crop` raise SequenceError. What
        it gives afterwards is the same, bit for bit. An open step is rolled back first. Raises SwapError with nothing
        changed, and ConfigError in discard mode, which has no swap. Harmless for a sequence that is parked.
        """
        if self.config.mode == "discard":
            raise ConfigError("mode: 'discard' has no swap to park a sequence in; use 'recall'")
        self._check_sequence(sequence)
        if not sequence.parked:
            self._settled(sequence, "park")
            parking.park(self._state, sequence)

    @changes
    def unpark(self, sequence: Sequence) -> None:
        """Let a parked sequence run again: its open pages come back into frames, the others when they are wanted.

        Raises PoolExhausted, SwapError or PageLost with nothing changed. An open step is rolled back first. Harmless
        for a sequence that is not parked.
        """
        self._check_sequence(sequence)
        if sequence.parked:
            self.rollback()
            parking.unpark(self._state, sequence)

    # -- steps

    @changes
    def begin(
        self,
        sequences: Iterable[Sequence],
        counts: Iterable[int],
        token_ids: Iterable[Iterable[int]] | None = None,
    ) -> None:
        """Open a step in which each of `sequences` gets as many new tokens as `counts` says.

        `token_ids`, a list of ids for each sequence, lets full blocks be found by `open` later. An uncommitted
        step is rolled back first. Raises PoolExhausted when the step can never fit the pool.
        """
        chosen = listed("sequences", sequences)
        growth = [whole("counts", count, 1, 2**31 - 1) for count in listed("counts", counts)]
        if not chosen or len(chosen) != len(growth):
            raise InputError(
                f"counts: {len(growth)} counts for {len(chosen)} sequences; give one for each, at least one"
            )
        for sequence in chosen:
            self._check_running(sequence, "begin")
        if len({sequence.id for sequence in chosen}) != len(chosen):
            raise InputError("sequences: a sequence stands twice in the step")
        ids = [] if token_ids is None else step_tokens(token_ids, growth)
        tokens = {sequence.id: its for sequence, its in zip(chosen, ids, strict=False)}
        self.rollback()
        for sequence in chosen:
            self._check_sequence(sequence)
            self._check_even(sequence, "begin")
        transaction.begin(self._state, list(zip(chosen, growth, strict=True)), tokens, None)

    @changes
    def append(self, sequence: Sequence, layer: int, keys: npt.NDArray[Any], values: npt.NDArray[Any]) -> None:
        """Write new keys and values of one layer, [kv_heads, T, head_dim]: floats, finite in the pages' dtype.

        Keys come with their positions already in them (rotated). Inside begin/commit, T is the sequence's count
        and each layer is written once; outside, each call is a step of its own, and the sequence is as long as
        the layer that has had least. Raises PoolExhausted or SwapError; a step in which that happens can only be
        rolled back, and outside a step it has been.
        """
        self._check_running(sequence, "append")
        layer = whole("layer", layer, 0, self.shape.layers - 1)
        dims = (self.shape.kv_heads, None, self.shape.head_dim)
        layout, dtype = "[kv_heads, tokens, head_dim]", self.shape.dtype
        new_keys = floats("keys", keys, dims, layout, self._within, dtype)
        new_values = floats("values", values, dims, layout, self._within, dtype)
        tokens = new_keys.shape[1]
        if new_values.shape[1] != tokens:
            raise InputError(f"values: {new_values.shape[1]} tokens, but keys have {tokens}")
        step = self._state.step
        if step is None:
            with transaction.implicit(self._state, sequence, tokens, layer) as own:
                transaction.write(self._state, own, [(sequence, tokens)], layer, new_keys, new_values)
            return
        self._check_in_step(sequence, "append", tokens)
        if sequence.filled[layer] != sequence.length:
            raise StepError(f"append: layer {layer} of sequence {sequence.id} has had its keys in this step")
        with transaction.guarded(self._state):
            transaction.write(self._state, step, [(sequence, tokens)], layer, new_keys, new_values)

    @changes
    def attend(
        self,
        sequence: Sequence,
        layer: int,
        queries: npt.NDArray[Any],
        *,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> AttendResult:
        """Attend with queries [query_heads, T, head_dim], those of the last T tokens written to `layer`.

        scale    multiplies query-key products; by default the shape's
        softcap  bounds the scaled products: cap * tanh(product / cap)

        Raises PageLost, PoolExhausted or SwapError; a step in which that happens can only be rolled back.
        """
        self._check_running(sequence, "attend")
        layer = whole("layer", layer, 0, self.shape.layers - 1)
        dims = (self.shape.query_heads, None, self.shape.head_dim)
        asked = floats("queries", queries, dims, "[query_heads, tokens, head_dim]", self._within)
        output = np.empty(asked.shape, np.float32)
        query = self._query(asked, output, scale, softcap)
        members = [(sequence, asked.shape[1])]
        shape = (self.shape.kv_heads, len(sequence.rows))
        step = self._state.step
        if step is None:
            if asked.shape[1] > sequence.filled[layer]:
                raise InputError(
                    f"queries: {asked.shape[1]} queries, but layer {layer} holds {sequence.filled[layer]} tokens"
                )
            with transaction.implicit(self._state, sequence, 0, layer) as own:
                return AttendResult(output, self._attend(own, members, layer, query), shape)
        self._check_in_step(sequence, "attend", asked.shape[1])
        if sequence.filled[layer] == sequence.length:
            raise StepError(
                f"attend: layer {layer} of sequence {sequence.id} has had no keys in this step; append first"
            )
        with transaction.guarded(self._state):
            return AttendResult(output, self._attend(step, members, layer, query), shape)

    @changes
    def attend_step(
        self,
        layer: int,
        queries: npt.NDArray[Any],
        keys: npt.NDArray[Any],
        values: npt.NDArray[Any],
        *,
        scale: float | None = None,
        softcap: float | None = None,
        output: npt.NDArray[Any] | None = None,
    ) -> npt.NDArray[Any]:
        """Write one layer's new keys and values of all sequences of the open step, and attend with their queries.

        queries [query_heads, T, head_dim], keys and values [kv_heads, T, head_dim]: T counts the step's tokens,
        sequence after sequence in the order that `begin` was given. float32 and float16 are taken as they lie, in any
        strides with channels side by side, and so is bfloat16 as uint16, which NumPy lacks. Returns `output` filled
        (one of these dtypes, in any such strides), or else float32 [query_heads, T, head_dim]: what `append` and
        `attend` give sequence by sequence, bit for bit. Raises as they do, and StepError without a step.
        """
        step = self._state.step
        if step is None or step.counts is None:
            raise StepError("attend_step: no step is open; begin one first")
        if step.failed:
            raise StepError("attend_step: a call of this step failed; roll it back")
        layer = whole("layer", layer, 0, self.shape.layers - 1)
        members = step.members
        total = sum(step.counts.values())
        heads, dim = self.shape.kv_heads, self.shape.head_dim
        layout, within, dtype = "[heads, the step's tokens, head_dim]", self._within, self.shape.dtype
        new_keys = floats("keys", keys, (heads, total, dim), layout, within, dtype, bits=True)
        new_values = floats("values", values, (heads, total, dim), layout, within, dtype, bits=True)
        asked = floats("queries", queries, (self.shape.query_heads, total, dim), layout, within, bits=True)
        if output is None:
            output = np.empty(asked.shape, np.float32)
        elif output.shape != asked.shape or output.dtype not in (np.float32, np.float16, np.uint16):
            raise InputError(f"output: {output.dtype} {output.shape} is not float32, float16 or uint16 {asked.shape}")
        query = self._query(asked, output, scale, softcap)
        for sequence, _ in members:
            if sequence.filled[layer] != sequence.length:
                raise StepError(f"attend_step: layer {layer} of sequence {sequence.id} has had its keys in this step")
        with transaction.guarded(self._state):
            transaction.write(self._state, step, members, layer, new_keys, new_values)
            self._attend(step, members, layer, query)
        return output

    def _query(self, states: States, output: States, scale: float | None, softcap: float | None) -> Query:
        factor = positive("scale", scale, self.shape.scale or self.shape.head_dim**-0.5)
        return Query(states, factor, None if softcap is None else positive("softcap", softcap, 1.0), output)

    def _within(self, states: States, most: float) -> bool:
        return self._state.kernel.within(states, most)

    def _attend(self, step: Step, members: list[Member], layer: int, query: Query) -> list[BatchResult]:
        self._attending = True
        try:
            return self._state.attender.attend(step, members, layer, query)
        finally:
            self._attending = False

    @changes
    def commit(self) -> None:
        """End the step: its tokens belong to their sequences. Raises StepError when a layer has not had them all."""
        if self._state.step is None:
            raise StepError("commit: no step is open; begin one first")
        transaction.commit(self._state, self._state.step)

    @changes
    def rollback(self) -> None:
        """Undo the open step, if any: everything is as before `begin`.

        In discard mode a sequence of which dropped pages had to be given up in the step is closed instead.
        """
        self._roll_back()

    @property
    def step(self) -> object | None:
        """The open step, or None: a mark by which to tell whether the step that one began is still the open one."""
        return self._state.step

    # -- life

    @owned
    def populate(self) -> None:
        """Have the system give the pool's memory now, not as frames are first used: or first requests would wait."""
        memory = self._state.residency.storage.memory
        if memory is not None:
            touched = memory.reshape(-1)[:: mmap.PAGESIZE]
            np.bitwise_or(touched, 0, out=touched)

    def adopt(self) -> None:
        """Make the calling thread the pager's owner. Raises ThreadError while a step is open."""
        if self._state.step is not None and self._thread != threading.get_ident():
            raise ThreadError("adopt: a step is open in another thread; commit or roll it back there first")
        self._thread = threading.get_ident()

    def shutdown(self) -> None:
        """Close swap; the pager can't be used afterwards, and an open step is dropped. Idempotent, from any thread.

        The owner's call gives the store what it still takes before, and the scores of all blocks.
        """
        keeper, down = self._state.keeper, self._down
        self._down = True
        if keeper is not None and not down and threading.get_ident() == self._thread and not self._attending:
            self._roll_back()
            keeper.close()
        self._state.step = None
        if self._state.swap is not None:
            self._state.swap.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _settled(self, sequence: Sequence, call: str) -> None:
        self._check_running(sequence, call)
        self.rollback()
        self._check_sequence(sequence)
        self._check_even(sequence, call)
