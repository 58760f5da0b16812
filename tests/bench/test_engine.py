"""Runs of ``kvpager bench engine``: the virtual clock, arrivals, what steps ran, and figures that agree."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.small_llm import save_folder

from kvpager import build
from kvpager.bench import engine_figures
from kvpager.bench.engine import PARTS, Answer, EngineRun, Step, VirtualClock, drive, require_room
from kvpager.bench.workload import Item, Kind, Prompts, Workload
from kvpager.engine.engine import Engine, EngineConfig
from kvpager.engine.params import SamplingParams
from kvpager.errors import InputError, RequestTooLarge
from kvpager.models import LoadedModel


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return build.load_model(str(save_folder(tmp_path_factory.mktemp("model"))), threads=1)


def greedy(item: Item) -> SamplingParams:
    return SamplingParams(max_tokens=item.output_tokens, temperature=0, ignore_eos=True)


@contextmanager
def engine(loaded: LoadedModel, clock: VirtualClock, pool: str = "400", **more: Any) -> Iterator[Engine]:
    config = EngineConfig(**{"max_num_seqs": 4, "max_num_batched_tokens": 128, **more})
    made = build.make_engine(loaded, build.PagerOptions(pool=pool, swap="memory"), config, clock=clock)
    try:
        yield made
        made.check()
    finally:
        made.close()


def run(loaded: LoadedModel, work: Workload, pool: str = "400", **more: Any) -> EngineRun:
    clock = VirtualClock()
    prompts = Prompts(range(3, 250), work)
    with engine(loaded, clock, pool, **more) as made:
        return drive(made, loaded.model, work.items(), prompts, greedy, clock)


def test_every_token_is_accounted_for(loaded: LoadedModel) -> None:
    work = Workload((Kind("short", 20, 6, 2), Kind("long", 150, 9, 1)), 6, seed=1)
    result = run(loaded, work)
    assert [len(answer.token_ids) for answer in result.answers] == [item.output_tokens for item in work.items()]
    assert {answer.finish_reason for answer in result.answers} == {"length"}
    figures = engine_figures.figures(result)
    assert (figures["completed"], figures["failed"], figures["errors"]) == (6, 0, [])
    read, written = sum(i.prompt_tokens for i in work.items()), sum(i.output_tokens for i in work.items())
    assert (figures["prompt_tokens"], figures["output_tokens"]) == (read, written)
    assert figures["prompt_tokens_computed"] + figures["cached_tokens"] == read
    # all but each answer's first token, which its prompt's last step gives, were a decode's
    assert sum(step.tokens - step.prefill for step in result.steps) == written - 6
    assert figures["output_tokens_per_s"] == pytest.approx(written / result.seconds)
    assert [row["usage"]["completion_tokens"] for row in figures["requests"]] == [
        item.output_tokens for item in work.items()
    ]
    assert figures["ttft_ms"]["n"] == figures["queue_ms"]["n"] == figures["tpot_ms"]["n"] == 6
    assert figures["memory"]["peak_rss_bytes"] > 0


def test_parts_add_up_to_steps_and_every_part_is_seen(loaded: LoadedModel) -> None:
    result = run(loaded, Workload((Kind("all", 70, 5),), 3), max_num_batched_tokens=512)
    figures = engine_figures.figures(result)
    assert set(figures["parts"]) == set(PARTS)
    assert all(part["seconds"] > 0 for part in figures["parts"].values())
    assert sum(part["share"] for part in figures["parts"].values()) == pytest.approx(1)
    outside = sum(figures["parts"][part]["share"] for part in PARTS if part not in ("model", "attention"))
    assert figures["overhead_share"] == pytest.approx(outside)
    whole = sum(step.whole for step in result.steps)
    assert whole <= result.seconds
    assert sum(one["seconds"] for one in figures["steps"].values()) == pytest.approx(whole)
    assert sum(one["n"] for one in figures["steps"].values()) == len(result.steps)
    assert figures["steps"]["decode"]["mean_sequences"] == 3
    assert list(figures["decode_by_batch"]) == ["3"]


def test_the_clocks_are_gone_afterwards(loaded: LoadedModel) -> None:
    clock = VirtualClock()
    work = Workload((Kind("all", 20, 3),), 2)
    with engine(loaded, clock) as made:
        drive(made, loaded.model, work.items(), Prompts(range(3, 250), work), greedy, clock)
        assert "forward" not in vars(loaded.model)
        assert "attend_step" not in vars(made.pager)
        assert "schedule" not in vars(made._scheduler)


def test_a_low_rate_jumps_over_the_time_in_which_nothing_happens(loaded: LoadedModel) -> None:
    work = Workload((Kind("all", 20, 3),), 4, rate=1e-4)  # hours between two requests
    result = run(loaded, work)
    assert result.seconds > work.items()[-1].at > 3600
    assert {step.sequences for step in result.steps} == {1}
    starts = [step.at for step in result.steps if step.prefill]
    for item, start in zip(work.items(), starts, strict=True):
        assert item.at <= start < item.at + 60
    usage = [answer.usage for answer in result.answers]
    assert all(one is not None and one.total_s < 60 for one in usage)


def test_the_virtual_clock_never_goes_back() -> None:
    seconds = [10.0]
    clock = VirtualClock(lambda: seconds[0])
    assert clock() == 0
    clock.skip(5)
    assert clock() == 5
    clock.skip(2)
    assert clock() == 5
    seconds[0] += 1
    assert clock() == 6


def test_a_shared_prefix_is_computed_once(loaded: LoadedModel) -> None:
    work = Workload((Kind("all", 10, 3),), 5, shared_prefix=96)
    assert engine_figures.figures(run(loaded, work))["cached_tokens"] >= 4 * 96
    assert engine_figures.figures(run(loaded, work, enable_prefix_caching=False))["cached_tokens"] == 0


@pytest.mark.promise(1)
def test_pools_change_no_answer_and_the_comparison_says_so(loaded: LoadedModel) -> None:
    work = Workload((Kind("all", 100, 12),), 4, seed=2)
    runs = {pool: run(loaded, work, pool) for pool in ("40", "64", "400")}
    rows = engine_figures.compared(runs)
    assert [row["pool"] for row in rows] == ["40", "64", "400"]
    assert rows[0]["recalls"] > 0
    assert rows[2]["recalls"] == 0
    assert [row["pool_bytes"] for row in rows] == sorted(row["pool_bytes"] for row in rows)
    assert all(row["ids_equal"] and not row["broken"] and row["completed"] == 4 for row in rows)
    # an answer that differs is a broken promise under the same schedule, and may be rounding under another
    small = runs["40"]
    small.answers[1].token_ids[3] += 1
    first = engine_figures.compared({"40": small, "400": runs["400"]})[0]
    assert (first["differing"], first["ids_equal"], first["broken"]) == (1, False, first["same_schedule"])


def test_a_broken_promise_needs_the_same_schedule(loaded: LoadedModel) -> None:
    work = Workload((Kind("all", 30, 4),), 2)
    one, same, other = run(loaded, work), run(loaded, work), run(loaded, work, max_num_seqs=1)
    assert one.schedule_digest == same.schedule_digest != other.schedule_digest
    same.answers[0].token_ids[0] += 1
    other.answers[0].token_ids[0] += 1
    assert engine_figures.compared({"a": same, "b": one})[0]["broken"]
    assert not engine_figures.compared({"a": other, "b": one})[0]["broken"]


def test_requests_that_are_too_long_are_named() -> None:
    items = Workload((Kind("fits", 30, 4, 1), Kind("long", 90, 20, 1)), 4).items()
    require_room(items, 110)
    with pytest.raises(InputError, match="long: 90 tokens in and 20 out are more than 109"):
        require_room(items, 109)


def test_what_the_engine_refuses_comes_through(loaded: LoadedModel) -> None:
    with pytest.raises(RequestTooLarge):
        run(loaded, Workload((Kind("all", 500, 100),), 1))


def test_ctrl_c_keeps_what_was_measured(loaded: LoadedModel) -> None:
    work = Workload((Kind("all", 20, 8),), 3)
    clock = VirtualClock()

    def press(done: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    with engine(loaded, clock, max_num_seqs=1) as made:
        result = drive(made, loaded.model, work.items(), Prompts(range(3, 250), work), greedy, clock, progress=press)
        assert "forward" not in vars(loaded.model)
        for item in work.items():
            made.abort(str(item.index))
        made.step()
    figures = engine_figures.figures(result)
    assert figures["interrupted"]
    assert (figures["completed"], figures["failed"]) == (1, 2)


def test_kinds_of_steps() -> None:
    def step(tokens: int, prefill: int) -> Step:
        return Step(0.0, dict.fromkeys(PARTS, 0.5), 1, tokens, prefill, (), 1, 0, 3)

    steps = [step(0, 0), step(8, 8), step(9, 8), step(3, 0)]
    assert [one.kind for one in steps] == ["idle", "prefill", "mixed", "decode"]
    assert engine_figures.overhead(steps) == pytest.approx(1 - 2 / len(PARTS))
    assert engine_figures.overhead([]) is None
    assert Answer(Item(0, "all", 0, 0.0, 1, 1)).token_ids == []
