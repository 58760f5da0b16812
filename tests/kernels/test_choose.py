"""Which kernel serves: with the compiled kernels, without them, and with an instruction set by name."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator

import pytest

from kvpager import KVShape, PagerConfig, _native
from kvpager.errors import ConfigError
from kvpager.kernels.choose import native_available, open_kernel, set_threads

SHAPE = KVShape(layers=1, kv_heads=2, query_heads=4, head_dim=16)
ODD = KVShape(layers=1, kv_heads=2, query_heads=4, head_dim=20)


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    isa, threads = _native.isa(), _native.threads()
    yield
    _native.set_isa(isa)
    _native.set_threads(max(threads, 1))


@pytest.fixture
def without_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where no compiler was: importing the extension fails."""
    monkeypatch.setitem(sys.modules, "kvpager._native", None)


def test_the_compiled_kernels_are_built_here() -> None:
    """Installing goes on without them when they can't be built: whoever runs the tests is to notice."""
    assert native_available()
    assert open_kernel(SHAPE, PagerConfig()).name == "native"


def test_a_shape_that_the_compiled_kernel_does_not_serve_gets_the_reference() -> None:
    assert open_kernel(ODD, PagerConfig()).name == "reference"
    with pytest.raises(ConfigError, match=r"head_dim that is a multiple of 8 up to 256, not 20"):
        open_kernel(ODD, PagerConfig(kernel="native"))


def test_the_reference_serves_when_it_is_asked_for() -> None:
    assert open_kernel(SHAPE, PagerConfig(kernel="reference")).name == "reference"


def test_without_the_extension_the_reference_serves_and_says_so_once(without_extension: None) -> None:
    assert not native_available()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            assert open_kernel(SHAPE, PagerConfig()).name == "reference"
    (warning,) = caught
    assert warning.category is RuntimeWarning
    assert "install kvpager again with a C++20 compiler" in str(warning.message)


@pytest.mark.promise(6)
def test_without_the_extension_the_compiled_kernel_is_refused_by_name(without_extension: None) -> None:
    with pytest.raises(ConfigError, match="kernel: 'native' is not built here"):
        open_kernel(SHAPE, PagerConfig(kernel="native"))


def test_without_the_extension_no_warning_for_who_asked_for_the_reference(without_extension: None) -> None:
    assert open_kernel(SHAPE, PagerConfig(kernel="reference")).name == "reference"
    set_threads(2)


@pytest.mark.parametrize("isa", _native.isas())
def test_the_environment_names_the_instruction_set(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPAGER_ISA", isa)
    open_kernel(SHAPE, PagerConfig())
    assert _native.isa() == isa


@pytest.mark.promise(6)
def test_an_instruction_set_that_is_not_to_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _native.isa()
    monkeypatch.setenv("KVPAGER_ISA", "mmx")
    with pytest.raises(ConfigError, match="KVPAGER_ISA: 'mmx' is not one of generic"):
        open_kernel(SHAPE, PagerConfig())
    assert _native.isa() == before


def test_a_number_of_threads_that_was_set_stays() -> None:
    set_threads(3)
    open_kernel(SHAPE, PagerConfig())
    assert _native.threads() == 3


@pytest.mark.promise(6)
@pytest.mark.parametrize("count", [0, -1, 257])
def test_a_wrong_number_of_threads_is_refused(count: int) -> None:
    before = _native.threads()
    with pytest.raises(ConfigError, match=f"threads: {count} is not in 1..256"):
        set_threads(count)
    assert _native.threads() == before
