"""Requests and engines that end before their time."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.vllm.live.conftest import prompt
from tests.vllm.live.engines import BLOCK, Engine, engine, settings

from kvpager.stores import SqliteStore

pytestmark = pytest.mark.slow
LENGTH, TOKENS = 700, 24
WHOLE = (LENGTH - 1) // BLOCK


def test_a_request_that_is_aborted_while_it_loads_gives_its_blocks_back(
    model: Path, alone: Engine, store: Path, tmp_path: Path
) -> None:
    loaded, other = prompt(41, LENGTH), prompt(42, 100)
    with engine(tmp_path, settings(model, store)) as running:
        running.generate(prompts=[loaded], tokens=TOKENS)
        assert running.flush()
        assert running.forget()
        running.hold()
        running.add(name="aborted", prompt=loaded, tokens=TOKENS)
        running.add(name="other", prompt=other, tokens=TOKENS)
        assert "other" in running.step(count=TOKENS + 2), "others go on while one loads"
        assert running.loading() == 1
        running.abort(name="aborted")
        running.step(count=3)
        assert running.leaked() > 0, "its blocks are kept until nothing is written into them any more"
        running.go()
        answers = running.finish()
        assert running.leaked() == 0
        assert set(answers) == {"other"}
        (after,) = running.generate(prompts=[loaded], tokens=TOKENS)
        assert after["cached"] == WHOLE * BLOCK
    alone.generate(prompts=[loaded], tokens=TOKENS)
    assert after["tokens"] == alone.generate(prompts=[loaded], tokens=TOKENS)[0]["tokens"]
    assert answers["other"]["tokens"] == alone.generate(prompts=[other], tokens=TOKENS)[0]["tokens"]


def test_preemption_while_blocks_wait_to_be_saved(model: Path, alone: Engine, store: Path, tmp_path: Path) -> None:
    prompts = [prompt(50 + number, 300) for number in range(6)]
    options = settings(model, store, num_gpu_blocks_override=48, max_model_len=512)
    with engine(tmp_path, options) as running:
        running.narrow(blocks=2)
        answers = running.generate(prompts=prompts, tokens=200)
        counts = running.metrics()
        assert running.leaked() == 0
    assert counts["preemptions"] > 0
    expected = alone.generate(prompts=prompts, tokens=200)
    assert [one["tokens"] for one in answers] == [one["tokens"] for one in expected]
    with engine(tmp_path, settings(model, store)) as after:
        answers = after.generate(prompts=prompts, tokens=200)
        assert after.metrics()["vllm:kvpager_lost_blocks"] == 0
    assert [one["tokens"] for one in answers] == [one["tokens"] for one in expected]


def test_killed_while_saving_leaves_a_whole_store(model: Path, alone: Engine, store: Path, tmp_path: Path) -> None:
    prompts = [prompt(60 + number, LENGTH) for number in range(8)]
    for round_ in range(3):
        with engine(tmp_path, settings(model, store)) as running:
            running.generate(prompts=prompts[:1], tokens=1)
            running.send("generate", prompts=prompts[round_ + 1 :], tokens=TOKENS)
            tier = SqliteStore(store, limit_bytes=2**30)
            before = tier.sizes().blocks
            while tier.sizes().blocks < before + 10:  # it is in the midst of saving
                pass
            running.kill()
            report = tier.verify()
            tier.close()
            assert report.blocks >= before + 10
            assert not report.damaged
    with engine(tmp_path, settings(model, store)) as last:
        answers = last.generate(prompts=prompts, tokens=TOKENS)
        counts = last.metrics()
    assert counts["vllm:kvpager_loaded_blocks"] >= 30
    assert counts["vllm:kvpager_lost_blocks"] == 0
    expected = alone.generate(prompts=prompts, tokens=TOKENS)
    assert [one["tokens"] for one in answers] == [one["tokens"] for one in expected]


def test_two_engines_on_one_store_find_what_the_other_has_stored(
    model: Path, alone: Engine, store: Path, tmp_path: Path
) -> None:
    mine, yours, both = ([prompt(seed, LENGTH)] for seed in (71, 72, 73))
    with engine(tmp_path, settings(model, store)) as one, engine(tmp_path, settings(model, store)) as two:
        one.send("generate", prompts=mine + both, tokens=TOKENS)
        two.send("generate", prompts=yours + both, tokens=TOKENS)
        first, second = one.receive(), two.receive()
        assert one.flush()
        assert two.flush()
        here = one.generate(prompts=yours, tokens=TOKENS)
        there = two.generate(prompts=mine, tokens=TOKENS)
        assert [here[0]["cached"], there[0]["cached"]] == [WHOLE * BLOCK] * 2
        assert one.metrics()["vllm:kvpager_store_errors"] + two.metrics()["vllm:kvpager_store_errors"] == 0
    expected = {
        name: alone.generate(prompts=ask, tokens=TOKENS)[0]["tokens"]
        for name, ask in zip("myb", (mine, yours, both), strict=True)
    }
    assert [one["tokens"] for one in first] == [expected["m"], expected["b"]]
    assert [one["tokens"] for one in second] == [expected["y"], expected["b"]]
    assert [here[0]["tokens"], there[0]["tokens"]] == [expected["y"], expected["m"]]


def test_what_was_reset_is_left_alone(model: Path, store: Path, tmp_path: Path) -> None:
    ask = {"prompts": [prompt(81, LENGTH)], "tokens": TOKENS}
    with engine(tmp_path, settings(model, store)) as running:
        running.generate(**ask)
        assert running.flush()
        assert running.reset()
        before = running.metrics()
        assert running.generate(**ask)[0]["cached"] == 0
        after = running.metrics()
    assert {name: after[name] for name in after if "_saved_" in name or "_loaded_" in name}.items() <= before.items()
