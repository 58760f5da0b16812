"""A sequence's schedule: what is computed one token at a time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvpager.engine.schedule import Schedule


def test_an_answers_tokens_come_one_at_a_time_after_a_prompt_in_tiles() -> None:
    schedule = Schedule(100)
    assert schedule.first == 100
    assert [schedule.single(position) for position in (0, 99, 100, 10**6)] == [False, False, True, True]
    assert schedule.cut(0) == schedule.cut(99) == 100
    assert schedule.cut(100) > 10**12
    assert schedule.until(99) == []
    assert schedule.until(130) == [(100, 130)]


def test_earlier_answers_are_cut_out_of_the_tiles_of_a_longer_prompt() -> None:
    schedule = Schedule(300, [(100, 140), (200, 210)])
    assert schedule.first == 100
    assert schedule.cut(0) == 100
    assert schedule.cut(140) == 200
    assert schedule.cut(210) == 300
    assert [schedule.single(position) for position in (139, 140, 199, 200, 209, 210)] == [
        True,
        False,
        False,
        True,
        True,
        False,
    ]
    assert schedule.until(205) == [(100, 140), (200, 205)]


def test_an_answer_of_which_nothing_was_computed_cuts_a_tile_all_the_same() -> None:
    assert Schedule(100).until(100) == [(100, 100)]
    schedule = Schedule(300, [(100, 100)])
    assert schedule.cut(64) == 100
    assert schedule.cut(100) == 300
    assert not schedule.single(100)


def test_ranges_that_meet_are_one() -> None:
    assert Schedule(140, [(100, 140)]).until(150) == [(100, 150)]
    assert Schedule(130, [(100, 140)]).until(150) == [(100, 150)]
    assert Schedule(300, [(100, 120), (120, 140)]).until(200) == [(100, 140)]


@given(
    st.integers(1, 60),
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 9)), max_size=4),
    st.integers(0, 80),
)
def test_what_is_kept_of_a_schedule_is_the_same_schedule(
    prompt: int, spans: list[tuple[int, int]], length: int
) -> None:
    schedule = Schedule(prompt, [(start, start + count) for start, count in spans])
    single = {position for start, count in spans for position in range(start, start + count)} | set(range(prompt, 200))
    assert {position for position in range(200) if schedule.single(position)} == single
    again = Schedule(max(prompt, length), schedule.until(length))
    for position in range(length):
        assert again.single(position) == schedule.single(position)
        assert min(again.cut(position), length) == min(schedule.cut(position), length)
