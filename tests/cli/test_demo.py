"""``kvpager demo`` with a tiny model; its screen without a terminal; and the real thing (slow)."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from kvpager.cli import demo_screen
from kvpager.cli.main import main
from tests.small_llm import save_folder

COLUMNS = ["full cache", "permanent eviction", "kvpager"]


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_folder(tmp_path_factory.mktemp("long"), max_position_embeddings=8192))


def demo(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["demo", "--json", "--threads", "1", *arguments]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.mark.promise(7)
def test_columns_hold_the_same_bytes_and_no_budget_means_the_same_ids(
    long_model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target = tmp_path / "map.png"
    result = demo(capsys, "--model", long_model, "--tokens", "6000", "--codes", "2", "--map", str(target))
    assert [column["name"] for column in result["columns"]] == COLUMNS
    full, lossy, paged = result["columns"]
    assert all(column["of"] == len(column["answers"]) == 2 for column in result["columns"])
    for column in result["columns"]:
        parts = column["pool_bytes"] + column["digest_bytes"] + column["table_bytes"]
        assert column["resident_bytes"] == parts
        assert column["right"] == sum(answer["right"] for answer in column["answers"])
    assert lossy["resident_bytes"] == pytest.approx(paged["resident_bytes"], rel=0.03)
    assert paged["resident_bytes"] < 0.35 * full["resident_bytes"]
    assert result["exact"]["identical"] is True
    assert result["exact"]["ids_compared"] == 12
    assert result["exact"]["recalls"] > 0
    assert target.read_bytes().startswith(b"\x89PNG")
    assert any(answer["recalls"] and answer["words"] for answer in paged["answers"])


def test_people_get_tables_and_the_line_about_ids(
    long_model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["--model", long_model, "--tokens", "6000", "--codes", "1", "--map", str(tmp_path / "map.png")]
    assert main(["demo", "--threads", "1", *arguments]) == 0
    out, err = capsys.readouterr()
    assert "token ids are identical to the full cache's" in out
    for word in (*COLUMNS[:1], "digests", "swap", "of 1"):
        assert word in out
    assert "The code of the safe in Baker Street is ..." in err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--tokens", "9000"], 2, "the context of"),
        (["--map", "map.txt"], 2, "plot: map.txt ends in .txt"),
    ],
)
def test_bad_input_is_refused_by_name(
    long_model: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--model", long_model, *arguments]) == code
    assert message in capsys.readouterr().err


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["demo", "--help"])
    assert "kvpager demo --quick" in capsys.readouterr().out


def test_the_screen_draws_columns_map_and_words() -> None:
    views = [
        demo_screen.View("full cache", "keeps everything", "90 MiB", read=100, answer=" 7421.", right=True),
        demo_screen.View("permanent eviction", "keeps the best", "27 MiB", read=100, answer=" 1.", right=False),
        demo_screen.View("kvpager", "swaps the rest", "27 MiB", read=40),
    ]
    heat = np.zeros((3, 50), np.float32)
    heat[1, 20] = 1
    scene = demo_screen.Scene(
        100, views, heat, question="The code is", number=1, questions=8, words="is 7421", block=20
    )
    console = Console(record=True, width=100, height=40, force_terminal=True, file=io.StringIO())
    with demo_screen.Screen(scene, console) as screen:
        screen.show()
    text = console.export_text()
    for word in ("full cache", "right", "wrong", "reading 40 of 100", "block 20", "is 7421", "1 of 8"):
        assert word in text


def test_the_map_joins_blocks_and_puts_two_layers_on_a_line() -> None:
    heat = np.zeros((5, 40), np.float32)
    heat[2, 39] = 1
    text = demo_screen.map_text(heat, 10)
    assert [len(line) for line in text.plain.split("\n")] == [10, 10, 10]
    assert len(demo_screen.map_text(heat, 10, lines=2).plain.split("\n")) == 2
    lit = [span for span in text.spans if "rgb(255,176,59)" in str(span.style)]
    assert len(lit) == 1
    assert text.plain[lit[0].start] == "▀"
    assert str(lit[0].style).startswith("rgb(255,176,59) on")


@pytest.mark.slow
def test_the_default_model_forgets_by_eviction_and_remembers_by_recall(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")  # the unpacked weights of the user's own cache directory
    result = demo(capsys, "--tokens", "1200", "--codes", "2", "--map", str(tmp_path / "map.png"))
    assert [column["right"] for column in result["columns"]] == [2, 0, 2]
    assert result["exact"]["identical"] is True
