"""Bad input of every public call: a clear error that names the value, and nothing changed (promise 6)."""

from __future__ import annotations

import numpy as np
import pytest

from kvpager import KVShape, Pager, PagerConfig
from kvpager.config import parse_size
from kvpager.errors import ConfigError, InputError, SequenceError
from tests.core.rig import SMALL, Rig, fingerprint

pytestmark = pytest.mark.promise(6)


def ok(heads=2, tokens=3, dim=8):
    return np.ones((heads, tokens, dim), np.float32)


def bad(value):
    array = ok()
    array[1, 2, 3] = value
    return array


WRONG_ARRAYS = {
    "a list": ([[1.0]], "NumPy array"),
    "None": (None, "NumPy array"),
    "integers": (ok().astype(np.int64), "int64"),
    "complex": (ok().astype(complex), "complex128"),
    "two axes": (ok()[0], r"\(3, 8\)"),
    "four axes": (ok()[None], r"\(1, 2, 3, 8\)"),
    "a head too many": (ok(heads=3), r"\(3, 3, 8\)"),
    "another head_dim": (ok(dim=9), r"\(2, 3, 9\)"),
    "no tokens": (ok(tokens=0), r"\(2, 0, 8\)"),
    "NaN": (bad(np.nan), "NaN"),
    "infinity": (bad(-np.inf), "infinity"),
    "beyond float32": (ok().astype(np.float64) * 1e300, "float32"),
}


@pytest.fixture
def rig():
    rig = Rig(budget=40, pool=64)
    rig.sequence = rig.open()
    rig.feed([rig.sequence], [60])
    return rig


def refused(rig, kind, match, call, *arguments, **named):
    before = fingerprint(rig.pager)
    with pytest.raises(kind, match=match):
        call(*arguments, **named)
    assert fingerprint(rig.pager) == before


@pytest.mark.parametrize("name", WRONG_ARRAYS)
@pytest.mark.parametrize("which", ["keys", "values", "queries"])
def test_wrong_arrays(rig, which, name):
    value, match = WRONG_ARRAYS[name]
    if which == "queries":
        if name == "a head too many":
            return
        if isinstance(value, np.ndarray) and value.ndim == 3 and value.shape[0] == 2:
            value = np.concatenate([value, value])
            match = match.replace(r"\(2,", r"\(4,")
        refused(rig, InputError, f"queries: .*{match}", rig.pager.attend, rig.sequence, 0, value)
    else:
        pair = (value, ok()) if which == "keys" else (ok(), value)
        refused(rig, InputError, f"{which}: .*{match}", rig.pager.append, rig.sequence, 0, *pair)


def test_keys_and_values_of_different_length(rig):
    refused(rig, InputError, "3 tokens, but keys have 2", rig.pager.append, rig.sequence, 0, ok(tokens=2), ok())


def test_more_queries_than_tokens(rig):
    refused(rig, InputError, "61 queries, but layer 0 holds 60", rig.pager.attend, rig.sequence, 0, ok(4, 61))


@pytest.mark.parametrize("layer", [-1, 2, 10**9, 1.0, "0", None, True])
def test_wrong_layers(rig, layer):
    sequence, pager = rig.sequence, rig.pager
    refused(rig, InputError, "layer: ", pager.append, sequence, layer, ok(), ok())
    refused(rig, InputError, "layer: ", pager.attend, sequence, layer, ok(4))
    refused(rig, InputError, "layer: ", pager.read, sequence, layer)
    refused(rig, InputError, "layer: ", pager.scores, sequence, layer)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "1", True])
def test_wrong_scale_and_softcap(rig, value):
    refused(rig, InputError, "scale: ", rig.pager.attend, rig.sequence, 0, ok(4), scale=value)
    refused(rig, InputError, "softcap: ", rig.pager.attend, rig.sequence, 0, ok(4), softcap=value)


@pytest.mark.parametrize("length", [-1, 61, 1.5, "3", None])
def test_wrong_lengths(rig, length):
    refused(rig, InputError, "length: ", rig.pager.crop, rig.sequence, length)


@pytest.mark.parametrize(("start", "stop"), [(-1, 5), (5, 5), (6, 5), (0, 61), (0, 0), (60, 60)])
def test_wrong_ranges(rig, start, stop):
    refused(rig, InputError, "start: |stop: ", rig.pager.read, rig.sequence, 0, start, stop)


@pytest.mark.parametrize(
    ("sequences", "counts", "tokens", "match"),
    [
        ([], [], None, "at least one"),
        ("s", [1, 2], None, "2 counts for 1 sequences"),
        ("s", [0], None, "counts: 0"),
        ("s", [-3], None, "counts: -3"),
        ("s", [2.0], None, "counts: 2.0"),
        ("ss", [1, 1], None, "twice"),
        ("s", [2], [[1]], r"lengths \[1\] are not the counts \[2\]"),
        ("s", [1], [[-4]], "token_ids: -4"),
        ("s", [1], [["x"]], "token_ids: 'x'"),
        ("s", [1], ["x"], "got text"),
        ("s", 1, None, "counts: expected a list, got int"),
        ("s", [1], 5, "token_ids: expected a list, got int"),
    ],
)
def test_wrong_steps(rig, sequences, counts, tokens, match):
    refused(rig, InputError, match, rig.pager.begin, [rig.sequence] * len(sequences), counts, tokens)


@pytest.mark.parametrize("tokens", ["text", 5, [1.5], [-1], [True], [None]])
def test_wrong_prompts(rig, tokens):
    refused(rig, InputError, "token_ids: ", rig.pager.open, tokens)


@pytest.mark.parametrize("which", ["closed", "foreign", "not one"])
def test_wrong_sequences(rig, which):
    pager = rig.pager
    if which == "closed":
        wrong, match = pager.open(), "is closed"
        pager.close(wrong)
    elif which == "foreign":
        wrong, match = Rig().open(), "another pager"
    else:
        wrong, match = 3, "got int"
    refused(rig, SequenceError, match, pager.append, wrong, 0, ok(), ok())
    refused(rig, SequenceError, match, pager.attend, wrong, 0, ok(4))
    refused(rig, SequenceError, match, pager.begin, [rig.sequence, wrong], [1, 1])
    refused(rig, SequenceError, match, pager.fork, wrong)
    refused(rig, SequenceError, match, pager.crop, wrong, 1)
    refused(rig, SequenceError, match, pager.read, wrong, 0)
    refused(rig, SequenceError, match, pager.page_table, wrong)
    refused(rig, SequenceError, match, pager.scores, wrong, 0)
    refused(rig, SequenceError, match, pager.close, wrong)


def test_steps_over_uneven_layers(rig):
    rig.pager.append(rig.sequence, 0, ok(), ok())
    for call in (lambda: rig.pager.begin([rig.sequence], [1]), lambda: rig.pager.fork(rig.sequence)):
        refused(rig, RuntimeError, r"hold \[63, 60\] tokens", call)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layers", 0),
        ("kv_heads", -1),
        ("query_heads", 3),
        ("head_dim", 1025),
        ("head_dim", 8.0),
        ("dtype", "int4"),
        ("windows", (4,)),
        ("windows", [4, None]),
        ("windows", (0, None)),
        ("scale", 0),
        ("scale", "1"),
    ],
)
def test_wrong_shapes_name_the_field(field, value):
    settings = {"layers": 2, "kv_heads": 2, "query_heads": 4, "head_dim": 8, field: value}
    with pytest.raises(ConfigError, match=f"^{field}: "):
        KVShape(**settings)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pool", 0),
        ("pool", -1),
        ("pool", "many"),
        ("pool", "0MiB"),
        ("pool", 1.5),
        ("memory", "12 parsecs"),
        ("memory", "1MiB"),
        ("max_tokens", 0),
        ("budget", 0),
        ("budget", -5),
        ("budget", 63),
        ("budget", 1e3),
        ("mode", "keep"),
        ("policy", "best"),
        ("digest", "3bit"),
        ("page_size", 12),
        ("page_size", 16.0),
        ("tile", 0),
        ("tile", 24),
        ("tile", 2048),
        ("group_pages", 0),
        ("sink_pages", -1),
        ("recent_pages", True),
        ("decay", 0),
        ("decay", 1.1),
        ("grace", -1),
        ("swap", 3),
        ("swap_limit", "none"),
        ("prefix_tokens", -1),
        ("namespace", 4),
        ("seed", -1),
    ],
)
def test_wrong_settings_name_the_field(field, value):
    with pytest.raises(ConfigError, match=f"^{field}: "):
        PagerConfig(**{field: value})


def test_settings_that_contradict():
    with pytest.raises(ConfigError, match="not both"):
        PagerConfig(pool=4, memory="1MiB", max_tokens=100)
    with pytest.raises(ConfigError, match="needs a budget"):
        PagerConfig(mode="discard")
    with pytest.raises(ConfigError, match="leave no room"):
        Pager(SMALL, PagerConfig(memory="1KiB", max_tokens=10_000))
    with pytest.raises(ConfigError, match="leave no room"):
        Pager(SMALL, PagerConfig(memory="1GiB", max_tokens=2**40))
    with pytest.raises(ConfigError, match="less than one page"):
        Pager(SMALL, PagerConfig(pool="10B"))
    with pytest.raises(ConfigError, match="expected a KVShape, got dict"):
        Pager({})
    with pytest.raises(ConfigError, match="expected a PagerConfig, got int"):
        Pager(SMALL, 64)
    assert issubclass(ConfigError, ValueError)
    assert issubclass(InputError, ValueError)


@pytest.mark.parametrize(
    ("text", "size"), [("64MiB", 2**26), ("1.5GB", 1_500_000_000), ("1024", 1024), (" 2 kib ", 2048), (7, 7)]
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("kernel", ["native", "reference"])
def test_finite_numbers_whose_scores_are_beyond_float32_end_a_step_all_the_same(kernel):
    """Estimates that are no numbers choose fewer pages than there is room for; no kernel may trip over that."""
    rig = Rig(kernel=kernel, budget=32, tile=8)
    sequence = rig.pager.open()
    for tokens in (60, 1, 9):
        rig.pager.begin([sequence], [tokens])
        for layer in range(2):
            keys = 1e25 * rig.random(2, tokens)
            rig.pager.append(sequence, layer, keys, np.sign(keys))
            with np.errstate(all="ignore"):
                output = rig.pager.attend(sequence, layer, 1e25 * rig.random(4, tokens)).output
            assert output.shape == (4, tokens, 8)
        rig.pager.commit()
    rig.pager.check()
