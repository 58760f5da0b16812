"""What the tests of the engine share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import kvpager.hf
from kvpager.models.packaged import unpack


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """kvpager known to transformers, and one thread: models this small are slower on several."""
    kvpager.hf.register()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def real_tokenizer() -> PreTrainedTokenizerBase:
    """The default model's own tokenizer, for tests that force its tokens."""
    made: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(unpack("smollm2-135m", lambda line: None))
    return made
