"""One server over the tiny model for all tests that leave it as it is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.harness import LiveServer, real_server
from tests.small_llm import save_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="session")
def live(folder: str) -> Iterator[LiveServer]:
    with real_server(folder) as server:
        yield server
