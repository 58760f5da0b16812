"""What the tests of the command line share: a tiny model on disk, and a cache directory of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.small_llm import save_folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture(autouse=True)
def own_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("KVPAGER_DEBUG", raising=False)
    return tmp_path / "cache"
