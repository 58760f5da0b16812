"""Nodes that share a Redis: what one computes another finds, and what it must never find."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kvpager import build
from kvpager.build import PagerOptions, StoreOptions
from kvpager.engine.engine import EngineConfig
from kvpager.engine.params import SamplingParams
from kvpager.models import LoadedModel
from tests.redis_rig import RedisServer, free_port
from tests.small_llm import save_folder

PROMPT = [3 + index * 7 % 250 for index in range(100)]
FOUND = 96  # whole blocks of PROMPT


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def shared(redis_server: RedisServer) -> StoreOptions:
    return StoreOptions.at([redis_server.url], publish="all", timeout_s=5.0)


def load(folder: Path, **more: Any) -> LoadedModel:
    return build.load_model(str(folder), threads=1, identify=True, **more)


def answer(
    loaded: LoadedModel, store: StoreOptions | None, salts: tuple[bytes, ...] = (b"",), **paging: Any
) -> tuple[list[list[int]], int]:
    """What follows on PROMPT for each of these tenants, and how many tokens came from the store."""
    options = PagerOptions(**{"pool": "512", "swap": "memory", **paging})
    engine = build.make_engine(loaded, options, EngineConfig(max_num_seqs=2), store=store)
    try:
        answers: list[list[int]] = []
        for number, salt in enumerate(salts):
            engine.add(str(number), PROMPT, SamplingParams(max_tokens=6, temperature=0, ignore_eos=True), salt=salt)
            answers.append([])
            while engine.has_work:
                for output in engine.step():
                    answers[-1] += output.token_ids
        engine.check()
        return answers, engine.stats().pager.store_tokens_hit
    finally:
        engine.close()


@pytest.mark.promise(5)
@pytest.mark.parametrize("budget", [None, 64])
def test_another_node_finds_what_one_has_computed(folder: Path, shared: StoreOptions, budget: int | None) -> None:
    loaded = load(folder)
    first, found = answer(loaded, shared, budget=budget)
    assert found == 0
    again, found = answer(load(folder), shared, budget=budget)
    assert found >= 64
    assert again == first == answer(loaded, None, budget=budget)[0]


@pytest.mark.promise(5)
def test_a_node_on_another_machine_with_its_own_file_takes_it_over(
    folder: Path, redis_server: RedisServer, tmp_path: Path
) -> None:
    loaded = load(folder)
    one, other = (
        StoreOptions.at([redis_server.url, str(tmp_path / name)], publish="all", timeout_s=5.0) for name in ("a", "b")
    )
    first, _ = answer(loaded, one)
    assert answer(loaded, other) == (first, FOUND)
    redis_server.kill()
    assert answer(loaded, other) == (first, FOUND)  # from its own file by now


@pytest.mark.promise(5)
def test_one_changed_weight_is_another_model_whatever_its_name(folder: Path, shared: StoreOptions) -> None:
    answer(load(folder), shared)
    changed = load(folder)
    with torch.no_grad():
        next(parameter for name, parameter in changed.model.named_parameters() if "k_proj" in name).view(-1)[0] += 1e-3
    path = folder.parent / "changed"
    changed.model.save_pretrained(path)
    for file in folder.iterdir():
        if not (path / file.name).exists():
            (path / file.name).write_bytes(file.read_bytes())
    other = load(path)
    assert answer(other, shared) == (answer(other, None)[0], 0)
    assert answer(load(folder), shared)[1] == FOUND


@pytest.mark.promise(5)
@pytest.mark.parametrize("paging", [{"kv_dtype": "float16"}, {"kv_dtype": "int8"}, {"page_size": 8}, {"budget": 64}])
def test_other_pages_are_other_keys(folder: Path, shared: StoreOptions, paging: dict[str, Any]) -> None:
    loaded = load(folder)
    answer(loaded, shared)
    answers, found = answer(loaded, shared, **paging)
    assert answers == answer(loaded, None, **paging)[0]
    assert found == (64 if "budget" in paging else 0)  # the first tokens of a budget are exact, and anybody's


@pytest.mark.promise(5)
def test_tenants_never_meet(folder: Path, shared: StoreOptions) -> None:
    loaded = load(folder)
    salts = (b"a" * 16, b"ab" * 8)
    first, found = answer(loaded, shared, salts[:1])
    assert found == 0
    assert answer(loaded, shared, (salts[1], b"")) == ([*first, *first], 0)
    assert answer(loaded, shared, salts[:1]) == (first, FOUND)


@pytest.mark.promise(5)
def test_another_process_finds_the_same_blocks(folder: Path, shared: StoreOptions) -> None:
    found = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        code = "import sys; from kvpager.cli.main import main; sys.exit(main())"
        command = ["bench", "engine", "--model", str(folder), "--threads", "1", "--swap", "memory", "--json"]
        command += ["--num-prompts", "1", "--input-len", "100", "--output-len", "4", "--store", str(shared.url)]
        command += ["--store-publish", "all", "--store-timeout", "5"]
        done = subprocess.run(
            [sys.executable, "-c", code, *command], capture_output=True, text=True, check=True, env=environment
        )
        found.append(json.loads(done.stdout))
    assert [one["cached_tokens"] for one in found] == [0, 96]
    assert found[0]["ids_digest"] == found[1]["ids_digest"]
    assert found[1]["store"]["tiers"]["shared"]["state"] == "ok"


@pytest.mark.promise(4)
def test_a_prefix_is_shared_once_it_was_found_again(folder: Path, redis_server: RedisServer) -> None:
    loaded, store = load(folder), StoreOptions.at([redis_server.url], timeout_s=5.0)
    first, _ = answer(loaded, store)
    assert answer(loaded, store) == (first, 0)  # one use of it is none
    assert answer(loaded, store, (b"", b"")) == (first * 2, 0)
    assert answer(loaded, store) == (first, FOUND)


@pytest.mark.promise(4)
def test_a_redis_that_is_not_there_costs_nothing_but_the_hits(folder: Path) -> None:
    loaded, store = load(folder), StoreOptions.at([f"redis://127.0.0.1:{free_port()}"], publish="all")
    assert answer(loaded, store, (b"", b"")) == (answer(loaded, None, (b"", b""))[0], 0)


@pytest.mark.promise(4)
@pytest.mark.parametrize("fault", ["kill", "pause", "empty", "damage"])
def test_what_befalls_redis_while_requests_run_changes_no_answer(
    folder: Path, redis_server: RedisServer, fault: str
) -> None:
    loaded, store = load(folder), StoreOptions.at([redis_server.url], publish="all", timeout_s=0.2)
    wanted, _ = answer(loaded, None)
    answer(loaded, store)
    engine = build.make_engine(loaded, PagerOptions(pool="512", swap="memory"), EngineConfig(), store=store)
    try:
        engine.add("one", PROMPT, SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
        client = redis_server.client()
        if fault == "damage":
            for name in client.keys("kvpager:b:*"):
                client.setrange(name, client.strlen(name) - 9, b"damaged!")
        {"kill": redis_server.kill, "pause": redis_server.pause, "empty": client.flushall, "damage": bool}[fault]()
        ids: list[int] = []
        while engine.has_work:
            for output in engine.step():
                assert output.finish_reason != "error"
                ids += output.token_ids
        engine.check()
        assert [ids] == wanted
    finally:
        redis_server.resume()
        engine.close()
