"""The worker's blocks as bytes: one array for each layer, into which vLLM's own tensors look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvpager.errors import ConfigError
from kvpager.ports import Bytes

__all__ = ["Pages", "views"]


def views(caches: Mapping[str, Any]) -> list[Bytes]:
    """vLLM's tensors [block, ...], by layer, as uint8 [block, bytes] that share their memory.

    Raises ConfigError for tensors whose blocks are not each one piece of the processor's memory, or of unequal sizes.
    """
    found: list[Bytes] = []
    for layer, cache in caches.items():
        where = f"the keys and values of {layer}"
        if not hasattr(cache, "untyped_storage"):
            raise ConfigError(f"{where} are a {type(cache).__name__}, and one tensor is needed")
        if cache.device.type != "cpu":
            raise ConfigError(f"{where} lie on {cache.device}, and only the processor's memory is supported")
        if cache.dim() < 2 or not cache[0].is_contiguous() or cache.stride(0) != cache[0].numel():
            shape, strides = tuple(cache.shape), tuple(cache.stride())
            raise ConfigError(f"{where} have blocks that are no single pieces: shape {shape}, strides {strides}")
        found.append(_bytes_of(cache))
    if len({view.shape for view in found}) != 1:
        raise ConfigError(f"the layers' blocks have unequal sizes: {sorted({view.shape for view in found})}")
    return found


def _bytes_of(cache: Any) -> Bytes:
    import torch

    flat: Bytes = cache.view(torch.uint8).reshape(cache.shape[0], -1).numpy()
    return flat


class Pages:
    """Blocks of all layers together, as they are stored: uint8 [layers, bytes of a layer's block]."""

    def __init__(self, layers: Sequence[Bytes], layout: str) -> None:
        """`layers` as of `views`; `layout` says how the bytes are to be read."""
        self._layers = list(layers)
        self.layout = layout
        self.count = len(self._layers)
        self.page_bytes = int(self._layers[0].shape[1])

    @property
    def nbytes(self) -> int:
        """Of one block."""
        return self.count * self.page_bytes

    def read(self, block: int) -> Bytes:
        """A copy of a block."""
        payload = np.empty((self.count, self.page_bytes), np.uint8)
        for page, layer in zip(payload, self._layers, strict=True):
            page[:] = layer[block]
        return payload

    def write(self, block: int, payload: Bytes) -> None:
        """Fill a block."""
        for page, layer in zip(payload, self._layers, strict=True):
            layer[block] = page
