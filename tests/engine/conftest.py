"""What the tests of the engine share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import kvpager.hf


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """kvpager known to transformers, and one thread: models this small are slower on several."""
    kvpager.hf.register()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
