"""The compiled kernels (src/kvpager/native): what each concern binds. Wrong arguments raise ValueError."""

from typing import Any

import numpy as np
import numpy.typing as npt

from kvpager.ports import FloatArray, IntArray, States

Bytes = npt.NDArray[np.uint8]

# module.cpp
def isa() -> str: ...
def isas() -> list[str]: ...
def set_isa(name: str) -> None: ...
def threads() -> int: ...
def set_threads(count: int) -> None: ...
def allocate(bytes: int) -> Bytes: ...
def stream_read(array: Bytes, repeats: int) -> float: ...

# bind_attention.cpp
class Frames:
    """The bytes of a pool's frames."""

    def __init__(self, frames: int, dtype: str, page_size: int, head_dim: int) -> None: ...
    @property
    def count(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def memory(self) -> Bytes: ...
    def write(self, frames: IntArray, offset: int, keys: FloatArray, values: FloatArray) -> None: ...
    def read(self, frames: IntArray, counts: IntArray | None, keys: FloatArray, values: FloatArray) -> None: ...
    def load(self, frames: IntArray, pages: Bytes) -> None: ...
    def dump(self, frames: IntArray, pages: Bytes) -> None: ...
    def copy(self, source: IntArray, target: IntArray) -> None: ...
    def finish(self, frames: IntArray) -> None: ...
    def held(self, frames: IntArray, held: npt.NDArray[np.bool_]) -> None: ...
    @property
    def token_bytes(self) -> int: ...
    def tokens(self, frames: IntArray, offsets: IntArray, tokens: Bytes) -> None: ...

def attend(
    storage: Frames,
    frames: IntArray,
    heads: IntArray,
    starts: IntArray,
    counts: IntArray,
    kv_heads: int,
    queries: FloatArray,
    start: int,
    scale: float,
    window: int,
    softcap: float,
    output: FloatArray,
    lse: FloatArray,
    page_lse: FloatArray | None,
) -> None: ...
def settle(
    parts: list[tuple[FloatArray, FloatArray, FloatArray]],
    heads: IntArray,
    kv_heads: int,
    output: FloatArray | None,
    masses: FloatArray,
) -> None: ...

# bind_swap.cpp
def copy_pages(
    slabs: IntArray,
    starts: IntArray,
    capacity: int,
    slots: IntArray,
    memory: Bytes,
    rows: IntArray,
    to_slots: bool,
    sums: IntArray,
) -> None: ...

# digests

class DigestStore:
    def __init__(self, layers: int, kv_heads: int, head_dim: int, page_size: int) -> None: ...
    @property
    def capacity(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def scratch_nbytes(self) -> int: ...
    timed: bool
    @property
    def nanoseconds(self) -> int: ...
    def grow(self, rows: int) -> None: ...
    def build(self, layer: int, rows: npt.NDArray[np.int64], keys: npt.NDArray[np.float32]) -> None: ...
    @property
    def row_bytes(self) -> int: ...
    def dump(self, rows: npt.NDArray[np.int64], digests: Bytes) -> None: ...
    def load(self, rows: npt.NDArray[np.int64], digests: Bytes) -> None: ...
    def choose(
        self,
        layer: int,
        rows: npt.NDArray[np.int64],
        queries: npt.NDArray[np.float32],
        starts: npt.NDArray[np.int64],
        own_lse: npt.NDArray[np.float32],
        start: int,
        scale: float,
        window: int | None,
        softcap: float | None,
        sample: int,
        room: int,
        sinks: int,
        recent: int,
        chosen: npt.NDArray[np.bool_],
        ratio: npt.NDArray[np.float32],
    ) -> float: ...

# bind_linear.cpp: addresses of contiguous arrays (bfloat16; int64 for ids), each with its number of elements

class PackedMatrix:
    def __init__(self, memory: Bytes, outputs: list[int], inputs: int, weights: str, gated: bool) -> None: ...
    @staticmethod
    def packed_bytes(outputs: list[int], inputs: int, weights: str, gated: bool) -> int: ...
    def write(self, part: int, half: int, first: int, source: int, elements: int) -> None: ...
    def read(self, part: int, half: int, first: int, to: int, elements: int) -> None: ...
    def read_rows(self, ids: int, count: int, to: int, elements: int) -> None: ...
    def set_bias(self, part: int, half: int, source: int, elements: int) -> None: ...
    def product(self, x: int, elements: int, to: int, size: int) -> None: ...
    def product3(
        self, x: int, elements: int, to: int, size: int, to_2: int, size_2: int, to_3: int, size_3: int
    ) -> None: ...
    def gated(self, down: PackedMatrix, activation: int, x: int, elements: int, to: int, size: int) -> None: ...
    @property
    def outputs(self) -> list[int]: ...
    @property
    def inputs(self) -> int: ...
    @property
    def weights(self) -> str: ...
    @property
    def bytes(self) -> int: ...

def rms_norm(x: int, elements: int, weight: int, width: int, epsilon: float, plus_one: bool, to: int) -> None: ...
def rotate(
    queries: int,
    queries_size: int,
    keys: int,
    keys_size: int,
    cosine: int,
    sine: int,
    angles_size: int,
    tokens: int,
    width: int,
    to_queries: int,
    to_keys: int,
) -> None: ...

# bind_layer.cpp: addresses of contiguous bfloat16 arrays, each with its number of elements

class PackedLayer:
    def __init__(
        self,
        projections: PackedMatrix,
        output: PackedMatrix,
        gate_up: PackedMatrix,
        down: PackedMatrix,
        activation: int,
        head_dim: int,
        epsilon_before: float,
        epsilon_after: float,
        epsilon_heads: float,
    ) -> None: ...
    def before(
        self,
        x: int,
        elements: int,
        norm: int,
        query_norm: int,
        key_norm: int,
        cosine: int,
        sine: int,
        angles_size: int,
        queries: int,
        queries_size: int,
        keys: int,
        keys_size: int,
        values: int,
        values_size: int,
        /,
    ) -> None: ...
    def after(
        self, x: int, elements: int, attended: int, attended_size: int, norm: int, to: int, size: int, /
    ) -> None: ...

# bind_batch.cpp

class Tiles:
    """The tiles of a step in layers of one window."""

    def __init__(
        self,
        rows: IntArray,
        tiles: IntArray,
        given: tuple[IntArray, IntArray] | None,
        layers: int,
        kv_heads: int,
        page_size: int,
        group_pages: int,
        window: int,
        budget: tuple[int, int, int, int],
    ) -> None: ...
    @property
    def pages(self) -> int: ...
    @property
    def ratios(self) -> int: ...

class Batch:
    """The attention of all tiles in one layer."""

    def __init__(
        self,
        tiles: Tiles,
        storage: Frames,
        table: npt.NDArray[np.int32],
        layer: int,
        digest: DigestStore | None,
        queries: States,
        scale: float,
        softcap: float,
        output: States,
        results: tuple[npt.NDArray[Any], ...],
    ) -> None: ...
    def advance(self, room: int) -> tuple[IntArray, IntArray] | None: ...

def within(states: States, most: float) -> bool: ...
def write_tokens(
    storage: Frames,
    table: npt.NDArray[np.int32],
    layer: int,
    layers: int,
    kv_heads: int,
    pieces: IntArray,
    keys: States,
    values: States,
    digest: DigestStore | None,
    full: IntArray,
) -> None: ...
