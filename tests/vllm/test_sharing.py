"""kvpager and vLLM on one store at the same time."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.core.fed import Fed, text
from tests.vllm.fake import SIZE, FakeVLLM, Request

from kvpager.stores import Chain, open_store

TOKENS = text(100)


def opened(path: Path) -> Chain:
    return open_store(path, limit_bytes=2**26)


def computed_by_kvpager(path: Path) -> int:
    """How many of the tokens a pager has found, before it computes and stores all."""
    store = opened(path)
    fed = Fed(store)
    sequence = fed.open(TOKENS)
    found: int = sequence.length
    fed.run(sequence, TOKENS)
    fed.pager.close(sequence)
    fed.pager.shutdown()
    store.close()
    return found


def computed_by_vllm(path: Path) -> int:
    """The same of the fake, which looks at each page that it attends to."""
    store = opened(path)
    vllm = FakeVLLM(store, blocks=30)
    request = vllm.add(Request("a", list(TOKENS)))
    vllm.run()
    vllm.transfers.close()
    return request.cached


@pytest.mark.promise(5)
@pytest.mark.parametrize("first", [computed_by_kvpager, computed_by_vllm])
def test_neither_finds_what_the_other_has_stored_of_the_same_tokens(first: object, tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    both = [computed_by_kvpager, computed_by_vllm]
    order = both if first is computed_by_kvpager else both[::-1]
    assert [compute(path) for compute in order] == [0, 0]
    again = {compute: compute(path) for compute in order}
    assert again == {computed_by_kvpager: 96, computed_by_vllm: (len(TOKENS) - 1) // SIZE * SIZE}
