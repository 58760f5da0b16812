"""What ``kvpager demo`` tells at its end: answers, memory, and the picture of what came back."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpager.cli.console import emit

if TYPE_CHECKING:
    from kvpager.cli.demo import Result
    from kvpager.evaluation.codes import Question
    from kvpager.models import LoadedModel

__all__ = ["draw", "figures", "tell"]


def draw(result: Result, target: Path) -> None:
    """Draw which pages came back."""
    from kvpager.evaluation.plots import draw_page_map

    labels = [(question.token // 16, _place(question)) for question in result.task.questions]
    title = (
        f"kvpager: attention to pages that had been evicted and came back, while {len(labels)} sentences were completed"
    )
    draw_page_map(result.map.total, labels, title, target)


def _place(question: Question) -> str:
    words = question.beginning.removesuffix(" is").split()
    return " ".join(words[1:2] + words[-2:])


def figures(args: argparse.Namespace, loaded: LoadedModel, result: Result, target: Path) -> dict[str, Any]:
    """What ``--json`` prints."""
    return {
        "model": loaded.name,
        "dtype": loaded.dtype,
        "tokens": len(result.task.token_ids),
        "questions": [
            {"beginning": question.beginning, "code": question.code, "token": question.token}
            for question in result.task.questions
        ],
        "columns": [
            {
                "name": column.name,
                "right": sum(answer.right for answer in result.answers[column.name]),
                "of": len(result.task.questions),
                "budget": None if column.stats is None else column.cache.pager.config.budget,  # type: ignore[union-attr]
                **result.memory[column.name],
                "answers": [vars(answer) for answer in result.answers[column.name]],
            }
            for column in result.columns
        ],
        "exact": result.exact,
        "map": str(target),
        "seconds": round(result.seconds, 1),
    }


def tell(result: Result, target: Path) -> None:
    """Print answers, memory and the verdict for people."""
    rows = [
        (
            question.beginning,
            question.code,
            [(answers[index].text.strip().rstrip("."), answers[index].right) for answers in result.answers.values()],
        )
        for index, question in enumerate(result.task.questions)
    ]
    names = list(result.answers)
    try:
        from rich.console import Console

        from kvpager.cli.demo_screen import memory_table, scores_table
    except ImportError:
        for name in names:
            emit(f"{name}: {sum(answer.right for answer in result.answers[name])} of {len(rows)} right")
        for name, memory in result.memory.items():
            emit(f"{name}: " + ", ".join(f"{what} {size}" for what, size in memory.items()))
    else:
        console = Console()
        console.print(scores_table(names, rows))
        console.print(memory_table(list(result.memory.items())))
    emit(_verdict(result.exact))
    emit(f"The map of what came back: {target}. It all took {result.seconds:.0f} seconds.")


def _verdict(exact: dict[str, Any]) -> str:
    what = f"With no budget and a pool of {exact['pool']} of the frames ({exact['recalls']} pages called back)"
    if exact["identical"]:
        return f"{what}, all {exact['ids_compared']} token ids are identical to the full cache's."
    differ = exact["ids_compared"] - exact["ids_equal"]
    return f"{what}, {differ} of {exact['ids_compared']} token ids DIFFER from the full cache's."
