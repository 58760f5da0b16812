"""What a tenant can learn of others by what is done for it: nothing. Calls are counted, for times are no proof."""

from __future__ import annotations

import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvpager.stores import open_store
from tests.engine import rig
from tests.engine.rig import Answers, greedy, oracle, prompt, run
from tests.memory_store import MemoryStore

KNOWN, UNKNOWN = prompt(100, seed=1), prompt(100, seed=2)
OURS, THEIRS = b"one tenant", b"another"


class Watched(MemoryStore):
    """Counts what is asked of it, with how many keys or blocks."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.told: list[tuple[str, int]] = []

    def _called(self, name: str, keys: Any) -> None:
        super()._called(name, keys)
        self.told.append((name, len(keys)))


@pytest.mark.promise(5)
@pytest.mark.parametrize("session", [None, "talk"])
@pytest.mark.parametrize("where", ["pool", "store"])
def test_what_another_tenant_has_is_missed_as_what_nobody_has(where: str, session: str | None) -> None:
    told = []
    for ids in (KNOWN, UNKNOWN):
        store = Watched()
        with rig.engine(store=store) as engine:
            engine.add("theirs", KNOWN, greedy(5), salt=THEIRS, session=session)
            run(engine)
            if where == "pool":
                store.told.clear()
                told.append(_asked(engine, store, ids, session))
        if where == "store":
            again = Watched(store.shelf)
            with rig.engine(store=again) as engine:
                told.append(_asked(engine, again, ids, session))
    assert told[0] == told[1]


def _asked(engine: Any, store: Watched, ids: list[int], session: str | None) -> Any:
    """What is done for another tenant that asks for a prompt, and what it is told of that."""
    before = engine.pager.stats()
    engine.add("ours", ids, greedy(5), salt=OURS, session=session)
    answers = run(engine)
    assert answers["ours"] == oracle(ids, 5)
    usage = answers.last["ours", 0].usage
    assert usage is not None
    after = engine.pager.stats()
    steps = [getattr(after, name) - getattr(before, name) for name in ("tiles", "pages_attended", "recalls", "faults")]
    assert after.store_tokens_hit == before.store_tokens_hit
    return store.told, usage.cached_tokens, steps, engine.stats().sessions.lost


@pytest.mark.promise(5)
def test_another_tenants_blocks_cost_a_database_what_nobodys_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same statements are run, whosever a prompt is: by their text, without their numbers."""
    path = tmp_path / "store.db"
    with rig.engine(store=open_store(path, limit_bytes=2**28)) as engine:
        engine.add("theirs", KNOWN, greedy(5), salt=THEIRS, session="talk")
        run(engine)
    traced: Counter[str] = Counter()
    connect = sqlite3.connect

    class Traced(sqlite3.Connection):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self.set_trace_callback(lambda text: traced.update([text.split("(")[0].split(" VALUES")[0][:40]]))

    monkeypatch.setattr(sqlite3, "connect", lambda *args, **more: connect(*args, factory=Traced, **more))
    seen = []
    for ids in (KNOWN, UNKNOWN):
        store = open_store(path, limit_bytes=2**28)
        with rig.engine(store=store) as engine:
            traced.clear()
            engine.add("ours", ids, greedy(1), salt=OURS, session="talk")
            engine.step()  # in which it is looked for; what is written comes later
            seen.append({text: count for text, count in traced.items() if text.startswith("SELECT")})
            run(engine)
            engine.erase(OURS).wait()
    assert seen[0] == seen[1]


def test_a_session_that_another_tenant_uses_is_not_busy() -> None:
    store = MemoryStore()
    with rig.engine(store=store) as engine:
        engine.add("theirs", KNOWN, greedy(50), salt=THEIRS, session="talk")
        answers = Answers()
        answers.take(engine.step())
        engine.add("ours", KNOWN, greedy(5), salt=OURS, session="talk")
        assert not engine.forget_session(OURS + b"!", "talk")
        assert run(engine, answers)["ours"] == oracle(KNOWN, 5)


def test_names_at_their_limits_are_sessions_of_their_own() -> None:
    names = ["x" * 128, "x" * 127 + "y", "\U0001f600" * 128, "é", "e\u0301", "a/b", "../a", "%2e", "."]
    store = MemoryStore()
    with rig.engine(store=store) as engine:
        for name in names:
            engine.add(name, [*KNOWN, len(name) % 100], greedy(2), session=name)
        run(engine)
        assert len(store.shelf.records) == len(names)
        for name in names:
            assert engine.forget_session(b"", name)
        assert engine.stats().sessions.held == 0
