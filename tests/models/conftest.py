"""A tiny model's folder, saved once for each file of tests, and a copy to damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.small_llm import save_folder


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "copy"))
