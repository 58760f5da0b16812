"""``kvpager eval echo`` with a tiny model: figures, comparison, picture, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvpager.cli.main import main

ECHO = ["eval", "echo", "--threads", "1", "--passage", "64", "--between", "384", "--budget", "64", "--chunk", "64"]


def echo(capsys: pytest.CaptureFixture[str], model: str, *more: str) -> dict[str, Any]:
    assert main([*ECHO, "--model", model, "--json", *more]) == 0
    out, _ = capsys.readouterr()
    result: dict[str, Any] = json.loads(out)
    return result


@pytest.mark.promise(7)
def test_json_has_all_figures_and_memory_adds_up(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = echo(capsys, model, "--pool", "70%", "--belady")
    assert set(result["full"]) == {"second_loss", "between_loss", "kv_bytes"}
    run = result["run"]
    for name in ("second_loss", "between_loss", "kl_mean", "kl_p99", "top1", "recalls", "evictions", "mass_coverage"):
        assert isinstance(run[name], (int, float)), name
    assert run["resident_bytes"] == run["pool_bytes"] + run["digest_bytes"] + run["table_bytes"]
    assert run["swap_bytes"] > 0
    assert run["peak_rss_bytes"] > run["resident_bytes"]
    assert result["full"]["kv_bytes"] == run["full_kv_bytes"] == 512 * 2 * 2 * 2 * 16 * 4
    assert run["optimal_recalls"] <= run["recalls"]
    assert run["recalls_a_token"] == run["recalls"] / result["task"]["tokens"]
    assert run["settings"]["budget"] == 64
    assert result["dtype"] == "float32"


def test_several_budgets_and_comparisons_are_drawn(
    model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target = tmp_path / "quality.png"
    more = [
        "--budget",
        "64,96",
        "--pool",
        "100%",
        "--compare",
        "discard:streaming,recall:minmax",
        "--plot",
        str(target),
    ]
    result = echo(capsys, model, *more)
    ran = [(run["name"], run["budget"]) for run in result["runs"]]
    names = ("recall, 2bit", "discard, streaming", "recall, minmax")
    assert ran == [(name, budget) for name in names for budget in (64, 96)]
    assert target.read_bytes().startswith(b"\x89PNG")
    assert result["runs"][2]["discards"] > 0
    assert result["runs"][2]["frames"] < result["runs"][0]["frames"]


def test_the_table_for_people_tells_losses_and_memory(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ECHO, "--model", model, "--pool", "100%", "--belady", "--at", "0,100"]) == 0
    out, _ = capsys.readouterr()
    assert "from token 0 of the text" in out
    for word in ("full cache", "recall, 2bit", "KL mean", "digests", "resident", "swap", "peak RSS", "fewest recalls"):
        assert word in out


def test_a_text_of_ones_own(model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text("What is read twice is known twice. " * 16, encoding="utf-8")
    result = echo(capsys, model, "--text", str(path), "--pool", "100%")
    assert result["task"]["text"] == str(path)
    path.write_text("too short", encoding="utf-8")
    assert main([*ECHO, "--model", model, "--text", str(path)]) == 2
    assert "passage and other text need 448" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--chunk", "96"], "chunk: 96 is not a multiple of tile, 64"),
        (["--compare", "recall:lru"], "compare: 'recall:lru' is not recall:(2bit|"),
        (["--compare", "forget:lru"], "compare: 'forget:lru' is not"),
        (["--plot", "picture.txt"], "plot: picture.txt ends in .txt; use .png"),
        (["--plot", "no/such/folder/a.png"], "the folder no/such/folder does not exist"),
        (["--text", "no-such-file.txt"], "no-such-file.txt can't be read"),
        (["--budget", "16"], "budget: 16 is less than 64"),
    ],
)
def test_bad_input_is_refused_by_name(
    model: str, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main([*ECHO, "--model", model, *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--budget", "64,x"], ["--at", "5"], ["--at", "1,-2"], ["--passage", "0"]])
def test_bad_usage_exits_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([*ECHO, *arguments])
    assert exit_.value.code == 2


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["eval", "echo", "--help"])
    assert "kvpager eval echo --budget 480" in capsys.readouterr().out
