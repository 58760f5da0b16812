from __future__ import annotations

import numpy as np
import pytest
from tests.small_llm import tokenizer

from kvpager.config import PagerConfig
from kvpager.errors import InputError
from kvpager.evaluation.codes import PLANTED, CodesTask, Column, RecallMap
from kvpager.evaluation.forward import full_cache
from kvpager.evaluation.text import bundled_text, paragraphs, read_text
from kvpager.hf import PagerCache
from kvpager.models import LoadedModel

TOKENIZER = tokenizer()


def test_every_sentence_stands_where_the_task_says() -> None:
    task = CodesTask.make(TOKENIZER, bundled_text(), tokens=16000)
    assert [question.code for question in task.questions] == [code for _, code in PLANTED]
    for question, prompt in zip(task.questions, task.prompts, strict=True):
        there = TOKENIZER.decode(task.token_ids[question.token :])
        assert there.startswith(f"{question.beginning} {question.code}.\n\n")
        assert TOKENIZER.decode(prompt) == question.beginning
    assert 0.9 * 16000 < len(task.token_ids) <= 16000
    assert task.questions[-1].token < 0.65 * len(task.token_ids)


def test_a_seed_plants_other_codes_and_always_the_same() -> None:
    makes = [CodesTask.make(TOKENIZER, bundled_text(), tokens=8000, codes=3, seed=seed) for seed in (5, 5, 6)]
    assert makes[0] == makes[1]
    assert [question.code for question in makes[0].questions] != [question.code for question in makes[2].questions]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codes": 0}, "codes: 0 is not in 1..8"),
        ({"codes": 9}, "codes: 9 is not in 1..8"),
        ({"tokens": 100}, "tokens: 100 leave no room"),
        ({"text": "A short one.\n\nAnd another."}, "it is too short"),
    ],
)
def test_what_can_not_be_planted_is_refused(change: dict[str, object], message: str) -> None:
    settings: dict[str, object] = {"text": bundled_text(), "tokens": 8000, "codes": 3, **change}
    with pytest.raises(InputError, match=message):
        CodesTask.make(TOKENIZER, **settings)  # type: ignore[arg-type]


def test_an_answer_leaves_the_cache_as_it_was(loaded: LoadedModel) -> None:
    ids = np.random.default_rng(2).integers(3, 259, 180).tolist()
    columns = [Column("full", loaded.model, full_cache(loaded.model))]
    with PagerCache(loaded.model.config, PagerConfig(pool=40, group_pages=16)) as cache:
        columns.append(Column("paged", loaded.model, cache))
        answers = []
        for column in columns:
            column.read(ids)
            answers.append(
                [list(column.answer(ids[7:20])), list(column.answer(ids[3:30])), list(column.answer(ids[7:20]))]
            )
            assert column.cache.get_seq_length() == 180
        assert answers[0] == answers[1]
        assert answers[0][0] == answers[0][2]
        memory = columns[1].memory()
    assert memory["resident_bytes"] == memory["pool_bytes"] + memory["digest_bytes"] + memory["table_bytes"]
    assert columns[0].memory()["resident_bytes"] == 180 * 2 * 2 * 2 * 16 * 4


def test_the_map_shows_what_came_back_and_how_much_it_was_attended_to(loaded: LoadedModel) -> None:
    ids = np.random.default_rng(2).integers(3, 259, 256).tolist()
    with PagerCache(loaded.model.config, PagerConfig(pool=24, budget=64, tile=16, group_pages=8)) as cache:
        seen = RecallMap(2, 16)
        cache.pager.observers.append(seen)
        column = Column("paged", loaded.model, cache)
        column.read(ids)
        assert seen.recalls == cache.stats().recalls > 0
    assert seen.brightest == 1 + int(seen.mass[:, 1:].sum(axis=0).argmax())
    assert seen.heat.max() <= 1
    assert (seen.heat > 0).tolist() == (seen.mass > 0).tolist()
    before = seen.total.copy()
    seen.clear()
    assert seen.recalls == 0
    assert seen.brightest is None
    np.testing.assert_array_equal(seen.total, before)
    seen.restart()
    assert not seen.total.any()


def test_paragraphs_are_single_lines_and_a_missing_file_is_named() -> None:
    assert paragraphs("a\nb\n\n\n  c \n\n \n\nd") == ["a b", "c", "d"]
    with pytest.raises(InputError, match=r"nowhere.txt can't be read: No such file"):
        read_text("nowhere.txt")
