"""How true `estimated_mass_coverage` is: beside the mass that was really kept, and the divergence from the full cache.

A text is read in chunks and its answer, known beforehand, a token at a time, as a server would decode it. For each
few tokens of the answer there is one point: the coverage that the pager estimates from digests, the true mass of
the pages attended to (from the same queries and all keys, mean over queries, heads and layers), and the mean
KL(full cache || paged) in nats. Texts: "book" goes on with a book, "echo" says a passage again that stood at
its beginning, "codes" asks for numbers that are planted in it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface

from kvpager.build import PagerOptions, load_model, make_cache
from kvpager.core.attention import TileEvent
from kvpager.evaluation.codes import CodesTask
from kvpager.evaluation.echo import EchoTask
from kvpager.evaluation.figures import divergence
from kvpager.evaluation.forward import attention, chunk_bounds, forward, full_cache
from kvpager.evaluation.text import bundled_ids, bundled_text
from kvpager.hf import PagerCache
from kvpager.hf.attention import NAME, pager_attention
from kvpager.pictures import check_target, figure_type

EXAMPLE = "example: python benchmarks/fidelity.py --texts book,echo,codes --json fidelity.json --plot fidelity.png"
CHUNK = 512
COLOURS = ("#0b6e4f", "#c8553d", "#5b6fb8", "#b8860b")
MARKS = {"book": "o", "echo": "s", "codes": "^"}


@dataclass(frozen=True)
class Point:
    """A few tokens of an answer: estimated and true share of the mass that was kept, KL in nats."""

    text: str
    budget: int
    prompt_tokens: int
    estimated: float
    true: float
    kl: float


class Watch:
    """Between the model and the pager: keeps queries and keys, and adds up the true mass of the pages attended to."""

    def __init__(self, cache: PagerCache) -> None:
        self.page_size = cache.pager.config.page_size
        self.keys: dict[int, list[torch.Tensor]] = {}  # by layer, [H, T, D] each
        self.query = torch.empty(0)  # [H * G, T, D] of the layer that attends now
        self.scale = 0.0
        self.watching = False
        self.kept: list[float] = []  # a tile and layer each
        cache.pager.observers.append(self.observe)

    def attend(self, module: Any, query: torch.Tensor, key: torch.Tensor, *rest: Any, **more: Any) -> Any:
        """Transformers' attention function: as kvpager's, and looks on."""
        layer = module.layer_idx
        self.keys.setdefault(layer, []).append(key[0].float())
        self.query, self.scale = query[0].float(), more.get("scaling") or query.shape[-1] ** -0.5
        return pager_attention(module, query, key, *rest, **more)

    def observe(self, event: TileEvent) -> None:
        """The mass of the pages attended to, of a tile of one query."""
        if not self.watching:
            return
        assert event.stop - event.start == 1, "answers are read a token at a time"
        if len(self.keys[event.layer]) > 1:
            self.keys[event.layer] = [torch.cat(self.keys[event.layer], dim=1)]
        keys = self.keys[event.layer][0]
        heads, tokens, _ = keys.shape
        scores = torch.einsum("hgd,htd->hgt", self.query.reshape(heads, -1, keys.shape[2]), keys) * self.scale
        mass = torch.softmax(scores, dim=-1).mean(dim=1)  # over the query group
        seen = torch.from_numpy(event.selected).repeat_interleave(self.page_size, dim=1)[:, :tokens]
        self.kept.append(float((mass * seen).sum(dim=1).mean()))


def texts(kind: str, tokenizer: Any, prompt: int, answer: int, count: int) -> Iterator[tuple[list[int], list[int]]]:
    """Prompts and their answers, as token ids."""
    ids = bundled_ids(tokenizer)
    for index in range(count):
        if kind == "book":
            start = 500 + index * (len(ids) - 1000 - prompt - answer) // max(1, count)
            both = ids[start : start + prompt + answer]
        elif kind == "echo":
            both = list(EchoTask.take(ids, answer, prompt - answer, seed=index).token_ids)
        else:
            task = CodesTask.make(tokenizer, bundled_text(), tokens=prompt, codes=8, seed=index)
            asked = [
                tokenizer(f"{question.beginning} {question.code}.\n\n", add_special_tokens=False)["input_ids"]
                for question in task.questions
            ]
            both = task.token_ids + [token for part in asked for token in part][:answer]
        yield both[: len(both) - answer], both[len(both) - answer :]


def run(loaded: Any, kind: str, options: argparse.Namespace) -> Iterator[Point]:
    """All points of one kind of text."""
    model = loaded.model
    for prompt, answer in texts(kind, loaded.tokenizer, options.prompt, options.answer, options.count):
        with torch.inference_mode(), attention(model, "sdpa"):
            whole = full_cache(model)
            for start, stop in chunk_bounds(len(prompt), CHUNK, 1):
                forward(model, whole, prompt[start:stop], last=True)
            full = forward(model, whole, answer).float()
        for budget in options.budgets:
            paging = PagerOptions(budget=budget, swap="memory")
            with make_cache(loaded, paging, len(prompt) + len(answer)) as cache:
                yield from paged(model, cache, prompt, answer, full, (kind, budget, options.step))


def paged(
    model: Any, cache: PagerCache, prompt: list[int], answer: list[int], full: torch.Tensor, what: tuple[str, int, int]
) -> Iterator[Point]:
    """The points of one answer; `full` [answer, vocabulary] are the full cache's logits."""
    kind, budget, step = what
    watch = Watch(cache)
    AttentionInterface.register(NAME, watch.attend)  # in the place of kvpager's own, which it calls
    with torch.inference_mode(), attention(model, NAME):
        for start, stop in chunk_bounds(len(prompt), CHUNK, cache.pager.config.tile):
            forward(model, cache, prompt[start:stop], last=True)
        watch.watching = True
        for start in range(0, len(answer) - step + 1, step):
            before = cache.stats()
            logits = torch.cat([forward(model, cache, [token]).float() for token in answer[start : start + step]])
            after = cache.stats()
            covered = after.mass_coverage * after.tiles - before.mass_coverage * before.tiles
            kl, _ = divergence(full[start : start + step], logits)
            true, watch.kept = float(np.mean(watch.kept)), []
            yield Point(kind, budget, len(prompt), covered / (after.tiles - before.tiles), true, float(kl.mean()))
    print(f"{kind}, budget {budget}: done", file=sys.stderr)


def summary(points: list[Point]) -> dict[str, float | None]:
    """How well the estimate tells the true mass (errors in points of percent), and the divergence (by rank)."""
    estimated, true, kl = (np.array([getattr(point, name) for point in points]) for name in ("estimated", "true", "kl"))
    error = 100 * (estimated - true)
    return {
        "points": len(points),
        "correlation": float(np.corrcoef(estimated, true)[0, 1]) if estimated.std() and true.std() else None,
        "error_mean": float(error.mean()),
        "error_absolute_mean": float(np.abs(error).mean()),
        "error_worst": float(np.abs(error).max()),
        "rank_correlation_with_kl": ranked(1 - estimated, kl),
        "rank_correlation_of_true_mass_with_kl": ranked(1 - true, kl),
    }


def ranked(one: np.ndarray, other: np.ndarray) -> float:
    """Spearman's correlation."""
    return float(np.corrcoef(one.argsort().argsort(), other.argsort().argsort())[0, 1])


def draw(points: list[Point], path: Path) -> None:
    """Estimated against true mass, and estimated mass left out against KL."""
    figure = figure_type()(figsize=(10.5, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    budgets = sorted({point.budget for point in points})
    for colour, budget in zip(COLOURS, budgets, strict=False):
        for kind, mark in MARKS.items():
            own = [point for point in points if (point.text, point.budget) == (kind, budget)]
            if not own:
                continue
            style = {"color": colour, "marker": mark, "s": 18, "alpha": 0.7, "lw": 0}
            estimated = [100 * point.estimated for point in own]
            left.scatter(estimated, [100 * point.true for point in own], label=f"{kind}, budget {budget}", **style)
            kl = [max(point.kl, 1e-5) for point in own]
            right.scatter([100 - share for share in estimated], kl, **style)
    least = 100 * min(min(point.estimated, point.true) for point in points) - 0.5
    left.plot([least, 100], [least, 100], color="#1b1f24", lw=1)
    left.set_xlabel("estimated_mass_coverage (%)")
    left.set_ylabel("true mass kept (%)")
    right.set_xlabel("estimated mass left out (%)")
    right.set_ylabel("KL(full cache || paged), nats a token")
    right.set_yscale("log")
    for axes in (left, right):
        axes.grid(color="#d8dee4", lw=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0], epilog=EXAMPLE)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--texts", default="book,echo,codes", help=f"of {', '.join(MARKS)} (default: all)")
    parser.add_argument("--count", type=int, default=1, help="texts of each kind (default: 1)")
    parser.add_argument("--budgets", default="240,480,1024", help="past tokens a KV head (default: 240,480,1024)")
    parser.add_argument("--prompt", type=int, default=1400, help="tokens of a prompt (default: 1400)")
    parser.add_argument("--answer", type=int, default=40, help="tokens of an answer (default: 40)")
    parser.add_argument("--step", type=int, default=5, help="tokens of an answer for each point (default: 5)")
    parser.add_argument("--from", dest="source", type=Path, nargs="*", default=[], help="points of earlier runs' JSON")
    parser.add_argument("--json", type=Path, help="write points and summaries there")
    parser.add_argument("--plot", type=check_target, help="draw there")
    options = parser.parse_args(arguments)
    options.texts = [kind for kind in options.texts.split(",") if kind]
    for kind in options.texts:
        if kind not in MARKS:
            parser.error(f"--texts: {kind!r} is not one of {', '.join(MARKS)}")
    options.budgets = [int(text) for text in options.budgets.split(",")]
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    points = [Point(**point) for path in options.source for point in json.loads(path.read_text())["points"]]
    if options.texts:
        loaded = load_model(options.model)
        for kind in options.texts:
            for point in run(loaded, kind, options):
                points.append(point)
                report(points, options)  # what is done is kept, if the rest is stopped
    print(json.dumps(report(points, options), indent=1))
    if options.plot:
        draw(points, options.plot)


def report(points: list[Point], options: argparse.Namespace) -> dict[str, dict[str, float | None]]:
    """Summaries of all points and of each budget's; written with the points where that was asked for."""
    parts = {"all": points} | {
        f"budget {budget}": [point for point in points if point.budget == budget] for budget in options.budgets
    }
    summaries = {name: summary(part) for name, part in parts.items() if len(part) > 2}
    if options.json:
        options.json.write_text(json.dumps({"summaries": summaries, "points": [asdict(point) for point in points]}))
    return summaries


if __name__ == "__main__":
    main()
