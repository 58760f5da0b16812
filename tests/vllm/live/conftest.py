"""A tiny model for vLLM, and what vLLM alone answers."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.small_llm import save_folder
from tests.vllm.live.engines import Engine, engine, settings

VOCABULARY = 250


def save_model(path: Path) -> Path:
    """Of a shape that vLLM's kernels for CPUs take."""
    shape = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "max_position_embeddings": 2048}
    return save_folder(path, **shape)


def prompt(seed: int, length: int) -> list[int]:
    """Token ids that no other seed begins with."""
    return random.Random(seed).choices(range(3, VOCABULARY), k=length)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert "KVPAGER_VLLM" in os.environ
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """vLLM without a connector."""
    with engine(tmp_path_factory.mktemp("alone"), settings(model, None)) as running:
        yield running


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "kv" / "store.db"
