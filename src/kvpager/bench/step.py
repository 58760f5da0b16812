"""``kvpager bench step``: where the time of a model's decode step goes, beside the least that it could take.

Clocks are put around what kvpager computes (kernel, digests, the attention function) and around the modules that hold
weights. Each clock stops while another one inside of it runs, so that the parts add up to the whole step. Steps with
clocks and steps without take turns; the difference is what the clocks cost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

from kvpager.bench.stream import Stream
from kvpager.core.digest import make_digest
from kvpager.errors import InputError
from kvpager.ports import Digest, Kernel

if TYPE_CHECKING:
    import torch

    from kvpager.hf import PagerCache

__all__ = ["PARTS", "Floor", "Split", "Stopwatch", "TimedKernel", "split", "tokens_written"]

READINGS = 4  # of memory's speed, among the steps
PARTS = {
    "weights": "linear layers, and what is computed in one call with them",
    "attention": "the kernel's attention over pages",
    "selection": "digests: building and choosing",
    "paging": "tables, frames, swap, casts and copies around them",
    "model": "all else of the model: norms, rotations, activations, Python",
    "sampling": "the next token from the logits",
}


@dataclass
class Stopwatch:
    """Seconds by part. Only the innermost clock runs; nothing runs while `on` is False."""

    parts: Sequence[str] = tuple(PARTS)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    on: bool = False
    _open: list[str] = field(default_factory=list)
    _since: float = 0.0

    def enter(self, part: str) -> None:
        """Stop the clock that runs, and start the one of `part`."""
        now = perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._open.append(part)
        self._since = perf_counter()

    def leave(self) -> None:
        """Stop the clock that runs, and go on with the one around it."""
        self.seconds[self._open.pop()] += perf_counter() - self._since
        self._since = perf_counter()

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that runs `function` under the clock of `part`."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return function(*args, **kwargs)
            self.enter(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.leave()

        return run

    def take(self) -> dict[str, float]:
        """What was counted since the last time: seconds of every part."""
        found = {part: self.seconds.get(part, 0.0) for part in self.parts}
        self.seconds.clear()
        return found


class _Timed:
    """Stands for an object, with clocks around some of its methods; everything else is the object's own."""

    def __init__(self, target: object, watch: Stopwatch, part: str, methods: Sequence[str]) -> None:
        self._target = target
        for name in methods:
            setattr(self, name, watch.timed(part, getattr(target, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


class TimedKernel(_Timed):
    """A kernel with clocks around its attention, and around the digests that it makes."""

    def __init__(self, kernel: Kernel, watch: Stopwatch) -> None:
        super().__init__(kernel, watch, "attention", ("attend", "settle"))
        self._watch = watch

    def digest(self, *settings: Any) -> Digest:
        """The kernel's digests, or the core's own where it has none, with clocks."""
        made = self._target.digest(*settings) or make_digest(*settings)  # type: ignore[attr-defined]
        return cast(Digest, _Timed(made, self._watch, "selection", ("build", "choose")))


@dataclass(frozen=True)
class Floor:
    """The bytes that one step has to read, and how fast memory can be read (GB/s)."""

    weight_bytes: int
    page_bytes: int
    digest_bytes: int
    stream_gb_per_s: float

    @property
    def ms(self) -> float:
        """The least time of a step."""
        return (self.weight_bytes + self.page_bytes + self.digest_bytes) / self.stream_gb_per_s / 1e6


@dataclass(frozen=True)
class Split:
    """Decode steps at one length. `step_ms` is the median without clocks; `parts_ms` are means of one step with them.

    Of the steps with clocks the quicker half counts: what disturbs a step falls on some part of it at random.
    """

    step_ms: float
    parts_ms: dict[str, float]
    floor: Floor
    steps: int

    @property
    def clocked_ms(self) -> float:
        """A step with clocks: the sum of all parts."""
        return sum(self.parts_ms.values())

    def part_floor_ms(self, part: str) -> float:
        """The least time of one part: its bytes over the memory's speed."""
        needs = {
            "weights": self.floor.weight_bytes,
            "attention": self.floor.page_bytes,
            "selection": self.floor.digest_bytes,
        }
        return needs.get(part, 0) / self.floor.stream_gb_per_s / 1e6

    def figures(self) -> dict[str, Any]:
        """All figures, for ``--json``."""
        floor = self.floor
        return {
            "steps": self.steps,
            "step_ms": self.step_ms,
            "tokens_per_s": 1e3 / self.step_ms,
            "clocked_step_ms": self.clocked_ms,
            "parts": {
                part: {"ms": ms, "share": ms / self.clocked_ms, "floor_ms": self.part_floor_ms(part)}
                for part, ms in self.parts_ms.items()
            },
            "floor": {
                "weight_bytes": floor.weight_bytes,
                "page_bytes": floor.page_bytes,
                "digest_bytes": floor.digest_bytes,
                "stream_gb_per_s": floor.stream_gb_per_s,
                "ms": floor.ms,
            },
            "floor_fraction": floor.ms / self.step_ms,
        }


def split(
    model: Any,
    cache: PagerCache,
    watch: Stopwatch,
    logits: torch.Tensor,
    sampler: Callable[[torch.Tensor], int],
    stream: Stream,
    *,
    steps: int,
    progress: Callable[[int], None] = lambda done: None,
) -> Split:
    """Run `steps` decode steps without clocks and as many with them, in turns, after a prompt that gave `logits`.

    `cache` holds the prompt; its pager's kernel is a TimedKernel of the same `watch`. Raises InputError for less than
    one step.
    """
    import torch

    if steps < 1:
        raise InputError(f"steps: {steps} is less than 1")
    weights = weight_modules(model)
    times: list[float] = []
    clocked: list[dict[str, float]] = []
    pages = 0
    token = sampler(logits)
    sample = watch.timed("sampling", sampler)
    with torch.inference_mode():
        for done in range(steps):
            if done in _readings(steps):
                stream.read(3)
                # the caches are full of the stream, and threads wait for it: a step that counts for nothing
                token = sampler(_forward(model, cache, token))
            started = perf_counter()
            token = sampler(_forward(model, cache, token))
            times.append(perf_counter() - started)
            before = cache.stats().pages_attended
            with _clocks(cache, watch, weights):
                token = sample(_forward(model, cache, token))
            clocked.append(watch.take())
            pages += cache.stats().pages_attended - before
            progress(done + 1)
        stream.read(3)
    clocked.sort(key=lambda parts: sum(parts.values()))
    kept = clocked[: -(-steps // 2)]
    floor = Floor(
        weight_bytes=weight_bytes(weights),
        page_bytes=pages // steps * cache.pager.shape.page_bytes(cache.pager.config.page_size),
        digest_bytes=_digest_bytes(cache),
        stream_gb_per_s=stream.gb_per_s,
    )
    means = {part: 1e3 * sum(one[part] for one in kept) / len(kept) for part in PARTS}
    return Split(median(times) * 1e3, means, floor, steps)


def tokens_written(steps: int) -> int:
    """Tokens that `split` adds to a cache."""
    return 2 * steps + len(_readings(steps))


def _readings(steps: int) -> range:
    """The steps before which memory is read: a few, spread evenly."""
    return range(0, steps, max(1, steps // READINGS))


def _forward(model: Any, cache: PagerCache, token: int) -> torch.Tensor:
    import torch

    inputs = torch.tensor([[token]], device=model.device)
    logits: torch.Tensor = model(input_ids=inputs, cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
    return logits


def weight_modules(model: Any) -> list[Any]:
    """The modules that multiply by weights: linear ones, and the packed ones that kvpager puts in their place."""
    import torch

    found: list[Any] = []

    def walk(module: Any) -> None:
        if isinstance(module, torch.nn.Embedding):
            return
        if isinstance(module, torch.nn.Linear) or _packed(module):
            found.append(module)
            return
        for child in module.children():
            walk(child)

    walk(model)
    return found


def _packed(module: Any) -> bool:
    try:
        from kvpager.hf.packed import PackedGated, PackedLinear, PackedProjection
    except ImportError:  # without the extension nothing is packed
        return False
    return isinstance(module, (PackedLinear, PackedProjection, PackedGated))


def weight_bytes(modules: Sequence[Any]) -> int:
    """Bytes of modules' weights, those that are shared counted once."""
    held: dict[int, int] = {}
    for module in modules:
        if _packed(module):
            held.update({id(matrix): matrix.bytes for matrix in module.matrices()})
        held.update({id(part): part.nbytes for part in (*module.parameters(), *module.buffers())})
    return sum(held.values())


def _digest_bytes(cache: PagerCache) -> int:
    """Bytes of digests that a step reads: of all full pages, once a sequence is longer than its budget."""
    pager = cache.pager
    budget = pager.config.budget
    length = cache.get_seq_length()
    if budget is None or length <= budget or pager.config.mode != "recall":
        return 0
    shape = pager.shape
    settings = (pager.config.digest, 1, shape.kv_heads, shape.head_dim, pager.config.page_size, 1)
    return length // pager.config.page_size * shape.layers * shape.kv_heads * make_digest(*settings).page_bytes


@contextmanager
def _clocks(cache: PagerCache, watch: Stopwatch, weights: Sequence[Any]) -> Iterator[None]:
    """Run one step under clocks: those of the kernel, and around the modules with weights, the cache and the attention.

    They are taken away again, so that other steps are as quick as without them.
    """
    from transformers import AttentionInterface

    from kvpager.hf.attention import NAME, pager_attention

    placed: list[tuple[Any, str, Any]] = []

    def place(owner: Any, name: str, part: str) -> None:
        placed.append((owner, name, vars(owner).get(name)))
        vars(owner)[name] = watch.timed(part, getattr(owner, name))

    for module in weights:
        place(module, "forward", "weights")
    place(cache, "update", "paging")
    AttentionInterface.register(NAME, watch.timed("paging", pager_attention))
    watch.on = True
    watch.enter("model")
    try:
        yield
    finally:
        watch.leave()
        watch.on = False
        AttentionInterface.register(NAME, pager_attention)
        for owner, name, before in placed:
            del vars(owner)[name]
            if before is not None:
                vars(owner)[name] = before
