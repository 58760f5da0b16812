"""The optional packages that models need, and a quiet way to call them."""

from __future__ import annotations

import importlib.util
import io
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from typing import Any

from kvpager.errors import MissingDependency

__all__ = ["quiet", "require_packages"]

REQUIRED = ("torch", "transformers", "safetensors", "gguf", "accelerate")


def require_packages(names: tuple[str, ...] = REQUIRED, what: str = "models need", extra: str = "hf") -> None:
    """Raise MissingDependency, with the command that installs `extra`, unless all packages can be imported."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependency(f"{what} {', '.join(missing)}, not installed; run: pip install 'kvpager[{extra}]'")


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' notes off standard error, and its bars too unless that is a terminal.

    Its settings are as before afterwards. What goes wrong comes as an exception, not as a note.
    """
    import transformers.utils.logging

    logging: Any = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    interactive = sys.stderr.isatty()
    if not interactive:
        logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), ExitStack() as stack:
            warnings.simplefilter("ignore")
            if not interactive:  # the bar of GGUF files heeds no setting
                stack.enter_context(redirect_stderr(io.StringIO()))
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
