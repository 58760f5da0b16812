"""``kvpager bench step``: where the time of a model's decode step goes, beside the least that it could take.

Clocks are put around what kvpager computes (the kernel's calls, the attention function) and around the modules that
hold weights, or the compiled calls in their place. Each clock stops while another one inside of it runs, so that the
parts add up to the whole step. Pages are chosen inside of the kernel's call: the digests count that time themselves.
Steps with clocks and steps without take turns; the difference is what the clocks cost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from kvpager.bench.stream import Stream
from kvpager.core.digest import make_digest
from kvpager.errors import InputError

if TYPE_CHECKING:
    import torch

    from kvpager.hf import PagerCache

__all__ = ["PARTS", "Floor", "Split", "Stopwatch", "split", "tokens_written"]

READINGS = 4  # of memory's speed, among the steps
PARTS = {
    "weights": "linear layers, and what is computed in one call with them: norms, rotations, activations",
    "attention": "the kernel's attention over pages",
    "selection": "digests: building and choosing",
    "paging": "storing new tokens, tables, frames, swap",
    "model": "all else of the model, Python above all",
    "sampling": "the next token from the logits",
}
OVERHEAD = ("paging", "model")  # no work that a pager and a model in one piece would have to do


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

    def move(self, source: str, target: str, seconds: float) -> None:
        """Count seconds of one part as another's: those that what it called has measured itself."""
        self.seconds[source] -= seconds
        self.seconds[target] += seconds

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

    @property
    def overhead_ms(self) -> float:
        """Of a step with clocks, what is neither weights nor attention, selection or sampling."""
        return sum(self.parts_ms[part] for part in OVERHEAD)

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
            "overhead_ms": self.overhead_ms,
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
    logits: torch.Tensor,
    sampler: Callable[[torch.Tensor], int],
    stream: Stream,
    *,
    steps: int,
    progress: Callable[[int], None] = lambda done: None,
) -> Split:
    """Run `steps` decode steps without clocks and as many with them, in turns, after a prompt that gave `logits`.

    `cache` holds the prompt. Raises InputError for less than one step.
    """
    import torch

    if steps < 1:
        raise InputError(f"steps: {steps} is less than 1")
    weights, watch = weight_modules(model), Stopwatch()
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
            with _clocked(model, cache, watch, weights):
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


class _Clocks:
    """Clocks on the very objects that compute, so that what runs is what runs without them. `remove` takes them away.

    Nothing stands between the kernel and its digests: choosing happens inside of the kernel's one call for a layer,
    which measures it itself.
    """

    def __init__(self, model: Any, cache: PagerCache, watch: Stopwatch, weights: Sequence[Any]) -> None:
        self._watch = watch
        self._placed: list[tuple[Any, str, Any]] = []
        compiled = [run for run in map(_fused, model.modules()) if run is not None]
        inside = {id(part) for layer in model.modules() if _fused(layer) is not None for part in layer.modules()}
        for run in compiled:
            self._set(run, "calls", _Timed(run.calls, watch, "weights", ("before", "after")))
        for module in weights:
            if id(module) not in inside:  # one with a forward of its own would have its layer leave the compiled calls
                self._time(module, "forward", "weights")
        self._time(cache, "update", "paging")
        state = cache.pager._state
        self._store: Any = getattr(state.digest, "store", None)
        if self._store is None and state.digest is not None:
            for name in ("build", "choose"):
                self._time(state.digest, name, "selection")
        self._set(state.kernel, "write", self._around("paging", state.kernel.write))
        self._set(state.kernel, "batch", self._batches(state.kernel.batch))

    def remove(self) -> None:
        """Everything as it was: other steps are as quick as without clocks."""
        for owner, name, before in self._placed:
            if before is None:
                del vars(owner)[name]
            else:
                vars(owner)[name] = before

    def _set(self, owner: Any, name: str, value: object) -> None:
        self._placed.append((owner, name, vars(owner).get(name)))
        vars(owner)[name] = value

    def _time(self, owner: Any, name: str, part: str) -> None:
        self._set(owner, name, self._watch.timed(part, getattr(owner, name)))

    def _batches(self, batch: Callable[..., Any]) -> Callable[..., Any]:
        """`batch` of a kernel, giving batches under a clock."""
        start = self._watch.timed("attention", batch)

        def run(*args: Any) -> Any:
            made = start(*args)
            made.advance = self._around("attention", made.advance)
            return made

        return run

    def _around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` under the clock of `part`, less what the digests say that they took in it."""
        store = self._store
        timed = self._watch.timed(part, function)
        if store is None:
            return timed

        def run(*args: Any) -> Any:
            before = store.nanoseconds
            result = timed(*args)
            self._watch.move(part, "selection", (store.nanoseconds - before) * 1e-9)
            return result

        return run


def _fused(layer: Any) -> Any:
    """What runs a decoder layer in compiled calls, or None."""
    try:
        from kvpager.hf.layer import fused
    except ImportError:  # without the extension nothing is packed
        return None
    return fused(layer)


@contextmanager
def _clocked(model: Any, cache: PagerCache, watch: Stopwatch, weights: Sequence[Any]) -> Iterator[None]:
    """Run one step under clocks."""
    from transformers import AttentionInterface

    from kvpager.hf.attention import NAME, pager_attention

    clocks = _Clocks(model, cache, watch, weights)
    AttentionInterface.register(NAME, watch.timed("paging", pager_attention))
    watch.on = True
    watch.enter("model")
    try:
        yield
    finally:
        watch.leave()
        watch.on = False
        AttentionInterface.register(NAME, pager_attention)
        clocks.remove()
