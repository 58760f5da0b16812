"""A model's fingerprint: SHA-256 over everything that its keys and values depend on, never over its name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from kvpager.kernels.cores import default_threads

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

__all__ = ["fingerprint"]

PIECE_BYTES = 8 * 2**20  # hashed at a time; part of what is hashed, so that threads don't change it
# Of a model's configuration, what tells who wrote it: the same weights elsewhere are the same model. Number formats are
# those of the tensors.
ORIGIN = ("transformers_version", "architectures", "dtype", "torch_dtype")


def fingerprint(model: PreTrainedModel, threads: int | None = None) -> str:
    """64 hexadecimal digits that change when a weight, a buffer or a number of the configuration does.

    It is SHA-256 over the model's class, its configuration (RoPE, scales, windows, activations) and all parameters
    and buffers by name, number format, shape and bytes; tensors that share memory are there once, under their first
    name. `threads` hash at once (None: one a physical core): about 0.1 s for 270 MB on two cores that
    have instructions for it.

    Take it before weights are packed: what is packed is derived, and depends on who computes.
    """
    whole = hashlib.sha256()
    _add(whole, f"{type(model).__module__}.{type(model).__qualname__}".encode())
    _add(whole, _settings(model))
    with ThreadPoolExecutor(threads or default_threads(), "kvpager-fingerprint") as pool:
        tensors = list(_tensors(model))
        digests = pool.map(_digest, (piece for _, tensor in tensors for piece in _pieces(tensor)))
        for name, tensor in tensors:
            _add(whole, f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
            for _ in range(-(-tensor.nbytes // PIECE_BYTES)):
                _add(whole, next(digests))
    return whole.hexdigest()


def _add(whole: hashlib._Hash, field: bytes) -> None:
    """Length-prefixed, so that no two runs of fields are the same bytes."""
    whole.update(len(field).to_bytes(8, "little") + field)


def _settings(model: PreTrainedModel) -> bytes:
    settings = {
        name: value
        for name, value in model.config.to_dict().items()
        if name not in ORIGIN and not name.startswith("_")  # _name_or_path and its kind
    }
    return json.dumps(settings, sort_keys=True, default=str).encode()


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Its bytes where they are, at most PIECE_BYTES at a time."""
    import torch

    flat = tensor.detach().as_subclass(torch.Tensor).contiguous().reshape(-1).view(torch.uint8)
    yield from torch.split(flat, PIECE_BYTES) if len(flat) else ()


def _digest(piece: torch.Tensor) -> bytes:
    return hashlib.sha256(piece.cpu().numpy().data).digest()
