"""The scheduler's side: which requests are followed, what the store has of them, and what each step loads and saves."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvpager.core.blocks import KeyMaker
from kvpager.vllm.keys import Chain
from kvpager.vllm.plan import Load, Plan, Save

__all__ = ["Books", "Index", "RequestLike", "is_plain"]


class RequestLike(Protocol):
    """What is read of vLLM's requests."""

    request_id: str
    cache_salt: str | None
    num_computed_tokens: int
    lora_request: object | None
    mm_features: Sequence[object]
    prompt_embeds: object | None
    resumable: bool

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Prompt and answer so far."""


class Index(Protocol):
    """What is asked of a store here."""

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of these blocks are there."""


@dataclass
class _Followed:
    """A request that vLLM knows of.

    had      blocks that vLLM had itself when it last asked for more
    offered  of its first blocks, how many the worker was told to save
    loading  numbers of the blocks that are being loaded
    lost     whether a load has failed: the rest of it is computed, so that a store that can't be read ends no request
    """

    request: RequestLike
    chain: Chain
    had: int = 0
    offered: int = 0
    loading: frozenset[int] = frozenset()
    lost: bool = False


@dataclass
class Books:
    """What a scheduler knows of its requests and of the store.

    index  the store
    size   tokens a block
    makers of keys, one for each rank; none yet, and nothing is found or saved, until the workers have told who they are
    """

    index: Index
    size: int
    makers: Sequence[KeyMaker] = ()
    _followed: dict[str, _Followed] = field(default_factory=dict)
    _loads: list[Load] = field(default_factory=list)

    def matched(self, request: RequestLike, computed: int) -> int:
        """Tokens that the store has of a request behind the first `computed`, which vLLM has: whole blocks.

        The last token is always left to be computed. May be asked again and again.
        """
        followed = self._follow(request)
        if followed is None:
            return 0
        followed.had = computed // self.size
        most = (len(request.all_token_ids) - 1) // self.size
        if followed.lost or most <= followed.had:
            return 0
        keys = followed.chain.keys(request.all_token_ids, most)[followed.had :]
        return self._there(keys) * self.size

    def allocated(self, request: RequestLike, blocks: Sequence[int], tokens: int) -> None:
        """vLLM has given a request blocks, and `tokens` of what `matched` promised are to be loaded into them."""
        followed = self._followed.get(request.request_id)
        if followed is None or not tokens:
            return
        part = slice(followed.had, followed.had + tokens // self.size)
        keys = followed.chain.keys(request.all_token_ids, part.stop)[part]
        self._loads.append(Load(request.request_id, keys, list(blocks[part])))
        followed.loading = frozenset(blocks[part])

    def plan(
        self, scheduled: Mapping[str, int], blocks: Callable[[str], Sequence[int]], ended: Collection[str]
    ) -> Plan:
        """The plan of a step that computes so many tokens of each request.

        `blocks` tells all of a scheduled request's blocks. `ended`: requests that finished or were preempted; one that
        was, and goes on later, is offered from its beginning again (the worker knows what is there).
        """
        saves: list[Save] = []
        for name in ended:
            if name in self._followed:
                self._followed[name].offered = 0
        for name, count in scheduled.items():
            followed = self._followed.get(name)
            if followed is not None:
                saves += self._offer(followed, count, blocks)
        loads, self._loads = self._loads, []
        prompts = any(count > 1 for count in scheduled.values())
        return Plan(loads, saves, sorted(ended), not scheduled, prompts)

    def failed(self, blocks: Collection[int]) -> None:
        """Blocks of these numbers could not be loaded."""
        for followed in self._followed.values():
            if not followed.loading.isdisjoint(blocks):
                followed.lost = True

    def loaded(self, request: str) -> None:
        """All that a request's load can tell has been told."""
        if request in self._followed:
            self._followed[request].loading = frozenset()

    def forget(self) -> None:
        """Follow no request any more, and none that comes."""
        self.makers = ()
        self._followed.clear()

    def finished(self, request: str) -> None:
        """A request has ended, however it did."""
        self._followed.pop(request, None)

    def _follow(self, request: RequestLike) -> _Followed | None:
        followed = self._followed.get(request.request_id)
        if followed is None and self.makers and is_plain(request):
            salt = (request.cache_salt or "").encode("utf-8", "surrogatepass")
            followed = _Followed(request, Chain(self.makers, self.size, salt))
            self._followed[request.request_id] = followed
        return followed

    def _there(self, keys: Sequence[Sequence[bytes]]) -> int:
        """How many of the first blocks the store has for every rank."""
        flat = self.index.contains([key for ranks in keys for key in ranks])
        width = len(self.makers)
        return next((i for i in range(len(keys)) if not all(flat[i * width : (i + 1) * width])), len(keys))

    def _offer(self, followed: _Followed, count: int, blocks: Callable[[str], Sequence[int]]) -> list[Save]:
        request, chain = followed.request, followed.chain
        tokens = request.all_token_ids
        # tokens that are sampled ahead of what the scheduler knows are offered when it knows them
        full = min(request.num_computed_tokens + count, len(tokens)) // self.size
        if full <= followed.offered:
            return []
        keys, numbers = chain.keys(tokens, full), blocks(request.request_id)
        saves = [
            Save(
                request.request_id,
                keys[depth],
                chain.parents(depth),
                numbers[depth],
                depth,
                chain.tokens(tokens, depth),
                chain.tenant,
            )
            for depth in range(followed.offered, full)
        ]
        followed.offered = full
        return saves


def is_plain(request: RequestLike) -> bool:
    """Whether a request's blocks depend on nothing but tokens and salt, and its tokens are only ever added to."""
    extras = request.lora_request is not None or request.mm_features or request.prompt_embeds is not None
    return not extras and not request.resumable
