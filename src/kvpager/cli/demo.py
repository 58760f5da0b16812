"""``kvpager demo``: the same long text held in three ways, and what each still knows of its beginning."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvpager.cli import demo_report
from kvpager.cli.console import emit_json, progress, say
from kvpager.cli.options import add_model_options, load_model, whole
from kvpager.errors import InputError

if TYPE_CHECKING:
    from kvpager.build import PagerOptions
    from kvpager.cli.demo_screen import Screen
    from kvpager.evaluation.codes import CodesTask, Column, Question, RecallMap
    from kvpager.models import LoadedModel

__all__ = ["add_parser", "run"]

EPILOG = """\
examples:
  kvpager demo
  kvpager demo --quick
  kvpager demo --json --map map.png > figures.json

Three columns read the same text of a public-domain book, in which codes were planted early: a full cache; permanent
eviction; and kvpager, which calls back what it evicted. The last two hold the same bytes in memory. Then each
completes the planted sentences. At the end kvpager reads again with no budget and a quarter of the memory, and
must write what the full cache wrote, token for token.
"""
MIB = 2**20
CHUNK = 256
MEMORY_SHARE = 0.30  # of the full KV, for permanent eviction and for kvpager alike
BUDGET_SHARE = 0.25  # of the text: what a head of kvpager attends to
EXACT_POOL = "25%"
FULL, EVICTED, PAGED = "full cache", "permanent eviction", "kvpager"
FADE = 0.7


@dataclass
class Answer:
    """What one column wrote after one question."""

    token_ids: list[int]
    text: str
    right: bool
    recalls: int = 0
    words: str = ""  # of the block that came back and was attended to most
    block: int | None = None


@dataclass
class Result:
    """Everything that was seen."""

    task: CodesTask
    columns: list[Column]
    captions: dict[str, str]
    map: RecallMap
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    memory: dict[str, dict[str, int]] = field(default_factory=dict)  # of each column, when all was asked
    seconds: float = 0.0
    exact: dict[str, Any] = field(default_factory=dict)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``demo`` and its options."""
    parser = subparsers.add_parser(
        "demo",
        help="see what eviction forgets and recall remembers (two or three minutes)",
        description="See what permanent eviction forgets and recall remembers, in the same memory.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="a text of 2,000 tokens and four codes")
    parser.add_argument("--tokens", type=whole(400), metavar="N", help="length of the text (default: 4000)")
    parser.add_argument("--codes", type=whole(1, 8), metavar="N", help="codes to plant (default: 8)")
    parser.add_argument("--seed", type=whole(0, 2**63 - 1), metavar="N", help="plant other codes")
    parser.add_argument("--swap", metavar="memory|PATH", help="where kvpager's pages go (default: a file of its own)")
    parser.add_argument("--map", metavar="FILE", help="picture of the map (default: ./kvpager-demo.png)")
    parser.add_argument("--json", action="store_true", help="print one JSON object with all figures")
    add_model_options(parser)
    parser.set_defaults(run=run, dtype="float32")


def run(args: argparse.Namespace) -> int:
    """Show it; returns 0 whatever the scores are. Raises what loading and paging raise."""
    from kvpager.evaluation.text import bundled_text
    from kvpager.pictures import check_target

    target = check_target(args.map or "kvpager-demo.png")
    started = time.perf_counter()
    loaded = load_model(args)
    from kvpager.evaluation.codes import CodesTask  # after loading, which sets PyTorch up before its first import

    tokens = args.tokens or (2000 if args.quick else 4000)
    codes = args.codes or (4 if args.quick else 8)
    task = CodesTask.make(loaded.tokenizer, bundled_text(), tokens=tokens, codes=codes, seed=args.seed)
    _fits(loaded, task)
    with ExitStack() as stack:
        result = _columns(args, loaded, task, stack)
        with _reporter(args, loaded, result) as show:
            _read(result, show)
            _ask(loaded, result, show)
        result.memory = {column.name: column.memory() for column in result.columns}
    result.exact = _exact(args, loaded, result)
    result.seconds = time.perf_counter() - started
    demo_report.draw(result, target)
    if args.json:
        emit_json(demo_report.figures(args, loaded, result, target))
    else:
        demo_report.tell(result, target)
    return 0


def _fits(loaded: LoadedModel, task: CodesTask) -> None:
    needed = _held(task)
    if loaded.context_length is not None and needed > loaded.context_length:
        raise InputError(f"tokens: {needed} are needed and the context of {loaded.name} is {loaded.context_length}")


def _held(task: CodesTask) -> int:
    """The most tokens that a column holds: the text, a question and its answer."""
    from kvpager.evaluation.codes import ANSWER_TOKENS

    return len(task.token_ids) + max(map(len, task.prompts)) + ANSWER_TOKENS


def _columns(args: argparse.Namespace, loaded: LoadedModel, task: CodesTask, stack: ExitStack) -> Result:
    """The three columns, the last two with the same bytes for frames, digests and tables."""
    from kvpager import build
    from kvpager.evaluation.codes import Column, RecallMap
    from kvpager.evaluation.forward import full_cache
    from kvpager.hf import PagerCache, kv_shape
    from kvpager.pools import pager_config

    shape = kv_shape(loaded.model.config, loaded.dtype)
    held = _held(task)
    memory = int(MEMORY_SHARE * held * shape.token_bytes)
    budget = int(BUDGET_SHARE * held) // 16 * 16
    paged = build.PagerOptions(memory=str(memory), budget=budget, swap=args.swap)
    lossy = _largest_discard(loaded, replace(paged, mode="discard", swap="memory"), held)
    # Permanent eviction does best with a wide protected window before the tile: a quarter of its budget.
    config = pager_config(lossy, held, shape)
    config = replace(config, recent_pages=max(config.recent_pages, (lossy.budget or 0) // 16 // 4))
    lossy_cache = stack.enter_context(PagerCache(loaded.model.config, config, dtype=loaded.dtype))
    paged_cache = stack.enter_context(build.make_cache(loaded, paged, tokens=held))
    seen = RecallMap(shape.layers, -(-held // 16))
    paged_cache.pager.observers.append(seen)
    columns = [
        Column(FULL, loaded.model, full_cache(loaded.model)),
        Column(EVICTED, loaded.model, lossy_cache),
        Column(PAGED, loaded.model, paged_cache),
    ]
    captions = {
        FULL: "keeps everything in memory",
        EVICTED: f"keeps {lossy.budget} tokens a head for good",
        PAGED: f"reads {paged.budget} tokens a head, swaps the rest",
    }
    return Result(task, columns, captions, seen)


def _largest_discard(loaded: LoadedModel, options: PagerOptions, held: int) -> PagerOptions:
    """The same options with the largest budget that the memory can hold: digests cost permanent eviction nothing."""
    from kvpager import build
    from kvpager.evaluation.echo import frames_for

    budget = 16 * 4  # the least that a budget can be
    with build.make_cache(loaded, replace(options, budget=budget), tokens=held) as cache:
        frames, shape = cache.stats().frames, cache.pager.shape
    while frames_for(budget + 16, options.tile, options.page_size, CHUNK, shape) <= frames:
        budget += 16
    return replace(options, budget=budget)


# -- what is shown while it runs

Show = Callable[[str, "Column | None", str], None]


@contextlib.contextmanager
def _reporter(args: argparse.Namespace, loaded: LoadedModel, result: Result) -> Iterator[Show]:
    """A live screen on a terminal with rich, else lines on standard error."""
    stream = sys.stderr if args.json else sys.stdout
    if stream.isatty():
        try:
            from kvpager.cli.demo_screen import Screen
        except ImportError:
            pass
        else:
            yield from _live(Screen, loaded, result, stream)
            return
    say(f"Reading {len(result.task.token_ids)} tokens of a book in three ways, which takes a minute or two:")
    for column in result.columns:
        say(f"  {column.name}: {result.captions[column.name]}")
    with progress("Reading", len(result.task.token_ids) * len(result.columns)) as advance:
        done = dict.fromkeys((column.name for column in result.columns), 0)

        def show(what: str, column: Column | None, text: str) -> None:
            if what == "read" and column is not None:
                done[column.name] = int(text)
                advance(sum(done.values()))
            elif what == "answered" and column is not None:
                answer = result.answers[column.name][-1]
                words = f"   (came back: {answer.words!r})" if answer.words else ""
                say(f"  {column.name}: {answer.text.strip()!r} {'right' if answer.right else 'wrong'}{words}")
            elif what == "question":
                say(f"{text} ...")

        yield show


def _live(screen_type: type[Screen], loaded: LoadedModel, result: Result, stream: Any) -> Iterator[Show]:
    from rich.console import Console

    from kvpager.cli.demo_screen import Scene, View

    full = result.columns[2].cache.pager.shape.token_bytes * len(result.task.token_ids)  # type: ignore[union-attr]
    views = {
        column.name: View(column.name, result.captions[column.name], _memory_line(column, full))
        for column in result.columns
    }
    scene = Scene(
        len(result.task.token_ids), list(views.values()), result.map.heat, questions=len(result.task.questions)
    )
    with screen_type(scene, Console(file=stream)) as screen:

        def show(what: str, column: Column | None, text: str) -> None:
            if what == "question":
                scene.question, scene.number, scene.block = text, scene.number + 1, None
                for view in views.values():
                    view.answer, view.right = "", None
            elif column is not None:
                view = views[column.name]
                if what == "read":
                    view.read = int(text)
                    view.memory = _memory_line(column, full)
                elif what == "token":
                    view.answer = text
                elif what == "answered":
                    answers = result.answers[column.name]
                    view.right, view.asked = answers[-1].right, len(answers)
                    view.score = sum(answer.right for answer in answers)
                if what != "read" and column.name == PAGED and result.map.brightest is not None:
                    scene.block = result.map.brightest
                    scene.before, scene.words, scene.after = (
                        _words(loaded, result.task, 16 * scene.block + shift, count)
                        for shift, count in ((-10, 10), (0, 16), (16, 8))
                    )
            screen.show()
            if column is not None and column.name == PAGED:  # its light stays while the others write
                result.map.fade(FADE)

        yield show


def _memory_line(column: Column, full: int) -> str:
    memory = column.memory()
    share = f"{memory['resident_bytes'] / MIB:.1f} MiB resident ({memory['resident_bytes'] / full:.0%})"
    return share + (f", swap {memory['swap_bytes'] / MIB:.0f} MiB" if memory["swap_bytes"] else "")


def _words(loaded: LoadedModel, task: CodesTask, token: int, count: int = 16) -> str:
    """The words of `count` tokens of the text from `token` on, on one line."""
    decoded: Any = loaded.tokenizer.decode(task.token_ids[max(0, token) : token + count])
    return " ".join(str(decoded).split("\n")).replace("  ", " ")


# -- what is done


def _read(result: Result, show: Show) -> None:
    """All columns read the text, a chunk each in turn."""
    from kvpager.evaluation.forward import chunk_bounds

    ids = result.task.token_ids
    for start, stop in chunk_bounds(len(ids), CHUNK, 1):
        for column in result.columns:
            column.read(ids[start:stop])
            show("read", column, str(stop))
    result.map.restart()


def _ask(loaded: LoadedModel, result: Result, show: Show) -> None:
    """Every column completes every planted sentence."""
    task = result.task
    result.answers = {column.name: [] for column in result.columns}
    for question, prompt in zip(task.questions, task.prompts, strict=True):
        show("question", None, question.beginning)
        for column in result.columns:
            result.map.clear()
            ids: list[int] = []
            for token in column.answer(prompt):
                ids.append(token)
                show("token", column, _decode(loaded, ids))
            result.answers[column.name].append(_answer(loaded, result, column, question, ids))
            show("answered", column, "")


def _answer(loaded: LoadedModel, result: Result, column: Column, question: Question, ids: list[int]) -> Answer:
    text = _decode(loaded, ids)
    answer = Answer(ids, text, text.strip().startswith(question.code))
    if column.name == PAGED and result.map.brightest is not None:
        answer.block = result.map.brightest
        answer.words = _words(loaded, result.task, 16 * answer.block).strip()
        answer.recalls = result.map.recalls
    return answer


def _decode(loaded: LoadedModel, ids: list[int]) -> str:
    decoded: Any = loaded.tokenizer.decode(ids)
    return str(decoded).split("\n")[0]


def _exact(args: argparse.Namespace, loaded: LoadedModel, result: Result) -> dict[str, Any]:
    """No budget and a quarter of the frames: whether the ids are those of the full cache."""
    from kvpager import build
    from kvpager.evaluation.codes import Column
    from kvpager.evaluation.forward import chunk_bounds

    task = result.task
    options = build.PagerOptions(pool=EXACT_POOL, swap=args.swap)
    with build.make_cache(loaded, options, tokens=_held(task)) as cache:
        column = Column("exact", loaded.model, cache)
        with progress(f"No budget, a pool of {EXACT_POOL}", len(task.token_ids)) as advance:
            for start, stop in chunk_bounds(len(task.token_ids), CHUNK, 1):
                column.read(task.token_ids[start:stop])
                advance(stop)
        same = []
        for prompt, expected in zip(task.prompts, result.answers[FULL], strict=True):
            same += [mine == other for mine, other in zip(column.answer(prompt), expected.token_ids, strict=True)]
        return {
            "pool": EXACT_POOL,
            "identical": all(same),
            "ids_compared": len(same),
            "ids_equal": sum(same),
            **column.memory(),
            "recalls": cache.stats().recalls,
        }
