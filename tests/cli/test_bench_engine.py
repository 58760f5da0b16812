"""``kvpager bench engine`` with a tiny model: what it prints, its pictures, its comparison of pools, its refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvpager.bench import engine_figures
from kvpager.cli.main import main
from kvpager.engine.engine import Engine
from kvpager.engine.outputs import Output

WORK = ["--num-prompts", "4", "--input-len", "60", "--output-len", "8", "--ignore-eos", "--max-num-seqs", "4"]


def command(model: str, *more: str) -> list[str]:
    return ["bench", "engine", "--model", model, "--threads", "1", "--swap", "memory", *WORK, *more]


def bench(capsys: pytest.CaptureFixture[str], model: str, *more: str, code: int = 0) -> dict[str, Any]:
    assert main(command(model, *more, "--json")) == code
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.mark.promise(7)
def test_json_has_everything_and_memory_is_told_whole(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = bench(capsys, model, "--budget", "64", "--max-num-batched-tokens", "128")
    assert (result["completed"], result["failed"]) == (4, 0)
    assert result["output_tokens"] == 32
    memory = result["memory"]
    assert memory["resident_bytes"] == memory["pool_bytes"] + memory["digest_bytes"] + memory["table_bytes"]
    assert min(memory["digest_bytes"], memory["table_bytes"], memory["peak_rss_bytes"]) > 0
    assert result["settings"]["budget"] == 64
    assert result["engine"]["max_num_batched_tokens"] == 128
    assert result["workload"]["kinds"][0]["requests"] == 4
    assert {"model", "attention", "sampling", "scheduling", "paging", "engine"} == set(result["parts"])
    assert {"python", "torch", "kvpager"} <= set(result["versions"])
    assert len(result["requests"]) == 4


def test_people_get_tables_and_a_picture(model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "run.png"
    assert main(command(model, "--mix", "a=20/4,b=40/6", "--request-rate", "1", "--plot", str(target))) == 0
    out, err = capsys.readouterr()
    assert "4 of 4 requests" in out
    for said in ("to the first token", "decode", "overhead: all but model and attention", "peak of the process"):
        assert said in out
    assert f"drawn: {target}" in err
    assert target.read_bytes().startswith(b"\x89PNG")


@pytest.mark.promise(1)
def test_pools_are_compared(model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "pools.png"
    result = bench(capsys, model, "--compare-pools", "40,64KiB,unlimited", "--plot", str(target))
    assert [row["pool"] for row in result["pools"]] == ["40", "64KiB", "unlimited"]
    assert [row["ids_equal"] for row in result["pools"]] == [True] * 3
    assert result["pools"][0]["recalls"] > 0
    assert result["pools"][2]["recalls"] == 0
    assert len({run["ids_digest"] for run in result["runs"].values()}) == 1
    assert target.read_bytes().startswith(b"\x89PNG")
    assert main(command(model, "--compare-pools", "40,unlimited")) == 0
    out = capsys.readouterr().out
    assert "pool 40: 4 of 4 requests" in out
    assert out.count("equal") >= 2


def test_a_pool_that_changed_answers_is_a_failure(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = engine_figures.compared
    monkeypatch.setattr(
        engine_figures, "compared", lambda runs: [{**row, "broken": row["pool"] == "40"} for row in honest(runs)]
    )
    assert main(command(model, "--compare-pools", "40,unlimited")) == 1
    assert "pools 40 changed answers under the same schedule" in capsys.readouterr().err


def test_ctrl_c_reports_the_pool_that_ran_and_runs_no_other(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Engine.step

    def interrupted(self: Engine) -> list[Output]:
        outputs = honest(self)
        if any(output.finish_reason and output.request_id == "2" for output in outputs):
            raise KeyboardInterrupt
        return outputs

    monkeypatch.setattr(Engine, "step", interrupted)
    result = bench(capsys, model, "--compare-pools", "40,unlimited", code=130)
    assert list(result["runs"]) == ["40"]
    assert result["runs"]["40"]["interrupted"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--compare-pools", "40,lots"], "compare-pools: 'lots'"),
        (["--compare-pools", "40,40"], "names one pool twice"),
        (["--compare-pools", "40", "--pool", "60"], "excludes --pool"),
        (["--mix", "x"], "mix: "),
        (["--plot", "x.gif"], "plot: "),
        (["--input-len", "600"], "all: 600 tokens in and 8 out are more than 512"),
        (["--max-num-seqs", "500"], "max_num_batched_tokens"),
    ],
)
def test_bad_options_are_refused(more: list[str], said: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(model, *more)) == 2
    assert said in capsys.readouterr().err


def test_a_store_is_measured_and_found_by_the_next_run(
    model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = str(tmp_path / "store.db")
    first, second = (bench(capsys, model, "--store", path) for _ in range(2))
    assert (first["cached_tokens"], second["cached_tokens"]) == (0, 4 * 48)
    assert first["ids_digest"] == second["ids_digest"]
    assert second["store"]["hits"] == 4 * 3
    assert first["storing"]["path"] == path
    assert bench(capsys, model)["store"] is None
    assert main(command(model, "--store", path)) == 0
    assert "blocks stored" in capsys.readouterr().out


@pytest.mark.promise(6)
def test_a_store_is_refused_where_pools_are_compared(
    model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(command(model, "--compare-pools", "40,unlimited", "--store", str(tmp_path / "s.db"))) == 2
    assert "--compare-pools" in capsys.readouterr().err
