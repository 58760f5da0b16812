"""Bytes of the journal: they come back as they were, and nothing that is spoiled or made up is believed."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpager.journaled import Accepted, Gained, Told
from kvpager.replication.book import Held, Misfit
from kvpager.replication.entries import Broken, EntryWriter, Grew, Taken, read_entry
from kvpager.replication.limits import Limits
from kvpager.replication.packing import Damaged, pack, unpack
from kvpager.replication.record import pack_request, unpack_request
from tests.replication.rig import PAGE, accepted, ended, gained, grown, slot

LIMITS = Limits(tokens=1000, name_bytes=100)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(TEXTS, JSON, max_size=3)
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=6)
ACCEPTED = st.builds(
    Accepted,
    id=TEXTS,
    prompt=st.lists(st.integers(0, 2**31), min_size=1, max_size=8),
    params=OBJECTS.map(lambda value: {name: one for name, one in value.items() if name != "n"}),
    priority=st.integers(-9, 9),
    seconds=st.none() | st.floats(0, 1e9),
    salt=st.binary(max_size=8),
    session=st.none() | TEXTS,
    seed=st.integers(-(2**63), 2**64 - 1),
    client=st.binary(max_size=8),
)


def held() -> Held:
    """A request with two answers, one of which has ended."""
    one = Held(accepted("one", n=2), PAGE, "5-1", 3)
    one.tell(Told("one", 0, (1,), None, gained("one", 0, 0, 6, b"scores")))
    one.tell(dataclasses.replace(grown("one", 1, 0, 6, 1), logprobs=[{"token": 1, "logprob": -0.5}]))
    one.tell(ended("one", 1, 9))
    return one


@given(taken=ACCEPTED, header=OBJECTS, tokens=TOKENS, keys=st.binary(max_size=9), slots=st.binary(max_size=9))
def test_entries_come_back(
    taken: Accepted, header: dict[str, Any], tokens: list[int], keys: bytes, slots: bytes
) -> None:
    told = Told(taken.id, 3, tokens, [{"a": 1}] * len(tokens), Gained(header, 2, keys, 7, slots, b"s", ((1, 2),)))
    end = Told(taken.id, 0, (), None, None, "stop", "text", "wrong", {"completion_tokens": 3})
    writer = EntryWriter("5-1")
    writer.taken(taken, 16)
    writer.grew(told, 4, 11)
    writer.grew(end, 5, 12)
    entry = read_entry(*writer.pack(), Limits())
    first, second, third = entry.parts
    assert first == Taken(taken.id, taken, 16)
    assert isinstance(second, Grew)
    assert isinstance(third, Grew)
    assert (second.before, second.at, second.spoiled) == (4, 11, False)
    assert dataclasses.replace(second.told, gained=None) == dataclasses.replace(told, gained=None)
    assert second.told.gained == dataclasses.replace(told.gained, singles=[(1, 2)])  # type: ignore[type-var]
    assert third.told == dataclasses.replace(end, tokens=[])


def test_requests_in_full_come_back() -> None:
    one = held()
    again = unpack_request(pack_request(one), LIMITS)
    assert again.resumable().accepted == one.accepted
    assert again.resumable().outputs == one.resumable().outputs
    assert again.resumable().saved == one.resumable().saved
    assert again.resumable().logprobs == one.resumable().logprobs
    assert (again.beginning, again.last, again.page) == ("5-1", 3, PAGE)
    end = again.answers[1].end
    assert end is not None
    assert (end.finish_reason, end.usage) == ("stop", {"completion_tokens": 1})


def test_every_changed_or_missing_byte_is_found() -> None:
    data = pack_request(held())
    for place in range(len(data)):
        with pytest.raises(Damaged):
            unpack_request(data[:place], LIMITS)
        changed = bytearray(data)
        changed[place] ^= 1 << place % 8
        with pytest.raises(Damaged):
            unpack_request(bytes(changed), LIMITS)


def test_damaged_slots_cost_pages_and_no_tokens() -> None:
    writer = EntryWriter("5-1")
    writer.grew(grown("one", 0, 0, 6, 1), 4, 0)
    frame, slots = writer.pack()
    for wrong in (slots[:-1], b"x" + slots[1:], slots + b"x"):
        (part,) = read_entry(frame, wrong, LIMITS).parts
        assert isinstance(part, Grew)
        assert part.spoiled
        assert list(part.told.tokens) == [1]


WRONG: list[Any] = [None, True, -1, 2**70, 1.5, float("nan"), "x" * 200, [], [None], [[1]], {}, {"a": 1}, "drop"]


@pytest.mark.parametrize("kind", ["taken", "grew", "request"])
def test_fields_that_make_no_sense_cost_the_request(kind: str) -> None:
    """Every field is replaced by others, with a right checksum: it is read as what it may be, or not at all."""
    writer = EntryWriter("5-1")
    if kind == "taken":
        writer.taken(accepted("one"), PAGE)
    else:
        writer.grew(grown("one", 0, 0, 6, 1, finish_reason="stop"), 4, 0)
    frame, slots = writer.pack()
    if kind == "request":
        frame = pack_request(held())
    _, runs = unpack(frame, LIMITS)
    text = int.from_bytes(frame[4:8], "little")
    start = 12 + 4 * len(runs)
    header = json.loads(frame[start : start + text])
    for path in list(paths(header)):
        for value in WRONG:
            changed = json.loads(json.dumps(header))
            place = changed
            for step in path[:-1]:
                place = place[step]
            if value == "drop":
                del place[path[-1]]
            else:
                place[path[-1]] = value
            data = pack(json.dumps(changed).encode(), runs)
            try:
                parts = [] if kind == "request" else read_entry(data, slots, LIMITS).parts
                known = unpack_request(data, LIMITS) if kind == "request" else Held(accepted("one"), PAGE)
            except Damaged:
                continue
            for part in parts:
                if isinstance(part, Grew):
                    try_to_tell(known, part)
                else:
                    assert isinstance(part, (Taken, Broken))
            known.resumable()


def try_to_tell(known: Held, part: Grew) -> None:
    try:
        known.tell(part.told, part.at, part.spoiled)
    except Misfit:
        assert known.answers[0].tokens == []


def paths(value: Any) -> list[tuple[Any, ...]]:
    """Ways to all fields and elements."""
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [(step, *rest) for step, inner in steps for rest in [(), *paths(inner)]]


def test_noise_is_damaged() -> None:
    chance = random.Random(1)
    for _ in range(300):
        noise = chance.randbytes(chance.randrange(60))
        with pytest.raises(Damaged):
            read_entry(noise, b"", LIMITS)
        with pytest.raises(Damaged):
            read_entry(pack(noise, []), b"", LIMITS)


GAPS = [
    gained("one", 0, 7, 7),  # a token is missing before it
    gained("one", 0, 9, 10),  # and a block
    dataclasses.replace(gained("one", 0, 6, 7), slots=b"short"),
    dataclasses.replace(gained("one", 0, 6, 7), first=2),
    dataclasses.replace(gained("one", 0, 6, 7), first=0),
    dataclasses.replace(gained("one", 0, 6, 7), slots=b""),
    dataclasses.replace(gained("one", 0, 6, 7), slots_from=8),
    dataclasses.replace(gained("one", 0, 6, 7), slots_from=-1),
    dataclasses.replace(gained("one", 0, 6, 7), header={"length": 70}),
    dataclasses.replace(gained("one", 0, 6, 7), header={}),
    dataclasses.replace(gained("one", 0, 6, 7), keys=b"k" * 33),
    None,
]


@pytest.mark.parametrize("gap", GAPS)
def test_a_gap_in_the_pages_costs_them_until_they_are_told_from_the_start(gap: Gained | None) -> None:
    one = Held(accepted("one"), PAGE)
    one.tell(grown("one", 0, 0, 6, 1))
    one.tell(Told("one", 0, (2, 3), None, gap))
    assert one.resumable().saved == [None]
    assert one.resumable().outputs == [[1, 2, 3]]
    one.tell(grown("one", 0, 8, 9, 4))
    assert one.resumable().saved == [None]
    one.tell(grown("one", 0, 0, 10, 5))
    (saved,) = one.resumable().saved
    assert saved is not None
    assert (saved.slots, len(saved.keys)) == (slot("one", 0, 8) + slot("one", 0, 9), 64)


def test_slots_may_be_told_again_and_scores_go_with_their_block() -> None:
    one = Held(accepted("one"), PAGE)
    one.tell(Told("one", 0, (1,), None, gained("one", 0, 0, 6, b"scores")))
    whole = b"".join(slot("one", 0, position) for position in (4, 5, 6))
    one.tell(Told("one", 0, (2,), None, Gained({"length": 7}, 1, b"", 4, whole)))
    (saved,) = one.resumable().saved
    assert saved is not None
    assert (saved.slots, saved.scores) == (whole, b"scores")
    one.tell(Told("one", 0, (3,), None, gained("one", 0, 7, 8)))
    (saved,) = one.resumable().saved
    assert saved is not None
    assert (saved.slots, saved.scores, saved.tokens) == (b"", b"", [1, 2, 3, 4, 5, 6, 1, 2])
