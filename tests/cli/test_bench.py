"""``kvpager bench`` at tiny sizes: what it prints, that its figures agree with each other, and its refusals."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvpager.cli.main import main
from kvpager.kernels.choose import native_module

KERNEL = ["bench", "kernel", "--shapes", "4/2x16", "--tokens", "40,64", "--batch", "1", "--threads", "1"]
KERNEL += ["--repeats", "2", "--no-select", "--memory", "64MiB"]
STEP = ["bench", "step", "--threads", "1", "--prompt-tokens", "160", "--steps", "2"]


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small buffers and short blocks: these tests look at figures, not at speed."""
    monkeypatch.setattr("kvpager.bench.stream.LEAST_BYTES", 2**20)
    monkeypatch.setattr("kvpager.bench.stream.CACHES", 0)
    monkeypatch.setattr("kvpager.bench.kernel.CACHES", 0)
    monkeypatch.setattr("kvpager.bench.rounds.BLOCK_SECONDS", 1e-4)


def measured(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_rows_name_every_case_and_their_figures_agree(capsys: pytest.CaptureFixture[str]) -> None:
    result = measured(capsys, *KERNEL, "--kernels", "reference,sdpa-fp32,sdpa-bf16", "--batch", "1,2", "--tile", "1,64")
    cases = {(row["tokens"], row["batch"], row["queries"]) for row in result["rows"]}
    assert cases == {(40, 1, 1), (40, 2, 1), (64, 1, 1), (64, 2, 1), (64, 1, 64), (64, 2, 64)}
    assert len(result["rows"]) == 3 * len(cases)
    by_case = {(row["kernel"], row["tokens"], row["batch"], row["queries"]): row for row in result["rows"]}
    for (kernel, tokens, batch, queries), row in by_case.items():
        assert (row["query_heads"], row["kv_heads"], row["head_dim"]) == (4, 2, 16)
        paged = kernel == "reference"
        assert row["dtype"] == ("float32" if kernel == "sdpa-fp32" else "bfloat16")
        held = -(-tokens // 16) * 16 if paged else tokens
        assert row["bytes"] == 2 * batch * held * 2 * 16 * (4 if kernel == "sdpa-fp32" else 2)
        assert row["ms"] >= row["ms_least"] > 0
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["ms"] / 1e6)
        assert row["stream_fraction"] == pytest.approx(row["gb_per_s"] / result["stream_gb_per_s"])
        assert row["stream_beside_fraction"] == pytest.approx(row["gb_per_s"] / row["stream_beside_gb_per_s"])
        others = {"reference", "sdpa-fp32", "sdpa-bf16"} - {kernel}
        if row["dtype"] == "float32":
            others.discard("reference")  # which holds its pages as bfloat16
        assert set(row["times_faster"]) == others
        for other, ratio in row["times_faster"].items():
            assert ratio == pytest.approx(by_case[other, tokens, batch, queries]["ms"] / row["ms"])


def test_the_machine_and_the_stream_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    result = measured(capsys, *KERNEL, "--kernels", "reference")
    assert result["threads"] == result["stream"]["threads"] == 1
    stream = result["stream"]
    assert stream["least_gb_per_s"] <= result["stream_gb_per_s"] <= stream["most_gb_per_s"]
    # three before all else, then one before and one after each of the two rounds of the two cases
    assert stream["passes"] == 3 + 2 * 3
    assert result["others_share"] is None or 0 <= result["others_share"] <= 1
    assert {"python", "numpy", "torch", "kvpager"} <= set(result["versions"])
    assert result["machine"]["cores"] >= 1
    native = native_module()
    assert result["isas"] == ([] if native is None else native.isas())
    assert result["isa"] in (result["isas"] or [None])


@pytest.mark.skipif(native_module() is None, reason="the extension is not built here")
def test_the_native_kernel_is_checked_and_measured_with_and_without_page_mass(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ["native-layer", "native", "native-massless"]
    more = ["--tile", "1,16", "--batch", "2", "--group-pages", "3"]
    result = measured(capsys, *KERNEL, "--kernels", ",".join(names), *more)
    assert result["group_pages"] == 3
    assert [row["kernel"] for row in result["rows"]] == names * 4
    assert set(result["differences"]) == {f"{name} bfloat16 4/2x16" for name in names}
    assert all(difference < 1e-2 for difference in result["differences"].values())


def test_two_ways_to_hold_pages_are_measured_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    result = measured(capsys, *KERNEL, "--kernels", "reference", "--kv-dtype", "float32", "--kv-dtype", "bfloat16")
    assert [row["dtype"] for row in result["rows"]] == ["float32", "bfloat16"] * 2
    assert all(row["times_faster"] == {} for row in result["rows"])


@pytest.mark.skipif(native_module() is None, reason="the extension is not built here")
def test_another_instruction_set_is_used_and_put_back(capsys: pytest.CaptureFixture[str]) -> None:
    native = native_module()
    assert native is not None
    before = native.isa()
    assert measured(capsys, *KERNEL, "--kernels", "reference", "--isa", "generic")["isa"] == "generic"
    assert native.isa() == before


def test_selection_is_measured_beside_attention(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [argument for argument in KERNEL if argument != "--no-select"]
    for name, value in (("tokens", 256), ("layers", 2), ("budget", 128)):
        from kvpager.bench import selecting

        defaults = selecting.measure_selection.__kwdefaults__
        assert defaults is not None
        monkeypatch.setitem(defaults, name, value)
    (selected,) = measured(capsys, *arguments, "--kernels", "reference")["select"]
    assert selected["share"] == pytest.approx(selected["select_ms"] / selected["attend_ms"])
    assert selected["kv_bytes"] == 2 * 256 * 3 * 64 * 2 * 2
    assert selected["digest_share"] == pytest.approx(selected["digest_bytes"] / selected["kv_bytes"])
    assert 0 < selected["digest_share"] < 0.15


def test_what_does_not_fit_is_skipped_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--memory", "10000", "--tokens", "64,128"]
    result = measured(capsys, *KERNEL, *small, "--kernels", "reference")
    assert [row["tokens"] for row in result["rows"]] == [64]
    (line,) = result["skipped"]
    assert "reference (bfloat16), 4/2x16, 128 tokens, batch 1: needs 0.0 MB, and 0.0 MB are left" in line
    assert main([*KERNEL, *small, "--kernels", "reference"]) == 0
    assert "Skipped:" in capsys.readouterr().out


@pytest.mark.parametrize(("share", "said"), [(0.5, True), (0.01, False), (None, False)])
def test_other_programs_are_told_of(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, share: float | None, said: bool
) -> None:
    monkeypatch.setattr("kvpager.bench.machine.Others.share", share)
    assert main([*KERNEL, "--kernels", "reference"]) == 0
    assert ("other programs used 50% of the cores" in capsys.readouterr().err) == said


def test_the_table_for_people_and_the_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "kernels.png"
    assert main([*KERNEL, "--kernels", "reference,sdpa-fp32", "--batch", "1,2", "--plot", str(target)]) == 0
    out, err = capsys.readouterr()
    for word in ("GB/s", "of stream", "x sdpa-fp32", "reference", "4/2x16", "1 threads"):
        assert word in out
    assert target.read_bytes().startswith(b"\x89PNG")
    assert "drawn:" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--kernels", "flash"],
            "kernels: 'flash' is not one of native-layer, native, native-massless, reference, sdpa-fp32, sdpa-bf16",
        ),
        (["--shapes", "9x64"], "shapes: '9x64' is not QUERY_HEADS/KV_HEADSxHEAD_DIM, as in 9/3x64"),
        (["--shapes", "9/2x64"], "query_heads: 9 is not a multiple of kv_heads, 2"),
        (["--isa", "mmx"], "isa: 'mmx' is not one of"),
        (["--tile", "512"], "tile: no length of 40,64 holds a tile of 512 queries"),
        (["--plot", "picture.txt"], "plot: picture.txt ends in .txt; use .png"),
        (["--plot", "no/such/folder/a.png"], "the folder no/such/folder does not exist"),
    ],
)
def test_bad_input_is_refused_by_name(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main([*KERNEL, *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["kernel", "--tokens", "0"], ["kernel", "--repeats", "x"], ["kernel", "--memory", "much"], []]
)
def test_bad_usage_exits_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["bench", *arguments])
    assert exit_.value.code == 2


def test_a_step_is_split_into_parts_that_add_up(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = measured(capsys, *STEP, "--model", model, "--budget", "64")
    parts = result["parts"]
    assert set(parts) == {"weights", "attention", "selection", "paging", "model", "sampling"}
    assert all(part["ms"] > 0 for part in parts.values())
    assert result["clocked_step_ms"] == pytest.approx(sum(part["ms"] for part in parts.values()))
    assert sum(part["share"] for part in parts.values()) == pytest.approx(1)
    assert result["tokens_per_s"] == pytest.approx(1e3 / result["step_ms"])
    floor = result["floor"]
    total = floor["weight_bytes"] + floor["page_bytes"] + floor["digest_bytes"]
    assert floor["ms"] == pytest.approx(total / floor["stream_gb_per_s"] / 1e6)
    assert sum(part["floor_ms"] for part in parts.values()) == pytest.approx(floor["ms"])
    assert result["floor_fraction"] == pytest.approx(floor["ms"] / result["step_ms"])
    # projections of two layers and the output: the embedding is looked up, not multiplied with
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96
    assert floor["weight_bytes"] == 4 * (2 * layer + 64 * 260)
    # four pages of the past and the own one, in each of two layers and heads
    assert floor["page_bytes"] == 5 * 2 * 2 * (2 * 16 * 16 * 4)
    assert floor["digest_bytes"] > 0


def test_without_a_budget_nothing_is_selected(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = measured(capsys, *STEP, "--model", model)
    assert result["parts"]["selection"]["ms"] == 0
    assert result["floor"]["digest_bytes"] == 0
    assert main([*STEP, "--model", model]) == 0
    out = capsys.readouterr().out
    for word in ("weights: linear layers", "paging:", "least ms", "all, without", "tokens/s", "times the least"):
        assert word in out


def test_nothing_stays_behind_in_the_model(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AttentionInterface

    from kvpager.hf.attention import NAME, pager_attention

    measured(capsys, *STEP, "--model", model)
    assert AttentionInterface()[NAME] is pager_attention


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt-tokens", "507"], "prompt-tokens: 507, and 6 more to write, do not fit the context of"),
        (["--budget", "16"], "budget: 16 is less than 64"),
        (["--model", "no-such-model"], "no-such-model"),
    ],
)
def test_a_step_that_cannot_be_measured_is_refused(
    model: str, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main([*STEP, "--model", model, *arguments]) in (1, 2)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("task", ["kernel", "step"])
def test_help_has_an_example(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", task, "--help"])
    assert f"  kvpager bench {task} --" in capsys.readouterr().out


def test_lengths_are_measured_in_the_order_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    tokens = [row["tokens"] for row in measured(capsys, *KERNEL, "--kernels", "reference")["rows"]]
    assert all(first <= second for first, second in pairwise(tokens))
