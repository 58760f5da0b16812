"""Checks of a Hugging Face folder before anything big is read: is all there, and is it whole."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpager.errors import ModelCorrupt, ModelNotFound

__all__ = ["FolderInfo", "read_folder", "tensor_counts"]

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
MAX_HEADER = 100 * 10**6  # what the safetensors library allows


@dataclass(frozen=True)
class FolderInfo:
    """A folder that looks whole: its config.json, and the number of weights by safetensors dtype ("BF16", ...)."""

    config: dict[str, Any]
    parameters: dict[str, int]


def read_folder(path: Path) -> FolderInfo:
    """Check config.json, the tokenizer's files, and the length of every safetensors file.

    Raises ModelNotFound when the folder holds no model, ModelCorrupt when a file is missing, damaged or pickled.
    """
    if not (path / "config.json").exists():
        ggufs = sorted(file.name for file in path.glob("*.gguf"))
        if ggufs:
            raise ModelNotFound(f"{path} has no config.json, but {ggufs[0]}; give that file: {path / ggufs[0]}")
        raise ModelCorrupt(f"{path} has no config.json, so it is no Hugging Face model folder")
    config = _json(path / "config.json")
    counts: dict[str, int] = {}
    for file in _weight_files(path):
        for dtype, count in tensor_counts(file).items():
            counts[dtype] = counts.get(dtype, 0) + count
    if not any((path / name).exists() for name in TOKENIZERS):
        raise ModelCorrupt(f"{path} has no tokenizer (none of {', '.join(TOKENIZERS)})")
    return FolderInfo(config, counts)


def _weight_files(path: Path) -> list[Path]:
    if (path / WEIGHTS).exists():
        return [path / WEIGHTS]
    if not (path / INDEX).exists():
        if any(next(path.glob(pattern), None) is not None for pattern in PICKLES):
            raise ModelCorrupt(f"{path} has its weights as pickles alone, which can run code; convert to {WEIGHTS}")
        raise ModelCorrupt(f"{path} has no weights: neither {WEIGHTS} nor {INDEX}")
    mapping = _json(path / INDEX).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise ModelCorrupt(f"{path / INDEX} has no weight_map")
    names = sorted({str(name) for name in mapping.values()})
    for name in names:
        if Path(name).name != name:
            raise ModelCorrupt(f"{path / INDEX} names a file outside the folder: {name!r}")
        if not (path / name).exists():
            raise ModelCorrupt(f"{path} lacks {name}, which {INDEX} names")
    return [path / name for name in names]


def tensor_counts(path: Path) -> dict[str, int]:
    """Numbers held in a safetensors file by dtype; raises ModelCorrupt unless the file's length is right."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if start.startswith(b"version "):
            raise ModelCorrupt(f"{path} is a Git LFS pointer, not weights; run: git lfs pull")
        if len(start) < 8 or not 0 < length <= min(MAX_HEADER, size - 8):
            raise ModelCorrupt(f"{path} is truncated or no safetensors file ({size} bytes); get it again")
        header = file.read(length)
    try:
        tensors = json.loads(header)
        tensors.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        counts: dict[str, int] = {}
        for entry in tensors.values():
            counts[entry["dtype"]] = counts.get(entry["dtype"], 0) + math.prod(entry["shape"])
    except (ValueError, AttributeError, KeyError, TypeError, IndexError):
        raise ModelCorrupt(f"{path}: its header is damaged; get it again") from None
    if end != size:
        raise ModelCorrupt(f"{path} has {size} bytes, and should have {end}; get it again")
    return counts


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelCorrupt(f"{path} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelCorrupt(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelCorrupt(f"{path} is not a JSON object")
    return content
