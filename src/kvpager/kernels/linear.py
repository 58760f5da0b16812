"""Products with packed weights: the NumPy face of the compiled matrix kernels.

Numbers are bfloat16, held as uint16. Weights [outputs, inputs] are packed once, in groups of 32 outputs, as bfloat16
or as int8 with a scale for each output; products then stream them from memory. Importing this module without the
compiled kernels raises ImportError.

An output is summed in float32 over the inputs in one fixed order (int8: inputs are rounded to 16 bits in chunks of 512,
a chunk's sum is exact), so a row's result is the same bits whatever rows stand beside it and however many threads run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from kvpager._native import PackedMatrix, allocate, rms_norm

__all__ = ["ACTIVATIONS", "Arena", "PackedMatrix", "Weights", "gated", "multiply", "normalise", "pack", "packed_bytes"]

Bits = npt.NDArray[np.uint16]
Weights = Literal["bfloat16", "int8"]

# What a gate goes through, by the number that the kernels know it by.
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}

_LINE = 64


def packed_bytes(outputs: Sequence[int], inputs: int, weights: str = "bfloat16", gated: bool = False) -> int:
    """Bytes that a packed matrix takes in an arena. Raises ValueError for sizes that are not positive."""
    return PackedMatrix.packed_bytes(list(outputs), inputs, weights, gated)


class Arena:
    """One piece of memory, in huge pages where the system gives them, that packed matrices share.

    `total` is the sum of their `packed_bytes`. Raises ValueError when it isn't positive and MemoryError when there is
    no room.
    """

    def __init__(self, total: int) -> None:
        self._memory = allocate(total)
        self._used = 0

    def matrix(
        self, outputs: Sequence[int], inputs: int, weights: str = "bfloat16", gated: bool = False
    ) -> PackedMatrix:
        """A matrix without contents yet (all zero) of one to three parts, which share their inputs.

        A gated one has two halves: the rows of a gate, and the rows of what the gate multiplies.
        Raises ValueError for a wrong size, or when the arena is full.
        """
        size = packed_bytes(outputs, inputs, weights, gated)
        if self._used + size > len(self._memory):
            raise ValueError(f"arena: {size} bytes more than the {len(self._memory) - self._used} that are left")
        start, self._used = self._used, self._used + -(-size // _LINE) * _LINE
        return PackedMatrix(self._memory[start : start + size], list(outputs), inputs, weights, gated)


def pack(weights: Bits, *, kind: Weights = "bfloat16", bias: Bits | None = None) -> PackedMatrix:
    """Pack weights, bfloat16 [outputs, inputs], with a bias, bfloat16 [outputs], in memory of their own.

    Raises ValueError for other shapes or dtypes, and for int8 when a weight is not finite.
    """
    _check("weights", weights, 2)
    if kind not in get_args(Weights):
        raise ValueError(f"kind: {kind!r} is not one of {', '.join(get_args(Weights))}")
    outputs, inputs = weights.shape
    matrix = Arena(packed_bytes([outputs], inputs, kind)).matrix([outputs], inputs, kind)
    matrix.write(0, 0, 0, weights.ctypes.data, weights.size)
    if bias is not None:
        _check("bias", bias, 1)
        matrix.set_bias(0, 0, bias.ctypes.data, bias.size)
    return matrix


def multiply(matrix: PackedMatrix, x: Bits) -> Bits:
    """x [rows, inputs] times a matrix of one part, plus its bias: [rows, outputs]. ValueError for another shape."""
    _check("x", x, 2)
    _check_width("x", x, matrix.inputs)
    result = np.empty((len(x), matrix.outputs[0]), np.uint16)
    if len(x):
        matrix.product(x.ctypes.data, x.size, result.ctypes.data, result.size)
    return result


def gated(gate_up: PackedMatrix, down: PackedMatrix, activation: str, x: Bits) -> Bits:
    """down(act(gate(x)) * up(x)): [rows, outputs of down], for x [rows, inputs of gate_up].

    `activation` is "silu", "gelu_tanh" or "gelu". Each of gate, its activation, up and their product is rounded to
    bfloat16, as PyTorch's modules one after the other do. Raises ValueError for what doesn't fit together.
    """
    _check("x", x, 2)
    _check_width("x", x, gate_up.inputs)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    result = np.empty((len(x), down.outputs[0]), np.uint16)
    if len(x):
        gate_up.gated(down, ACTIVATIONS[activation], x.ctypes.data, x.size, result.ctypes.data, result.size)
    return result


def normalise(x: Bits, weight: Bits, epsilon: float, *, plus_one: bool = False) -> Bits:
    """Root-mean-square normalisation of rows (Zhang and Sennrich, 2019): [rows, width], for weight [width].

    The normalised row is rounded to bfloat16 and then multiplied, as Llama's module does; with `plus_one` it is
    multiplied by 1 + weight and then rounded, as Gemma's does. Raises ValueError for shapes that don't fit.
    """
    _check("x", x, 2)
    _check("weight", weight, 1)
    _check_width("x", x, len(weight))
    result = np.empty_like(x)
    if len(x):
        rms_norm(x.ctypes.data, x.size, weight.ctypes.data, len(weight), epsilon, plus_one, result.ctypes.data)
    return result


def _check(name: str, array: Bits, dimensions: int) -> None:
    if array.dtype != np.uint16 or array.ndim != dimensions or not array.flags.c_contiguous:
        raise ValueError(
            f"{name}: {array.dtype} {array.shape} is not a contiguous array of bfloat16 (as uint16) "
            f"with {dimensions} dimensions"
        )


def _check_width(name: str, array: Bits, width: int) -> None:
    if array.shape[-1] != width:
        raise ValueError(f"{name}: its rows have {array.shape[-1]} numbers, not {width}")
