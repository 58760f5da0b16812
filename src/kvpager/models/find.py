"""From a model's name to local files."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvpager.errors import ModelCorrupt, ModelNotFound
from kvpager.models.packaged import PACKAGED, unpack

__all__ = ["Source", "find"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Source:
    """Local files of a model: a Hugging Face folder, or a GGUF file."""

    path: Path
    is_gguf: bool


def find(name: str, progress: Callable[[str], None]) -> Source:
    """The files that `name` stands for: a known name, a folder, a .gguf file, or a hub id (which may download).

    Raises ModelNotFound that says what was looked for and where, and what unpacking and downloading raise.
    Only a hub id without a local copy touches the network.
    """
    if name in PACKAGED:
        return Source(unpack(name, progress), is_gguf=False)
    path = Path(name).expanduser()
    if path.is_dir():
        return Source(path, is_gguf=False)
    if path.exists():
        with path.open("rb") as file:
            if path.suffix != ".gguf" and file.read(4) != b"GGUF":
                raise ModelCorrupt(f"{path} is neither a folder nor a GGUF file")
        return Source(path, is_gguf=True)
    if _HUB_ID.fullmatch(name) and path.suffix not in (".gguf", ".safetensors", ".bin"):
        from kvpager.models.hub import fetch

        return Source(fetch(name, progress), is_gguf=False)
    known = ", ".join(PACKAGED)
    raise ModelNotFound(
        f"{name}: nothing at {path.absolute()}; a model is a folder, a .gguf file, a Hugging Face id (owner/name), "
        f"or one of: {known}"
    )
