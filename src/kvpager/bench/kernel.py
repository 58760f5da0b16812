"""``kvpager bench kernel``: attention kernels beside PyTorch's, and beside the memory's own speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from kvpager.bench.cases import Case, Heads
from kvpager.bench.contenders import GROUP_PAGES, KERNELS, MOST_PLACES, Contender, Paged, Sdpa, SdpaMemory, open_kernel
from kvpager.bench.layered import Layered
from kvpager.bench.machine import l3_bytes
from kvpager.bench.rounds import Runner, play
from kvpager.bench.selecting import Selected, measure_selection
from kvpager.bench.stream import Stream
from kvpager.config import DType
from kvpager.errors import ConfigError
from kvpager.models.memory import free_memory

__all__ = ["SHAPES", "Plan", "Result", "Row", "default_kernels", "measure", "steps"]

MEMORY_SHARE = 0.7  # of the free memory, for all contenders together
CACHES = 4  # times the largest cache that a contender's places take together, so that each comes from memory
UNKNOWN_CACHE = 2**25
# who gets memory first
PRIORITY = ("native-layer", "native", "sdpa-fp32", "sdpa-bf16", "native-massless", "reference")
SHAPES = (Heads(9, 3, 64), Heads(32, 8, 128), Heads(32, 32, 128))


@dataclass(frozen=True)
class Plan:
    """What to measure: every combination of heads, tokens, batches and tiles, by every kernel.

    kernels    names among KERNELS; `dtypes` are how the paged ones hold pages
    threads    for all of them, and for the reading of memory; `repeats` is the number of rounds
    memory     bytes that all contenders together may take; None for a share of what is free
    group_pages  pages that one call of a paged kernel attends to
    selection  measure also how long selection takes
    """

    heads: Sequence[Heads]
    tokens: Sequence[int]
    batches: Sequence[int]
    tiles: Sequence[int]
    kernels: Sequence[str]
    dtypes: Sequence[DType]
    threads: int
    repeats: int
    memory: int | None = None
    group_pages: int = GROUP_PAGES
    selection: bool = True

    def cases(self, heads: Heads) -> list[Case]:
        """The cases of one shape, short ones first; lengths below a tile are left out."""
        return [
            Case(heads, tokens, batch, tile)
            for tile in self.tiles
            for batch in self.batches
            for tokens in self.tokens
            if tile <= tokens
        ]


@dataclass(frozen=True)
class Row:
    """One kernel at one case. `bytes` are those of keys and values that a run reads; `seconds` is each round's.

    beside    GB/s of the stream in the same rounds
    """

    kernel: str
    dtype: DType
    case: Case
    bytes: int
    seconds: Sequence[float]
    beside: float

    @property
    def ms(self) -> float:
        """The median time of one run."""
        return median(self.seconds) * 1e3

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes of keys and values read a second."""
        return self.bytes / self.ms / 1e6


@dataclass
class Result:
    """All that was measured; `skipped` says in words what was not, and why."""

    stream: Stream
    rows: list[Row] = field(default_factory=list)
    selections: list[Selected] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)

    def times_faster(self, row: Row) -> dict[str, float]:
        """How many times faster a row is than other kernels at its case, those over pages only with the same dtype."""
        others = {
            (other.kernel, other.dtype): other.ms
            for other in self.rows
            if other.case == row.case and other.kernel != row.kernel
        }
        found: dict[str, float] = {}
        for (kernel, dtype), ms in others.items():
            if kernel.startswith("sdpa") or dtype == row.dtype:
                found[kernel] = ms / row.ms
        return found

    def row_figures(self, row: Row) -> dict[str, Any]:
        """One row of ``--json``."""
        case = row.case
        return {
            "kernel": row.kernel,
            "query_heads": case.heads.query_heads,
            "kv_heads": case.heads.kv_heads,
            "head_dim": case.heads.head_dim,
            "tokens": case.tokens,
            "batch": case.batch,
            "queries": case.tile,
            "dtype": row.dtype,
            "ms": row.ms,
            "ms_least": min(row.seconds) * 1e3,
            "rounds": len(row.seconds),
            "bytes": row.bytes,
            "gb_per_s": row.gb_per_s,
            "stream_fraction": row.gb_per_s / self.stream.gb_per_s,
            "stream_beside_gb_per_s": row.beside,
            "stream_beside_fraction": row.gb_per_s / row.beside,
            "times_faster": self.times_faster(row),
        }

    def figures(self) -> dict[str, Any]:
        """All figures, for ``--json``."""
        return {
            "stream_gb_per_s": self.stream.gb_per_s,
            "stream": {
                "reader": self.stream.reader,
                "threads": self.stream.threads,
                "passes": len(self.stream.rates),
                "least_gb_per_s": min(self.stream.rates),
                "most_gb_per_s": max(self.stream.rates),
            },
            "rows": [self.row_figures(row) for row in self.rows],
            "select": [one.as_dict() for one in self.selections],
            "skipped": self.skipped,
            "differences": self.errors,
        }


def default_kernels() -> tuple[str, ...]:
    """All kernels that are there: the native one only where it was built."""
    try:
        open_kernel("native")
    except ConfigError:
        return tuple(name for name in KERNELS if not name.startswith("native"))
    return KERNELS


def measure(plan: Plan, progress: Callable[[int], None] = lambda done: None) -> Result:
    """Measure all that a plan names; `progress` gets the cases done so far, of `steps(plan)`.

    What does not fit into memory is skipped and said. Raises ConfigError for kernels or formats that are not there, and
    KVPagerError where a kernel's result is wrong.
    """
    for name in plan.kernels:
        if name not in KERNELS:
            raise ConfigError(f"kernels: {name!r} is not one of {', '.join(KERNELS)}")
    limit = plan.memory if plan.memory is not None else int((free_memory() or 2**33) * MEMORY_SHARE)
    result = Result(Stream(plan.threads))
    result.stream.read(3)
    done = 0
    for heads in plan.heads:
        contenders = _contenders(plan, heads)
        for one in contenders:
            if isinstance(one, Paged) and one.name != "reference":
                result.errors[f"{one.name} {one.dtype} {heads}"] = one.check()
        cases = plan.cases(heads)
        fitting = _fill(contenders, cases, limit, result.skipped)
        for index, case in enumerate(cases):
            taking_part = [one for one, mine in zip(contenders, fitting, strict=True) if case in mine]
            result.rows += _case(result.stream, taking_part, case, plan.repeats)
            progress(done + index + 1)
        done += len(cases)
    if plan.selection:
        names = [name for name in plan.kernels if not name.startswith("sdpa")]
        for dtype in plan.dtypes if names else ():
            result.selections.append(measure_selection(open_kernel(names[0]), dtype, plan.repeats, result.stream.read))
        progress(done + 1)
    return result


def steps(plan: Plan) -> int:
    """How many steps `measure` reports for a plan."""
    return sum(len(plan.cases(heads)) for heads in plan.heads) + plan.selection


def _contenders(plan: Plan, heads: Heads) -> list[Contender]:
    """Everybody who takes part for one shape of heads, those first who matter most when memory is short."""
    memory = SdpaMemory()
    found: list[Contender] = []
    for name in sorted(plan.kernels, key=PRIORITY.index):
        if name.startswith("sdpa"):
            found.append(Sdpa(memory, heads, "float32" if name == "sdpa-fp32" else "bfloat16"))
        else:
            kind = Layered if name == "native-layer" else Paged
            found += [kind(open_kernel(name), name, heads, dtype, plan.group_pages) for dtype in plan.dtypes]
    return found


def _fill(contenders: Sequence[Contender], cases: Sequence[Case], limit: int, skipped: list[str]) -> list[list[Case]]:
    """Give every contender memory for its cases, as far as the limit allows: the cases of each that fit."""
    cold = CACHES * (l3_bytes() or UNKNOWN_CACHE)
    taken, shared = 0, 0
    fitting = []
    for one in contenders:
        # what PyTorch's two formats share is taken once
        left = limit - taken + (shared if isinstance(one, Sdpa) else 0)
        mine = [case for case in cases if one.case_bytes(case) <= left]
        skipped += [
            f"{one.name} ({one.dtype}), {case.heads}, {case.tokens} tokens, batch {case.batch}: needs "
            f"{one.case_bytes(case) / 1e6:,.1f} MB, and {max(left, 0) / 1e6:,.1f} MB are left of the "
            f"{limit / 1e6:,.1f} MB that may be used"
            for case in cases
            if case not in mine
        ]
        fitting.append(mine)
        if not mine:
            continue
        most = max(one.case_bytes(case) for case in mine)
        size = min(max(most, cold + most), max(left, most))
        if isinstance(one, Sdpa):
            taken, shared = taken - shared + max(size, shared), max(size, shared)
        else:
            taken += size
        one.fill(size)
    return fitting


def _case(stream: Stream, contenders: Sequence[Contender], case: Case, rounds: int) -> list[Row]:
    """Time all contenders at one case in turns, the stream between them."""
    if not contenders:
        return []
    contenders = sorted(contenders, key=lambda one: KERNELS.index(one.name))  # with and without mass side by side
    runners = [Runner(one.places(case, MOST_PLACES)) for one in contenders]
    before = len(stream.rates)
    play(runners, rounds, stream.read)
    beside = median(stream.rates[before:])
    return [
        Row(one.name, one.dtype, case, one.case_bytes(case), runner.seconds, beside)
        for one, runner in zip(contenders, runners, strict=True)
    ]
