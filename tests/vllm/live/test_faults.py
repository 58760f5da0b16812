"""Whatever happens to the store, answers are those of vLLM alone, the engine lives, and something is counted."""

from __future__ import annotations

import os
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.vllm.live.conftest import prompt
from tests.vllm.live.engines import BLOCK, Engine, engine, settings

pytestmark = [pytest.mark.slow, pytest.mark.promise(4)]
LENGTH, TOKENS = 700, 24
WHOLE = (LENGTH - 1) // BLOCK


def flip(path: Path, depth: int) -> None:
    """Flip one bit in the middle of the stored pages of the block at this depth."""
    with sqlite3.connect(path) as connection:
        (number,) = connection.execute("SELECT id FROM blocks WHERE depth = ?", (depth,)).fetchone()
        with connection.blobopen("payloads", "payload", number) as blob:
            blob.seek(len(blob) // 2)
            (byte,) = blob.read(1)
            blob.seek(len(blob) // 2)
            blob.write(bytes([byte ^ 4]))
    connection.close()


def test_damage_is_computed_again_and_mended_while_the_engine_runs(
    model: Path, alone: Engine, store: Path, tmp_path: Path
) -> None:
    ask: dict[str, Any] = {"prompts": [prompt(11, LENGTH)], "tokens": TOKENS}
    alone.generate(**ask)
    (expected,) = alone.generate(**ask)
    with engine(tmp_path, settings(model, store)) as running:

        def again() -> tuple[list[int], int, dict[str, float]]:
            """The answer when vLLM's own cache is empty, how much of the prompt was loaded, and all counts."""
            before = running.metrics()
            assert running.forget()
            (answer,) = running.generate(**ask)
            assert running.flush()
            after = running.metrics()
            assert running.leaked() == 0
            counts = {name.removeprefix("vllm:kvpager_"): after[name] - before[name] for name in after}
            return answer["tokens"], counts.pop("loaded_blocks"), counts

        running.generate(**ask)
        assert running.flush()
        assert again()[:2] == (expected["tokens"], WHOLE)

        flip(store, depth=5)
        tokens, loaded, counts = again()
        assert (tokens, loaded) == (expected["tokens"], 5)
        assert (counts["lost_blocks"], counts["damaged_blocks"]) == (WHOLE - 5, 1)
        assert again()[:2] == (expected["tokens"], WHOLE), "the damaged block was stored anew"

        flip(store, depth=0)
        assert again()[:2] == (expected["tokens"], 0)
        assert again()[:2] == (expected["tokens"], WHOLE)

        for file in store.parent.iterdir():
            if not file.name.endswith(".reserve"):
                file.unlink()
        tokens, _, _ = again()
        assert tokens == expected["tokens"]
        tokens, _, _ = again()  # by now it is known that the file is lost, and a new one was begun
        assert tokens == expected["tokens"]
        assert again()[:2] == (expected["tokens"], WHOLE)
        assert running.stats()["errors"]["lost"] >= 1

        size = store.stat().st_size
        os.truncate(store, size // 3)
        tokens, _, counts = again()
        assert tokens == expected["tokens"]
        assert again()[0] == expected["tokens"]
        assert again()[0] == expected["tokens"]
        assert running.stats()["damaged"] + sum(running.stats()["errors"].values()) >= 3
        assert again()[:2] == (expected["tokens"], WHOLE), "a new store was begun"


def test_a_full_disk_stores_nothing_and_stops_nothing(model: Path, alone: Engine, store: Path, tmp_path: Path) -> None:
    first, second = ({"prompts": [prompt(seed, LENGTH)], "tokens": TOKENS} for seed in (21, 22))
    with engine(tmp_path, settings(model, store)) as running:
        running.generate(**first)
        assert running.flush()
        running.fill_disk(more=store.stat().st_size // 2)
        (answer,) = running.generate(**second)
        assert answer["tokens"] == alone.generate(**second)[0]["tokens"]
        assert running.forget()
        (found,) = running.generate(**first)
        assert found["cached"] == WHOLE * BLOCK, "what is there is still read"
        assert running.metrics()["vllm:kvpager_store_errors"] >= 1
        assert running.stats()["errors"].keys() <= {"full", "io"}
        running.free_disk()


def test_other_weights_another_dtype_and_another_block_size_find_nothing(
    model: Path, store: Path, tmp_path: Path
) -> None:
    ask = {"prompts": [prompt(31, LENGTH)], "tokens": TOKENS}
    with engine(tmp_path, settings(model, store)) as running:
        running.generate(**ask)
    changed = Path(shutil.copytree(model, tmp_path / "changed"))
    weights = load_file(changed / "model.safetensors")
    name = sorted(weights)[3]
    weights[name] = weights[name].copy()
    weights[name].reshape(-1).view(np.uint8)[0] ^= 1
    save_file(weights, changed / "model.safetensors", {"format": "pt"})
    for options in (
        settings(changed, store),
        settings(model, store, dtype="bfloat16"),
        settings(model, store, block_size=2 * BLOCK),
        settings(model, store, hf_overrides={"rms_norm_eps": 1e-4}),
    ):
        with engine(tmp_path, options) as other:
            (answer,) = other.generate(**ask)
            counts = other.metrics()
        assert answer["cached"] == 0
        assert counts["vllm:kvpager_loaded_blocks"] == 0
    moved = Path(shutil.copytree(model, tmp_path / "elsewhere"))
    with engine(tmp_path, settings(moved, store)) as same:
        assert same.generate(**ask)[0]["cached"] == WHOLE * BLOCK, "where the model lies is not in its keys"
