"""What the tests of the command line share: a tiny model on disk, and a cache directory of their own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpager.server.logs import LEVELS
from tests.small_llm import save_folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture(autouse=True)
def own_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("KVPAGER_DEBUG", raising=False)
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def loggers_as_they_were() -> Iterator[None]:
    """`serve` sends logs to its own standard output; what comes after it in this process has them as before."""
    loggers = [logging.getLogger(name) for name in LEVELS]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)
