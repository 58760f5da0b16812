"""Products with packed weights against float64, for every instruction set that this machine has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

native = pytest.importorskip("kvpager._native", reason="the compiled kernels are not built here")
from kvpager.kernels import linear  # noqa: E402

Bits = npt.NDArray[np.uint16]
KINDS: tuple[linear.Weights, ...] = ("bfloat16", "int8")


@pytest.fixture(params=native.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set in turn, on two threads."""
    before, threads = native.isa(), native.threads()
    native.set_isa(request.param)
    native.set_threads(2)
    yield request.param
    native.set_isa(before)
    native.set_threads(max(threads, 1))


def bits(values: npt.ArrayLike) -> Bits:
    """bfloat16, rounded to nearest with ties to even."""
    whole = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((whole + 0x7FFF + ((whole >> 16) & 1)) >> 16).astype(np.uint16)


def floats(held: Bits) -> npt.NDArray[np.float64]:
    return (held.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def rounded(values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    return floats(bits(values))


def random(generator: np.random.Generator, *shape: int) -> Bits:
    return bits(generator.standard_normal(shape))


def sizes(seed: int) -> tuple[np.random.Generator, int, int, int]:
    """Random outputs, inputs (odd ones too) and rows 1 to 70."""
    generator = np.random.default_rng(seed)
    return generator, *(int(generator.integers(1, most)) for most in (200, 1300, 71))  # type: ignore[return-value]


def bound(kind: str, x: Bits, weights: Bits, exact: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """How far a product may be from the exact one: float32 sums, the result's rounding, and what int8 rounds."""
    summed = np.abs(floats(x)) @ np.abs(floats(weights)).T
    allowed = summed * 2.0**-18 + np.abs(exact) * 2.0**-8 + 1e-30
    if kind == "int8":
        steps = np.abs(floats(weights)).max(axis=1) / 127
        allowed += 0.5 * np.abs(floats(x)).sum(axis=1)[:, None] * steps * 1.01  # each weight by half a step
        largest = np.abs(floats(x)).max(axis=1)[:, None] / 32767
        allowed += 0.51 * largest * np.abs(floats(weights)).sum(axis=1)  # each input by half a step
    return allowed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(12))
def test_products_are_exact_up_to_rounding(isa: str, kind: linear.Weights, seed: int) -> None:
    generator, outputs, inputs, rows = sizes(seed)
    weights, x = random(generator, outputs, inputs), random(generator, rows, inputs)
    bias = random(generator, outputs) if seed % 2 else None
    exact = floats(x) @ floats(weights).T + (0 if bias is None else floats(bias))
    result = floats(linear.multiply(linear.pack(weights, kind=kind, bias=bias), x))
    assert (np.abs(result - exact) <= bound(kind, x, weights, exact)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_whatever_stands_beside_it_and_however_many_threads(
    isa: str, kind: linear.Weights
) -> None:
    generator = np.random.default_rng(3)
    weights, x = random(generator, 700, 1027), random(generator, 500, 1027)
    matrix = linear.pack(weights, kind=kind)
    whole = linear.multiply(matrix, x)
    for rows in (1, 2, 7, 8, 12, 13, 64, 121, 480, 481):
        assert np.array_equal(linear.multiply(matrix, x[:rows]), whole[:rows])
    for threads in (1, 3, 5):
        native.set_threads(threads)
        assert np.array_equal(linear.multiply(matrix, x), whole)
        assert np.array_equal(linear.multiply(matrix, x[:1]), whole[:1])


def test_int8_sums_are_exact_at_their_largest(isa: str) -> None:
    weights = bits(np.full((33, 1024), 127.0))
    x = bits(np.full((2, 1024), 1.0))
    assert np.array_equal(linear.multiply(linear.pack(weights, kind="int8"), x), bits(np.full((2, 33), 127.0 * 1024)))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_written_beyond_the_outputs(isa: str, kind: linear.Weights) -> None:
    generator = np.random.default_rng(4)
    for outputs, rows in ((1, 1), (15, 3), (17, 14), (33, 2)):
        weights, x = random(generator, outputs, 64), random(generator, rows, 64)
        matrix = linear.pack(weights, kind=kind)
        poisoned = np.full(rows * outputs + 64, 0x1234, np.uint16)
        matrix.product(x.ctypes.data, x.size, poisoned.ctypes.data, rows * outputs)
        assert np.array_equal(poisoned[: rows * outputs].reshape(rows, outputs), linear.multiply(matrix, x))
        assert (poisoned[rows * outputs :] == 0x1234).all()


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_are_not_read_beyond_their_end(isa: str, kind: linear.Weights) -> None:
    """They end at a guard page; so does what a product writes."""
    generator = np.random.default_rng(5)
    for inputs, rows in ((1, 1), (32, 1), (575, 2), (96, 15)):
        weights = random(generator, 32, inputs)
        size = 2 * rows * inputs
        memory = native.allocate(-(-size // 64) * 64)[-size:] if size % 64 else native.allocate(size)
        x = memory.view(np.uint16).reshape(rows, inputs)
        x[:] = random(generator, rows, inputs)
        exact = floats(x) @ floats(weights).T
        result = floats(linear.multiply(linear.pack(weights, kind=kind), x))
        assert (np.abs(result - exact) <= bound(kind, x, weights, exact)).all()


def test_infinity_and_nan_reach_the_rows_that_hold_them_alone(isa: str) -> None:
    generator = np.random.default_rng(6)
    weights, x = random(generator, 40, 100), random(generator, 3, 100)
    x[1, 7], x[2, 99] = 0x7F80, 0x7FC0
    for kind in KINDS:
        result = floats(linear.multiply(linear.pack(weights, kind=kind), x))
        assert np.isfinite(result[0]).all()
        assert not np.isfinite(result[1:]).any()
    weights[3, 5] = 0x7FC0
    assert np.isnan(floats(linear.multiply(linear.pack(weights), x))[0, 3])
    with pytest.raises(ValueError, match="not finite"):
        linear.pack(weights, kind="int8")


def test_small_and_empty_inputs(isa: str) -> None:
    generator = np.random.default_rng(7)
    for kind in KINDS:
        matrix = linear.pack(random(generator, 20, 50), kind=kind)
        assert linear.multiply(matrix, np.empty((0, 50), np.uint16)).shape == (0, 20)
        assert not linear.multiply(matrix, np.zeros((2, 50), np.uint16)).any()
    assert not linear.multiply(linear.pack(np.zeros((20, 50), np.uint16), kind="int8"), random(generator, 2, 50)).any()


@pytest.mark.parametrize("kind", KINDS)
def test_parts_and_halves_are_unpacked_as_they_were(kind: linear.Weights) -> None:
    generator = np.random.default_rng(8)
    outputs, inputs = [37, 5, 16], 51
    parts = [random(generator, count, inputs) for count in outputs]
    matrix = linear.Arena(linear.packed_bytes(outputs, inputs, kind)).matrix(outputs, inputs, kind)
    for part, weights in enumerate(parts):
        first = len(weights) // 2
        for start, rows in ((first, weights[first:]), (0, weights[:first])):
            matrix.write(part, 0, start, rows.ctypes.data, rows.size)
    x = random(generator, 4, inputs)
    results = [np.empty((4, count), np.uint16) for count in outputs]
    matrix.product3(x.ctypes.data, x.size, *(number for one in results for number in (one.ctypes.data, one.size)))
    for part, weights in enumerate(parts):
        back = np.empty_like(weights)
        matrix.read(part, 0, 0, back.ctypes.data, back.size)
        step = np.abs(floats(weights)).max(axis=1, keepdims=True) / 127
        assert (
            np.array_equal(back, weights)
            if kind == "bfloat16"
            else (np.abs(floats(back) - floats(weights)) <= step * 0.5 + np.abs(floats(weights)) * 2.0**-8).all()
        )
        alone = linear.multiply(linear.pack(weights, kind=kind), x)
        assert np.array_equal(results[part], alone)


def activated(kind: str, x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    import math

    if kind == "silu":
        return x / (1 + np.exp(-x))
    if kind == "gelu_tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * np.vectorize(math.erfc)(-x / math.sqrt(2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation", linear.ACTIVATIONS)
def test_gated_perceptrons_round_as_their_parts_do(isa: str, kind: linear.Weights, activation: str) -> None:
    generator = np.random.default_rng(9)
    for width, inputs, rows in ((50, 65, 1), (96, 64, 5), (33, 40, 70)):
        gate, up, down = (random(generator, *shape) for shape in ((width, inputs), (width, inputs), (24, width)))
        both = linear.Arena(linear.packed_bytes([width], inputs, kind, True)).matrix([width], inputs, kind, True)
        both.write(0, 0, 0, gate.ctypes.data, gate.size)
        both.write(0, 1, 0, up.ctypes.data, up.size)
        x = bits(0.3 * generator.standard_normal((rows, inputs)))
        result = linear.gated(both, linear.pack(down, kind=kind), activation, x)
        a, b = (floats(linear.multiply(linear.pack(part, kind=kind), x)) for part in (gate, up))
        hidden = bits(rounded(activated(activation, a)) * b)
        exact = floats(hidden) @ floats(down).T
        # an activation that fell on the other side of a rounding moves one of the hidden numbers by a step
        allowed = bound(kind, hidden, down, exact) + np.abs(floats(hidden)) @ np.abs(floats(down)).T * 2.0**-9
        assert (np.abs(floats(result) - exact) <= allowed).all()


@pytest.mark.parametrize("plus_one", [False, True])
def test_norms_round_as_the_models_do(isa: str, plus_one: bool) -> None:
    generator = np.random.default_rng(10)
    for rows, width in ((1, 576), (3, 7), (300, 200)):
        x, weight = random(generator, rows, width), random(generator, width)
        result = floats(linear.normalise(x, weight, 1e-5, plus_one=plus_one))
        wide = floats(x)
        plain = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5)
        exact = rounded(plain * (1 + floats(weight))) if plus_one else rounded(rounded(plain) * floats(weight))
        assert (np.abs(result - exact) <= np.abs(exact) * 2.0**-6).all()
        assert (result == exact).mean() > 0.99


def test_rows_are_read_by_their_numbers() -> None:
    generator = np.random.default_rng(11)
    table = random(generator, 100, 33)
    matrix = linear.pack(table)
    ids = generator.integers(0, 100, 17)
    to = np.empty((17, 33), np.uint16)
    matrix.read_rows(ids.ctypes.data, 17, to.ctypes.data, to.size)
    assert np.array_equal(to, table[ids])
    for wrong in (-1, 100):
        ids[3] = wrong
        with pytest.raises(IndexError, match=str(wrong)):
            matrix.read_rows(ids.ctypes.data, 17, to.ctypes.data, to.size)


@pytest.mark.promise(6)
def test_wrong_arguments_are_named() -> None:
    weights = bits(np.ones((4, 6)))
    matrix = linear.pack(weights)
    x = bits(np.ones((2, 6)))
    at, size = x.ctypes.data, x.size
    cases: list[tuple[str, Any]] = [
        ("kind", lambda: linear.pack(weights, kind="int4")),  # type: ignore[arg-type]
        ("weights", lambda: linear.pack(weights[0])),
        ("weights", lambda: linear.pack(weights.T)),
        ("weights", lambda: linear.packed_bytes([4], 6, "int4")),
        ("bias", lambda: linear.pack(weights, bias=weights[0])),
        ("bias", lambda: linear.pack(weights, bias=weights)),
        ("x", lambda: linear.multiply(matrix, bits(np.ones((2, 5))))),
        ("x", lambda: linear.multiply(matrix, x.astype(np.float32))),  # type: ignore[arg-type]
        ("x", lambda: matrix.product(at, 11, at, 8)),
        ("x", lambda: matrix.product(0, 12, at, 8)),
        ("to", lambda: matrix.product(at, 12, at, 9)),
        ("to", lambda: matrix.product(at, 12, 0, 8)),
        ("to", lambda: matrix.product3(at, 12, at, 8, at, 8, at, 8)),
        ("part", lambda: matrix.write(1, 0, 0, at, size)),
        ("half", lambda: matrix.write(0, 1, 0, at, size)),
        ("first", lambda: matrix.write(0, 0, 3, at, size)),
        ("first", lambda: matrix.read(0, 0, -1, at, size)),
        ("matrix", lambda: linear.gated(matrix, matrix, "silu", x)),
        ("activation", lambda: linear.gated(matrix, matrix, "relu", x)),
        ("outputs", lambda: linear.packed_bytes([], 6)),
        ("outputs", lambda: linear.packed_bytes([0], 6)),
        ("outputs", lambda: linear.packed_bytes([4, 4], 6, "bfloat16", True)),
        ("inputs", lambda: linear.packed_bytes([4], 0)),
        ("memory", lambda: native.PackedMatrix(native.allocate(64), [4], 6, "bfloat16", False)),
        ("arena", lambda: linear.Arena(64).matrix([4], 6)),
        ("weight", lambda: linear.normalise(x, weights, 1e-5)),
        ("x", lambda: linear.normalise(x, weights[0][:5], 1e-5)),
        ("cosine", lambda: native.rotate(at, size, at, size, at, at, 12, 2, 4, at, at)),
        ("width", lambda: native.rotate(at, size, at, size, at, at, 12, 3, 3, at, at)),
    ]
    for name, call in cases:
        with pytest.raises(ValueError, match=rf"\b{name}\b"):
            call()
    gate_up = linear.Arena(linear.packed_bytes([4], 6, gated=True)).matrix([4], 6, gated=True)
    with pytest.raises(ValueError, match="down"):
        linear.gated(gate_up, matrix, "silu", x)
    with pytest.raises(ValueError, match="gated"):
        linear.multiply(gate_up, x)
