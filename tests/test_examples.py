"""Everything that the examples print is true."""

import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "paged_cache.py"


@pytest.fixture(scope="module")
def ran() -> tuple[str, dict[str, Any]]:
    """What the example prints, and the names it leaves behind."""
    printed: list[str] = []
    names = runpy.run_path(
        str(EXAMPLE), {"print": lambda *words, end="\n": printed.append(" ".join(map(str, words)) + end)}
    )
    return "".join(printed), names


def dense(names: dict[str, Any], tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Attention over the first tokens in float64, one token after the other."""
    keys, values, query = (names[name].astype(np.float64) for name in ("KEYS", "VALUES", "QUERY"))
    weights = [np.exp(np.dot(keys[0, token], query[0, 0]) / 32**0.5) for token in range(tokens)]
    share = np.array(weights) / sum(weights)
    return sum(part * values[0, token] for token, part in enumerate(share)), share


def numbers(label: str, text: str) -> list[float]:
    """The numbers after a label, up to the end of the line."""
    match = re.search(rf"{re.escape(label)}(.*)", text)
    assert match, f"{label!r} is not printed"
    return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?(?:e[+-]\d+)?", match.group(1))]


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 60


def test_what_was_written_is_read_back(ran: tuple[str, dict[str, Any]]) -> None:
    assert "read back unchanged: True" in ran[0]


def test_token_and_page_scores_are_those_of_dense_attention(ran: tuple[str, dict[str, Any]]) -> None:
    text, names = ran
    _, share = dense(names, 20)
    assert numbers("token scores:", text) == pytest.approx(share, abs=5.1e-4)
    assert numbers("page scores (attention mass):", text) == pytest.approx(
        [share[:16].sum(), share[16:].sum()], abs=5.1e-4
    )


def test_the_page_table_shows_two_pages_in_two_frames(ran: tuple[str, dict[str, Any]]) -> None:
    first, frame_of_first, second, frame_of_second = numbers("page table:", ran[0])
    assert (first, second) == (0, 1)
    assert frame_of_first != frame_of_second
    assert {frame_of_first, frame_of_second} < set(range(64))


def test_the_page_that_was_to_leave_next_is_the_one_that_left(ran: tuple[str, dict[str, Any]]) -> None:
    text, names = ran
    full = text[text.index("1020 tokens: 64 frames in use") :]
    announced = [int(block) for block in re.findall(r"block (\d+) \(policy", full)]
    assert numbers("Evicted: block", text) == [announced[0]]
    _, share = dense(names, 1_008)
    mass = share.reshape(63, 16).sum(1)
    assert announced[0] == np.argmin(mass), "the page with the least attention leaves first"


def test_after_the_overflow_nothing_is_lost(ran: tuple[str, dict[str, Any]]) -> None:
    text, names = ran
    assert len(numbers("In swap now: blocks", text)) == 80 - 64
    evictions, recalls = numbers("1280 tokens:", text)[:2]
    assert evictions - recalls == 80 - 64
    assert "same bits as with a pool that never evicts: True" in text
    (difference,) = numbers("largest difference to ordinary attention:", text)
    assert difference < 1e-5
    expected, _ = dense(names, 1_280)
    assert names["result"].output[0, 0] == pytest.approx(expected, abs=1e-5)
