"""Which kernel computes attention: the compiled one where it is built and fits, else the reference."""

from __future__ import annotations

import os
import warnings
from types import ModuleType

from kvpager.config import KVShape, PagerConfig
from kvpager.errors import ConfigError
from kvpager.kernels.cores import default_threads
from kvpager.kernels.reference import ReferenceKernel
from kvpager.ports import Kernel

__all__ = ["REBUILD", "native_available", "native_module", "open_kernel", "set_threads"]

REBUILD = "install kvpager again with a C++20 compiler (g++ or clang++) at hand"


def open_kernel(shape: KVShape, config: PagerConfig) -> Kernel:
    """The kernel that `config.kernel` names for a shape.

    "auto" takes the compiled one where it is built and can serve the shape (head_dim a multiple of 8 up to 256), else
    the reference, with a RuntimeWarning when it is not built. "native" raises ConfigError instead.
    """
    if config.kernel == "reference":
        return ReferenceKernel()
    if not native_available():
        if config.kernel == "native":
            raise ConfigError(f"kernel: 'native' is not built here; {REBUILD}")
        warnings.warn(f"the compiled kernels are not built: attention will be slow; {REBUILD}", RuntimeWarning, 2)
        return ReferenceKernel()
    from kvpager.kernels.native import NativeKernel, serves
    from kvpager.kernels.native_digest import MOST_HEAD_DIM

    if serves(shape):
        set_threads(None)
        return NativeKernel()
    if config.kernel == "native":
        raise ConfigError(
            f"kernel: 'native' serves a head_dim that is a multiple of 8 up to {MOST_HEAD_DIM}, not {shape.head_dim}"
        )
    return ReferenceKernel()


def native_module() -> ModuleType | None:
    """The compiled extension, or None where kvpager was installed without it."""
    try:
        import kvpager._native as native
    except ImportError:
        return None
    return native


def native_available() -> bool:
    """Whether the compiled kernels are built."""
    return native_module() is not None


def set_threads(count: int | None) -> None:
    """Let the compiled kernels of this process use `count` threads, 1 to 256.

    None sets the default, the physical cores, unless a number was set before. The environment variable KVPAGER_ISA
    names another instruction set than the best one. Nothing happens where the kernels are not built. Raises
    ConfigError for another number, or an instruction set that is not to be had.
    """
    native = native_module()
    if native is None:
        return
    isa = os.environ.get("KVPAGER_ISA")
    if isa and isa != native.isa():
        if isa not in native.isas():
            raise ConfigError(f"KVPAGER_ISA: {isa!r} is not one of {', '.join(native.isas())}")
        native.set_isa(isa)

    if count is None:
        if native.threads() == 0:
            native.set_threads(default_threads())
        return
    if not 1 <= count <= 256:
        raise ConfigError(f"threads: {count} is not in 1..256")
    native.set_threads(count)
