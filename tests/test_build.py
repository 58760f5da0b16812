"""From options to an engine over a store: what another start finds, and what it must never find."""

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
from kvpager.errors import ConfigError, MissingDependency
from kvpager.models import LoadedModel
from tests.small_llm import save_folder

PROMPT = [3 + index * 7 % 250 for index in range(100)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def store(tmp_path: Path) -> StoreOptions:
    return StoreOptions(str(tmp_path / "kv" / "store.db"))


def load(folder: Path, **more: Any) -> LoadedModel:
    return build.load_model(str(folder), threads=1, identify=True, **more)


def answer(loaded: LoadedModel, store: StoreOptions | None, **paging: Any) -> tuple[list[int], int]:
    """What follows on PROMPT, and how many of its tokens came from the store; then the engine is closed."""
    options = PagerOptions(**{"pool": "512", "swap": "memory", **paging})
    engine = build.make_engine(loaded, options, EngineConfig(max_num_seqs=2), store=store)
    try:
        engine.add("one", PROMPT, SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
        ids: list[int] = []
        while engine.has_work:
            for output in engine.step():
                ids += output.token_ids
        engine.check()
        return ids, engine.stats().pager.store_tokens_hit
    finally:
        engine.close()


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("budget", [None, 64])
def test_the_next_start_finds_what_the_last_one_computed(
    folder: Path, tmp_path: Path, budget: int | None, compression: Any
) -> None:
    store = StoreOptions(str(tmp_path / "store.db"), compression=compression)
    first = answer(load(folder), store, budget=budget)
    again = answer(load(folder), store, budget=budget)
    assert first == (answer(load(folder), None, budget=budget)[0], 0)
    assert again == (first[0], 64 if budget else 96)  # hits under a budget end at a tile's boundary


def test_files_and_their_folder_are_for_their_owner_alone(folder: Path, store: StoreOptions) -> None:
    answer(load(folder), store)
    place = Path(store.path).parent
    assert place.stat().st_mode & 0o777 == 0o700
    files = list(place.iterdir())
    assert files
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}


@pytest.mark.promise(5)
def test_one_changed_weight_is_another_model_whatever_its_name(folder: Path, store: StoreOptions) -> None:
    answer(load(folder), store)
    changed = Path(store.path).parent / "model"
    changed.mkdir()
    for file in folder.iterdir():
        (changed / file.name).write_bytes(file.read_bytes())
    weights = bytearray((changed / "model.safetensors").read_bytes())
    weights[-3] ^= 64
    (changed / "model.safetensors").write_bytes(weights)
    loaded = load(changed)
    assert answer(loaded, store) == (answer(loaded, None)[0], 0)


@pytest.mark.promise(5)
@pytest.mark.parametrize(
    "paging", [{"kv_dtype": "int8"}, {"page_size": 8}, {"kernel": "reference"}], ids=lambda paging: next(iter(paging))
)
def test_other_pages_are_other_keys(folder: Path, store: StoreOptions, paging: dict[str, Any]) -> None:
    answer(load(folder), store)
    assert answer(load(folder), store, **paging) == (answer(load(folder), None, **paging)[0], 0)


@pytest.mark.promise(5)
@pytest.mark.parametrize(
    "more",
    [{"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}, {"rms_norm_eps": 1e-3}],
    ids=lambda more: next(iter(more)),
)
def test_another_configuration_is_another_model(
    folder: Path, store: StoreOptions, tmp_path: Path, more: dict[str, Any]
) -> None:
    answer(load(folder), store)
    other = load(save_folder(tmp_path / "other", **more))
    assert answer(other, store) == (answer(other, None)[0], 0)


@pytest.mark.promise(5)
def test_the_number_format_of_the_model_is_in_its_keys(folder: Path, store: StoreOptions) -> None:
    answer(load(folder), store)
    assert answer(load(folder, dtype="bfloat16"), store)[1] == 0


@pytest.mark.promise(5)
def test_an_identity_has_no_name_in_it(folder: Path) -> None:
    loaded = load(folder)
    assert str(folder) not in loaded.identity
    assert f"torch={torch.__version__}" in loaded.identity
    assert build.load_model(str(folder), threads=1).identity == ""


@pytest.mark.promise(5)
def test_another_process_finds_the_same_blocks(folder: Path, store: StoreOptions) -> None:
    found = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        code = "import sys; from kvpager.cli.main import main; sys.exit(main())"
        command = ["bench", "engine", "--model", str(folder), "--threads", "1", "--swap", "memory", "--json"]
        command += ["--num-prompts", "1", "--input-len", "100", "--output-len", "4", "--store", store.path]
        done = subprocess.run(
            [sys.executable, "-c", code, *command], capture_output=True, text=True, check=True, env=environment
        )
        found.append(json.loads(done.stdout))
    assert [one["cached_tokens"] for one in found] == [0, 96]
    assert found[0]["ids_digest"] == found[1]["ids_digest"]
    assert found[1]["store"]["state"] == "ok"


@pytest.mark.promise(4)
def test_a_file_that_is_no_store_costs_nothing_but_the_hits(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    path.write_bytes(b"SQLite format 3\0" + bytes(4080))
    before = path.read_bytes()
    loaded = load(folder)
    assert answer(loaded, StoreOptions(str(path))) == (answer(loaded, None)[0], 0)
    assert path.read_bytes() == before


@pytest.mark.promise(6)
def test_a_model_without_identity_is_refused(folder: Path, store: StoreOptions) -> None:
    loaded = build.load_model(str(folder), threads=1)
    with pytest.raises(ConfigError, match="identify=True"):
        answer(loaded, store)
    assert not Path(store.path).exists()


@pytest.mark.promise(6)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"limit": "much"}, "store_limit: 'much' is not a size"),
        ({"synchronous": "maybe"}, "store_sync: 'maybe' is not one of normal, full"),
        ({"compression": "zip"}, "store_compression: 'zip' is not one of none, zstd"),
        ({"path": ""}, "store: '' is not the path of a file"),
    ],
)
def test_options_that_can_not_be_are_refused_by_name(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        StoreOptions(**{"path": "store.db", **options})


def test_a_missing_package_is_told_with_its_extra(store: StoreOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(MissingDependency, match=r"pip install 'kvpager\[store\]'"):
        build.require_store(store)
