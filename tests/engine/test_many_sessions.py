"""Thousands of sessions in a store that has room for some: it keeps to its limit, and every request is answered."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvpager.stores import open_store
from tests.engine import rig
from tests.engine.rig import greedy, oracle, prompt, run
from tests.engine.talk import usage

SESSIONS, AT_ONCE = 2000, 50
LIMIT = 4 * 2**20


@pytest.mark.slow
def test_two_thousand_sessions_under_a_small_limit(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with rig.engine(store=open_store(path, limit_bytes=LIMIT), max_num_seqs=AT_ONCE) as engine:
        for first in range(0, SESSIONS, AT_ONCE):
            names = [str(number) for number in range(first, first + AT_ONCE)]
            for name in names:
                engine.add(name, ids_of(name), greedy(2), session=name, salt=name.encode()[-1:])
            answers = run(engine)
            assert all(answers.reason(name) == "length" for name in names)
        stats = engine.stats()
        assert (stats.sessions.held, stats.sessions.saved, stats.sessions.lost) == (0, SESSIONS, 0)
        assert stats.store is not None
        assert (stats.store.state, stats.store.errors) == ("ok", {})
        engine.check()
    assert sum(file.stat().st_size for file in path.parent.iterdir()) <= LIMIT
    with rig.engine(store=open_store(path, limit_bytes=LIMIT)) as engine:
        stats = engine.stats()
        assert stats.store is not None
        assert 50 < stats.store.records < SESSIONS
        assert stats.store.dropped == 0
        asked = {name: [*ids_of(name), *oracle(ids_of(name), 2), 7] for name in ("0", "1000", str(SESSIONS - 1))}
        for name, ids in asked.items():
            engine.add(name, ids, greedy(5), session=name, salt=name.encode()[-1:])
        answers = run(engine)
        for name, ids in asked.items():
            assert answers[name] == oracle(ids, 5)
        assert usage(answers, str(SESSIONS - 1)).cached_tokens >= 20
    assert not [name for name in os.listdir(tmp_path) if "damaged" in name]


def ids_of(name: str) -> list[int]:
    return prompt(20 + int(name) % 7, seed=int(name))
