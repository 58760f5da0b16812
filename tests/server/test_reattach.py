"""A server ends in the middle of its streams, another one goes on with them, and clients get the rest there."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.journal import MemoryJournal
from tests.server.comers import Comer
from tests.server.harness import SECONDS, LiveServer, real_server

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
ASKED: list[tuple[str, dict[str, Any]]] = [
    (TEXT, {"prompt": "the quick brown fox jumps over the lazy dog", "max_tokens": 24, "temperature": 0}),
    (TEXT, {"prompt": ["a tale of", "two cities"], "max_tokens": 12, "n": 2, "logprobs": 1, "seed": 5}),
    (CHAT, {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 20, "temperature": 1.1, "seed": 9}),
]


def reattached(server: LiveServer, journal: MemoryJournal) -> int:
    """Have a server go on with all that a journal knows, as one that takes over does; how many requests it is."""
    return len(server.run(server.service.returning.reattach(journal.resumables())))


class Cut(MemoryJournal):
    """A journal of a server that ends after so many steps: of later ones nobody hears."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.left = steps

    def step(self, told: Any, done: Any) -> None:
        if self.left:
            self.left -= 1
            super().step(told, done)


@pytest.mark.parametrize(("path", "asked"), ASKED)
@settings(max_examples=4, deadline=None)
@given(steps=st.integers(1, 20), events=st.integers(0, 20), stored=st.booleans())
def test_streams_go_on_at_another_server(
    folder: str, tmp_path_factory: Any, path: str, asked: dict[str, Any], steps: int, events: int, stored: bool
) -> None:
    store = tmp_path_factory.mktemp("store") / "kv.db"
    with real_server(folder, store=store) as undisturbed:
        whole = Comer(path, asked).read(undisturbed)
    journal, comer = Cut(steps), Comer(path, asked)
    with real_server(folder, store=store, journal=journal) as first:
        reading = threading.Thread(target=_read, args=(comer, first, events))
        reading.start()
        first.until(lambda: journal.left == 0 or not reading.is_alive())
        first.stop()
        reading.join(SECONDS)
    with real_server(folder, store=store if stored else Path(store).with_name("empty.db")) as second:
        count = reattached(second, journal)
        if count:
            comer.read(second)
            assert comer.done
            assert comer.text() == whole.text()
            for index in {one["index"] for one in whole.chunks}:
                assert comer.text(index) == whole.text(index)
            assert len(comer.names) == 1


def _read(comer: Comer, server: LiveServer, events: int) -> None:
    """Until the server ends."""
    try:
        comer.read(server, events)
    except httpx.HTTPError:
        return


def test_what_nobody_can_come_back_to_or_is_not_whole_is_left(folder: str, tmp_path: Path) -> None:
    journal = MemoryJournal()
    with real_server(folder, store=tmp_path / "kv.db", journal=journal) as first:
        Comer(*ASKED[1]).read(first)
        first.complete("plain", max_tokens=3)
    assert len(journal.known) == 2  # two prompts of one answer; the other is nobody's to come back to
    part = MemoryJournal()
    part.known = dict(list(journal.known.items())[1:])
    with real_server(folder) as second:
        assert reattached(second, part) == 0
        assert reattached(second, journal) == 2
        assert reattached(second, journal) == 0  # it is there already
        other = Comer(ASKED[1][0], ASKED[1][1]).read(second)
        assert other.done
        spoilt = MemoryJournal()
        spoilt.known = {name: replace_client(one) for name, one in journal.known.items()}
        assert reattached(second, spoilt) == 0


def replace_client(known: Any) -> Any:
    return replace(known, accepted=replace(known.accepted, client=b"{}"))
