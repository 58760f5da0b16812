"""A session's record that somebody forged, its checksums right, is a lost session: never an error or a wrong answer."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpager.engine.session import Session
from kvpager.engine.session_record import SessionRecord, sealed
from kvpager.errors import InputError
from kvpager.stores.records import pack_record, unpack_record
from tests.engine import rig
from tests.engine.rig import SMALL, Answers, greedy, run
from tests.engine.talk import SAID, Talk
from tests.forged import Parts, forged
from tests.memory_store import MemoryStore, Shelf

SESSION = Session.named(b"", "talk", 0)
BUDGETS = [None, 64]
BELIEVED = ("sequence.slots", "output")  # what can't be told from what a model has computed, once it is sealed


@cache
def left(budget: int | None, cut_short: bool) -> tuple[Shelf, list[int], list[list[int]]]:
    """What a session has left, the request that goes on with it, and the right answers to that.

    Those are the one of the session that goes on, and the one of a session of which nothing is left.
    """
    pager = replace(SMALL, budget=budget)
    talk = Talk(MemoryStore(), pager, restarts=True).turns(SAID[:1], greedy(20))
    ids = [*talk.ids, *SAID[3]]
    if cut_short:
        with rig.engine(pager=pager, store=talk.store.reopened()) as engine:
            engine.add("left", ids, greedy(12), session="talk")
            for _ in range(8):
                engine.step()
            engine.abort("left")
    shelf = talk.store.shelf
    shelf.claims.clear()
    answers = []
    for records in (shelf.records, {}):
        answer, _ = asked(shelf, records, budget, ids)
        answers.append(answer["next"])
    return shelf, ids, answers


def asked(shelf: Shelf, records: Any, budget: int | None, ids: list[int]) -> tuple[Answers, int]:
    """The answer of an engine over a copy of a shelf with these records, and how many sessions it has lost."""
    store = MemoryStore(replace(shelf, blocks=dict(shelf.blocks), records=dict(records), claims={}))
    with rig.engine(pager=replace(SMALL, budget=budget), store=store) as engine:
        engine.add("next", ids, greedy(12), session="talk")
        answers = run(engine)
        engine.check()
        return answers, engine.stats().sessions.lost


def packed(parts: Parts, seal: bool) -> bytes | None:
    """The bytes of a forged record, sealed anew or as it was; None for what no record can hold."""
    header, arrays = parts
    if seal:
        header = {name: value for name, value in header.items() if name != "seal"}
    try:
        return sealed(header, arrays, SESSION.secret) if seal else pack_record(header, arrays)
    except InputError:
        return None


@pytest.mark.promise(4)
@settings(max_examples=250, deadline=None)
@given(st.data(), st.sampled_from(BUDGETS), st.booleans(), st.booleans())
def test_a_forged_record_is_a_lost_session(
    data: st.DataObject, budget: int | None, cut_short: bool, seal: bool
) -> None:
    shelf, ids, right = left(budget, cut_short)
    ((key, (whose, record)),) = shelf.records.items()
    what, parts = forged(data.draw, *unpack_record(record))
    made = packed(parts, seal)
    if made is None:
        return
    answers, lost = asked(shelf, {key: (whose, made)}, budget, ids)
    if not seal and made != record:
        assert lost
        assert answers["next"] == right[1]
    elif what.removesuffix("?") not in BELIEVED:
        assert answers["next"] in right
        assert answers.reason("next") == "length"


@pytest.mark.promise(5)
@pytest.mark.parametrize("other", [(b"", "other"), (b"salt", "talk")])
def test_another_sessions_record_in_the_place_of_this_one_is_lost(other: tuple[bytes, str]) -> None:
    shelf, ids, right = left(None, False)
    ((key, (whose, record)),) = shelf.records.items()
    unpacked = SessionRecord.unpack(record, SESSION.secret, 10**6)
    assert unpacked is not None
    moved = unpacked.pack(Session.named(*other, 0).secret)
    answers, lost = asked(shelf, {key: (whose, moved)}, None, ids)
    assert (answers["next"], lost) == (right[1], 1)


@pytest.mark.promise(6)
def test_a_token_that_the_model_does_not_have_is_no_answer() -> None:
    shelf, ids, right = left(None, True)
    ((key, (whose, record)),) = shelf.records.items()
    header, arrays = unpack_record(record)
    del header["seal"]
    for token in (-1, 10**6, 2**62):
        output = arrays["output"].copy()
        output[-1] = token
        made = sealed(header, {**arrays, "output": output}, SESSION.secret)
        answers, lost = asked(shelf, {key: (whose, made)}, None, ids)
        assert (answers["next"], lost) == (right[1], 1)
