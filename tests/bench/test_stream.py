"""The yardstick: it reads, whoever reads, and refuses what it can't read."""

from __future__ import annotations

import numpy as np
import pytest

from kvpager.bench import machine, stream
from kvpager.bench.stream import Stream
from kvpager.errors import ConfigError


def test_rates_are_kept_and_their_median_told() -> None:
    meter = Stream(1, size=2**20)
    first = meter.read(3)
    assert meter.rates
    assert first == sorted(meter.rates)[1]
    meter.read()
    assert len(meter.rates) == 4
    assert min(meter.rates) <= meter.gb_per_s <= max(meter.rates)


def test_without_the_extension_numpy_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "native_module", lambda: None)
    meter = Stream(2, size=2**20)
    assert meter.reader == "numpy"
    assert meter.read() > 0


def test_the_extension_reads_any_size_on_any_instruction_set() -> None:
    native = pytest.importorskip("kvpager._native")
    for name in native.isas():
        with machine.isa(name):
            for size in (1, 63, 4096, 5 * 2**20 + 7):
                data = native.allocate(size)
                assert native.stream_read(data, 2) > 0


def test_the_extension_refuses_what_it_cannot_read() -> None:
    native = pytest.importorskip("kvpager._native")
    data = np.ones(4096, np.uint8)
    with pytest.raises(ValueError, match="array: it is empty"):
        native.stream_read(data[:0], 1)
    for repeats in (0, 1001):
        with pytest.raises(ValueError, match=f"repeats: {repeats} is not in 1..1000"):
            native.stream_read(data, repeats)
    for wrong in (data.astype(np.float32), data[::2], data.reshape(2, -1)):
        with pytest.raises(TypeError):
            native.stream_read(wrong, 1)


def test_the_yardstick_uses_the_best_instruction_set_and_puts_the_other_back() -> None:
    native = pytest.importorskip("kvpager._native")
    with machine.isa("generic"):
        Stream(1, size=2**20).read()
        assert native.isa() == "generic"


def test_threads_are_put_back() -> None:
    native = pytest.importorskip("kvpager._native")
    torch = pytest.importorskip("torch")
    with machine.threads(2):
        pass  # a number is set now
    before = native.threads(), torch.get_num_threads()
    with machine.threads(3):
        assert (native.threads(), torch.get_num_threads()) == (3, 3)
    assert (native.threads(), torch.get_num_threads()) == before


def test_an_instruction_set_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="isa: 'mmx' is not one of"), machine.isa("mmx"):
        pass
