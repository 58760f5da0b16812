"""``kvpager bench store``: its figures, its tables, and that nothing stays behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvpager.bench.store import READERS, Plan, measure, random_blocks, steps
from kvpager.cli.main import main

FEW = ["bench", "store", "--blocks", "16", "--batches", "3,48", "--repeats", "1"]


def test_json_has_a_figure_for_each_reader_and_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FEW, "--folder", str(tmp_path), "--json"]) == 0
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert [(one["reader"], one["batch"]) for one in figures["faults"]] == [
        (reader, batch) for reader in READERS for batch in (3, 48)
    ]
    assert all(one["us_per_page"] >= one["least"] > 0 for one in figures["faults"])
    assert [(one["synchronous"], one["compression"]) for one in figures["writes"]] == [
        ("normal", "none"),
        ("full", "none"),
        ("normal", "zstd"),
    ]
    assert figures["payload_bytes"] == 16 * 90 * 4096
    assert all(one["mb_per_s"] > 0 for one in figures["writes"])
    assert figures["writes"][2]["disk_bytes"] < figures["writes"][0]["disk_bytes"]
    assert min(figures["verify_mb_per_s"], figures["plain_file_mb_per_s"]) > 0
    assert list(tmp_path.iterdir()) == []


def test_people_get_tables_and_a_picture_of_a_models_pages(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "store.png"
    (folder := tmp_path / "disk").mkdir()
    command = [*FEW, "--model", model, "--batches", "2,32", "--folder", str(folder), "--plot", str(target)]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert f"pages of {model} (float32)" in out
    assert "16 blocks" in out
    for said in (*READERS.values(), "synchronous full", "verified at"):
        assert said in out
    assert f"drawn: {target}" in err
    assert target.read_bytes().startswith(b"\x89PNG")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("more", "said"),
    [(["--folder", "/no/such/folder"], "folder: /no/such/folder is none"), (["--batches", "100"], "are more than 16")],
)
def test_what_can_not_be_is_refused(more: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FEW, *more]) == 2
    assert said in capsys.readouterr().err


def test_the_bar_is_told_every_step(tmp_path: Path) -> None:
    plan, told = Plan(random_blocks(16, 4, 64), heads=2, batches=(4,), repeats=1), list[int]()
    measure(plan, tmp_path, told.append)
    assert told == list(range(1, steps(plan) + 1))
