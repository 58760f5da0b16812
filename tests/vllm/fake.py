"""vLLM in small: blocks of bytes that follow from tokens, requests that share a pool, one step after the other.

What stands in a block says which tokens it was computed from, so that every step can check that all it attends to is
right. Blocks that are freed are spoiled at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvpager.core.blocks import KeyMaker
from kvpager.ports import Bytes
from kvpager.stored import BlockStore
from kvpager.vllm.books import Books
from kvpager.vllm.pages import Pages
from kvpager.vllm.transfers import Transfers

LAYERS, SIZE, TOKEN_BYTES = 3, 4, 2
SPOILED = 0xEE


@dataclass
class Request:
    """As much of vLLM's request as is read, and what the fake keeps."""

    request_id: str
    tokens: list[int]
    wanted: int = 0
    cache_salt: str | None = None
    num_computed_tokens: int = 0
    lora_request: object | None = None
    mm_features: Sequence[object] = ()
    prompt_embeds: object | None = None
    resumable: bool = False
    blocks: list[int] = field(default_factory=list)
    loading: bool = False
    aborted: bool = False
    cached: int = 0

    @property
    def all_token_ids(self) -> list[int]:
        """Prompt and answer so far."""
        return self.tokens


def content(salt: str | None, tokens: Sequence[int], layer: int) -> bytes:
    """What a layer keeps of the last of these tokens."""
    return hashlib.sha256(repr((salt, list(tokens), layer)).encode()).digest()[:TOKEN_BYTES]


class FakeVLLM:
    """A scheduler and a worker with `blocks` blocks, of which each step computes up to `step` tokens a request."""

    def __init__(self, store: BlockStore, blocks: int = 12, step: int = 6) -> None:
        self.layers: list[Bytes] = [np.full((blocks, SIZE * TOKEN_BYTES), SPOILED, np.uint8) for _ in range(LAYERS)]
        self.books = Books(store, SIZE, [KeyMaker("fake", "")])
        self.transfers = Transfers(store, Pages(self.layers, "fake"))
        self.free = list(range(blocks))
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.ended: set[str] = set()
        self.preemptions = 0
        self._step = step

    def add(self, request: Request) -> Request:
        """A request that comes."""
        self.waiting.append(request)
        return request

    def abort(self, request: Request) -> None:
        """A client that goes."""
        request.aborted = True
        self._finish(request)

    def step(self) -> None:
        """One step of the engine."""
        scheduled = {request.request_id: count for request in list(self.running) if (count := self._go_on(request))}
        if not self.ended:  # as vLLM, which admits nobody in a step that preempts
            self._admit(scheduled)
        named = {request.request_id: request for request in self.running}
        plan = self.books.plan(scheduled, lambda name: named[name].blocks, self.ended)
        self.ended = set()
        self.transfers.begin(plan)
        for name, count in scheduled.items():
            self._forward(named[name], count)
        self.transfers.load(plan)
        self.transfers.save(plan)
        self._take_loads()
        for request in [named[name] for name in scheduled]:
            self._after(request)

    def run(self) -> None:
        """Until nothing is left to do."""
        while self.waiting or self.running or self.ended:
            self.step()

    def _go_on(self, request: Request) -> int:
        if request not in self.running:
            return 0
        count = min(self._step, len(request.tokens) - request.num_computed_tokens)
        while not self._allocate(request, request.num_computed_tokens + count):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return 0
        return count

    def _admit(self, scheduled: dict[str, int]) -> None:
        for request in list(self.waiting):
            if request.loading:
                continue
            if not request.num_computed_tokens:
                tokens = self.books.matched(request, 0)
                request.cached = tokens
                if tokens and self._may_load(request) and self._allocate(request, tokens):
                    self.books.allocated(request, request.blocks, tokens)
                    request.loading, request.num_computed_tokens = True, tokens
                    continue
            count = min(self._step, len(request.tokens) - request.num_computed_tokens)
            if not self._allocate(request, request.num_computed_tokens + count):
                return
            self.waiting.remove(request)
            self.running.append(request)
            scheduled[request.request_id] = count

    def _may_load(self, request: Request) -> bool:
        """As in vLLM: those that wait and hold blocks must all be able to go on, since nobody preempts them."""
        holders = [request, *(other for other in self.waiting if other.blocks)]
        need = sum(-(-(len(one.tokens) + one.wanted) // SIZE) - len(one.blocks) for one in holders)
        return need <= len(self.free)

    def _allocate(self, request: Request, tokens: int) -> bool:
        need = -(-tokens // SIZE) - len(request.blocks)
        if need > len(self.free):
            return False
        request.blocks += [self.free.pop() for _ in range(need)]
        return True

    def _release(self, request: Request) -> None:
        self.free += request.blocks
        request.blocks = []

    def _preempt(self, request: Request) -> None:
        self.preemptions += 1
        self.running.remove(request)
        self.waiting.insert(0, request)
        self.ended.add(request.request_id)
        self._release(request)
        request.num_computed_tokens = 0

    def _forward(self, request: Request, count: int) -> None:
        for block in self.free:  # whoever reads what is free reads nonsense
            for layer in self.layers:
                layer[block] = SPOILED
        for position in range(request.num_computed_tokens + count):
            block, offset = request.blocks[position // SIZE], position % SIZE * TOKEN_BYTES
            for number, layer in enumerate(self.layers):
                expected = content(request.cache_salt, request.tokens[: position + 1], number)
                if position >= request.num_computed_tokens:
                    layer[block, offset : offset + TOKEN_BYTES] = list(expected)
                assert bytes(layer[block, offset : offset + TOKEN_BYTES]) == expected, "a wrong page"
        request.num_computed_tokens += count

    def _after(self, request: Request) -> None:
        if request.num_computed_tokens < len(request.tokens):
            return
        if not request.wanted:
            self._finish(request)
            return
        request.wanted -= 1
        request.tokens.append(sum(request.tokens) % 7)

    def _take_loads(self) -> None:
        loaded, lost = self.transfers.take_loaded(), self.transfers.take_lost()
        self.books.failed(lost)
        for name in loaded:
            self.books.loaded(name)
            request = next(one for one in self.waiting if one.request_id == name)
            request.loading = False
            whole = next((i for i, block in enumerate(request.blocks) if block in lost), len(request.blocks))
            request.num_computed_tokens = whole * SIZE
            if request.aborted:
                self.waiting.remove(request)
            if request.aborted or not whole:
                self._release(request)

    def _finish(self, request: Request) -> None:
        self.books.finished(request.request_id)
        self.ended.add(request.request_id)
        if request.loading:
            return  # its blocks are kept until the load has ended
        (self.running if request in self.running else self.waiting).remove(request)
        self._release(request)
