"""A tiny model, loaded once for each file of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.small_llm import save_folder

import kvpager.hf
from kvpager.models import LoadedModel, load


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    kvpager.hf.register()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load(str(save_folder(tmp_path_factory.mktemp("model"))))
    torch.set_num_threads(threads)
