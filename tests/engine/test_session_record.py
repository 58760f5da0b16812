"""What is stored of a session comes back as it was, or not at all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvpager.core.saving import SavedSequence
from kvpager.engine.session import Session, session_key
from kvpager.engine.session_record import SessionRecord, sealed
from kvpager.errors import InputError
from kvpager.stores.records import pack_record

SEQUENCE = SavedSequence(
    {"format": 1, "namespace": "n|m", "length": 3},
    {"tokens": np.array([5, 6, 7]), "open": np.arange(24, dtype=np.uint8).reshape(2, 12)},
)
SECRET = bytes(range(32))
RECORD = SessionRecord(SEQUENCE, [(2, 2), (5, 9)], seed=2**63 - 1, turn=4, cut_short="ab12", output=[3, 1, 4])


def unpacked(data: bytes, secret: bytes = SECRET, vocabulary: int = 100) -> SessionRecord | None:
    return SessionRecord.unpack(data, secret, vocabulary)


def test_a_record_comes_back_as_it_was() -> None:
    again = unpacked(RECORD.pack(SECRET))
    assert again is not None
    assert again.sequence.header == SEQUENCE.header
    assert set(again.sequence.arrays) == set(SEQUENCE.arrays)
    for name, array in SEQUENCE.arrays.items():
        assert again.sequence.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(again.sequence.arrays[name], array)
    assert (again.singles, again.seed, again.turn) == (RECORD.singles, RECORD.seed, RECORD.turn)
    assert (again.cut_short, again.output) == ("ab12", [3, 1, 4])


def test_a_record_without_an_answer_comes_back_too() -> None:
    again = unpacked(SessionRecord(SEQUENCE, [], 1, 0).pack(SECRET))
    assert again is not None
    assert (again.singles, again.cut_short, again.output) == ([], "", [])


@pytest.mark.promise(4)
def test_a_damaged_record_is_none() -> None:
    data = RECORD.pack(SECRET)
    for place in range(0, len(data), 7):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        assert unpacked(bytes(damaged)) is None
    for length in range(0, len(data), 31):
        assert unpacked(data[:length]) is None


@pytest.mark.parametrize(
    "header",
    [{}, {"session": {}, "sequence": {}}, {"session": 5, "sequence": {}}, {"session": {"format": 2}, "sequence": {}}],
)
def test_a_record_of_another_kind_or_version_is_none(header: dict[str, Any]) -> None:
    assert unpacked(pack_record(header, {})) is None
    assert unpacked(sealed(header, {}, SECRET)) is None


@pytest.mark.parametrize(
    "change",
    [
        {"seed": True},
        {"seed": -1},
        {"seed": 2**63},
        {"turn": 2**62},
        {"turn": 1.0},
        {"cut_short": 5},
        {"cut_short": ""},
        {"output": [100]},
        {"output": [-1]},
        {"singles": [(0, 4)]},
        {"singles": [(5, 4)]},
        {"singles": [(2, 5), (5, 9)]},
        {"singles": [(5, 9), (2, 3)]},
    ],
)
def test_what_no_session_can_have_left_is_none(change: dict[str, Any]) -> None:
    assert unpacked(replace(RECORD, **change).pack(SECRET)) is None


def test_who_does_not_know_a_sessions_secret_can_not_seal_its_record() -> None:
    assert unpacked(RECORD.pack(SECRET), secret=SECRET[::-1]) is None
    secrets = {Session.named(*one, 0).secret for one in [(b"", "ab"), (b"a", "b"), (b"ab", "c"), (b"a", "bc")]}
    assert len(secrets) == 4
    assert session_key(b"", "ab") not in secrets


def test_a_sessions_key_depends_on_its_tenant_and_name_and_on_where_they_part() -> None:
    pairs = [(b"", "ab"), (b"a", "b"), (b"ab", "c"), (b"a", "bc"), (b"", "a"), (b"", "é")]
    keys = {session_key(salt, name) for salt, name in pairs}
    assert len(keys) == len(pairs)
    assert {len(key) for key in keys} == {32}


@pytest.mark.parametrize("name", ["", "x" * 129, "two\nlines", "a\0b", "\ud800", 5, None, b"bytes"])
def test_what_is_no_name_is_refused(name: Any) -> None:
    with pytest.raises(InputError, match="session: a name has 1 to 128 printable characters"):
        session_key(b"", name)


def test_each_turn_has_a_seed_of_its_own_which_the_sessions_decides() -> None:
    seeds = [Session.named(b"", "a", seed).turn_seed for seed in (0, 1, 2**63 - 1)]
    session = Session.named(b"", "b", 1)
    seeds += [session.turn_seed for session.turn in range(1, 4)]
    assert len(set(seeds)) == 6
    session.turn = 0
    assert session.turn_seed == seeds[1]
    assert all(0 <= seed < 2**63 for seed in seeds)
