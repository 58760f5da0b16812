"""Sessions on a disk that fills up: every answer is right, and they are kept again when there is room."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stores.disk import run
from tests.stores.test_faults import WAYS, allowed

SCRIPT = """
    import ctypes, json, logging, os, sys
    from pathlib import Path
    folder, size = Path(sys.argv[1]), int(sys.argv[2])
    if ctypes.CDLL(None, use_errno=True).mount(b"tmpfs", bytes(folder), b"tmpfs", 0, b"size=%d" % size):
        raise SystemExit(os.strerror(ctypes.get_errno()))
    import kvpager.hf
    from kvpager.stores import open_store
    from tests.engine import rig
    from tests.engine.rig import greedy, oracle, prompt, run
    kvpager.hf.register()
    lines = []
    logging.getLogger("kvpager.stores").addHandler(logging.NullHandler())
    logging.getLogger("kvpager.stores").addFilter(lambda record: lines.append(record.getMessage()) or True)

    def turn(engine, number, ids):  # each tenant has every other session
        engine.add(str(number), ids, greedy(4), session=str(number), salt=b"ab"[number % 2 : number % 2 + 1])
        answer = run(engine)
        assert answer.reason(str(number)) == "length"
        assert answer[str(number)] == oracle(ids, 4)
        return answer.last[str(number), 0].usage.cached_tokens, [*ids, *answer[str(number)], number % 100]

    store = open_store(folder / "kv" / "store.db", limit_bytes=2**30)
    said = {}
    with rig.engine(store=store) as engine:
        for number in range(2000):
            said[number] = turn(engine, number, prompt(100, seed=number))[1]
            store.flush(1)
            if engine.stats().store.errors:
                break
        full = engine.stats()
        for number in (0, 1, len(said) - 1):  # what is there goes on, and what is not begins anew
            turn(engine, number, said[number])
        erased = engine.erase(b"a").wait()
    store = open_store(folder / "kv" / "store.db", limit_bytes=2**30)
    with rig.engine(store=store) as engine:
        found = [turn(engine, number, said[number])[0] for number in (0, 1)]
        saved = engine.stats()
    store = open_store(folder / "kv" / "store.db", limit_bytes=2**30)
    with rig.engine(store=store) as engine:
        again = turn(engine, 0, [*said[0], *oracle(said[0], 4), 9])[0]
    print(json.dumps(dict(errors=list(full.store.errors), count=len(said), erased=erased,
        found=found, saved=saved.sessions.saved, stored=saved.store.stored, end=saved.store.state, again=again,
        lines=lines)))
"""


@pytest.mark.slow
@pytest.mark.promise(4)
def test_sessions_on_a_full_disk_are_answered_and_go_on_when_there_is_room(tmp_path: Path) -> None:
    ways = [before for way, before in WAYS if way == "tmpfs" and allowed(tmp_path, way, before)]
    if not ways:
        assert WAYS[-1][0] == "rlimit"  # nobody may mount anything here: tests/stores fills a disk in another way
        return
    result = run(SCRIPT, str(tmp_path), str(8 * 2**20), before=ways[0])
    assert set(result["errors"]) == {"full"}
    assert 20 < result["count"] < 2000
    assert result["erased"] > 20
    assert result["found"][0] == 0
    assert result["found"][1] >= 64
    assert result["saved"] == 2
    assert result["stored"] > 0
    assert result["end"] == "ok"
    assert result["again"] >= 96
    assert any("full" in line for line in result["lines"])
